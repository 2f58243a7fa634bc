"""Runs an ONNX model in PyTorch: a stand-in for ONNX Runtime's session where that has no provider for the GPU.

Eager PyTorch fuses nothing and launches each operator from Python, so that it is slower than a runtime made for
inference; figures measured with it say so (provider `TORCH_CUDA`). Each operator runs in a range named after its
first output, which ties every kernel to the node that caused it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from gpuprof.errors import InputError, UnavailableError
from gpuprof.graph.file import read_onnx
from gpuprof.runtime.green_context import green_stream, use_stream
from gpuprof.runtime.providers import MPS_PIPE, NODE_RANGE, TORCH_CPU, TORCH_CUDA
from gpuprof.runtime.torch_layers import OPERATORS
from gpuprof.runtime.torch_ops import HOST_READ


def set_tf32(torch: Any, wanted: bool) -> None:
    """Let PyTorch compute products and convolutions of float32 in TF32, or not.

    By itself PyTorch computes convolutions in TF32 and products in float32, where ONNX Runtime computes both in TF32.
    These are the switches that every version has. Those that PyTorch 2.9 added for each kind of operation, set to
    "ieee", leave the older ones in a state in which PyTorch cannot read them: ``torch.export`` does, and fails.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wanted


Array = NDArray[Any]
Range = Callable[[str], AbstractContextManager[Any]]

_DEVICES = {TORCH_CPU: "cpu", TORCH_CUDA: "cuda"}
#: Types as ONNX Runtime writes them.
_TYPES = {
    1: "float", 2: "uint8", 3: "int8", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "double",
    16: "bfloat16",
}  # fmt: skip
#: What is wrong with the GPU or its memory, not with the model; the second is of PyTorch 2.8 and later.
_DEVICE_ERRORS: tuple[type[Exception], ...] = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)
#: Weights of whole numbers up to this many describe shapes and stay on the host.
_MOST_HOST = 64
_NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """An input or an output, as ONNX Runtime's sessions describe theirs."""

    name: str
    type: str  #: ``"tensor(float)"`` and the like.
    shape: tuple[int | str | None, ...]  #: A free dimension has its name, or none.


@dataclass(frozen=True, slots=True)
class _Node:
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    @property
    def range(self) -> str:
        """Name of the range around it: not every node has a name, but each has an output that is its own."""
        return f"{NODE_RANGE}{self.outputs[0]}"


@dataclass(frozen=True, slots=True)
class _Step:
    """One node in a plan."""

    node: _Node
    #: Inputs by their position that follow from weights and shapes alone, where the node reads them.
    known: Mapping[int, torch.Tensor]
    over: tuple[str, ...]  #: Values that are not needed after it.


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is run for inputs of certain shapes, and outputs that follow from weights and shapes alone."""

    steps: tuple[_Step, ...]
    answers: Mapping[str, torch.Tensor]


class TorchSession:
    """A model in PyTorch, with the part of ``onnxruntime.InferenceSession`` that gpuprof uses.

    What follows from weights and shapes alone is computed once for inputs of the same shapes, and a value is let go
    after its last reader, as runtimes do. Raises `InputError` when the file is no ONNX model or has an operator without
    counterpart; the message names all of them; `UnavailableError` when PyTorch sees no GPU. ``threads``: threads within
    an operator on a CPU; ``provider``: `TORCH_CPU` or `TORCH_CUDA`; ``ranges``: opens a range of a profiler around each
    operator: `NODE_RANGE` and the name of its first output.
    """

    def __init__(self, path: Path, threads: int, provider: str, ranges: Range | None = None) -> None:
        if provider == TORCH_CUDA and (reason := torch_gpu_unavailable_reason()) is not None:
            raise UnavailableError(f"this PyTorch sees no GPU: {reason}")
        torch.set_num_threads(threads)
        self._stream = None
        if provider == TORCH_CUDA:
            # As ONNX Runtime computes by default (`CUDA_OPTIONS`): figures of both are then of one precision.
            set_tf32(torch, True)
            self._stream = green_stream(torch)
        self._ranges: Range = ranges or (lambda name: nullcontext())
        self._device = torch.device(_DEVICES[provider])
        read_onnx(path)  # checks what comes from outside, and its external files
        model = onnx.load(path)
        self._opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
        weights = {weight.name for weight in model.graph.initializer}
        self._nodes = tuple(_read_node(node) for node in model.graph.node)
        _check_operators(self._nodes, path)
        self._inputs = tuple(_make_info(value) for value in model.graph.input if value.name not in weights)
        self._outputs = tuple(_make_info(value) for value in model.graph.output)
        self._weights = {one.name: self._place_weight(_to_tensor(one)) for one in model.graph.initializer}
        self._path, self._plans = path, dict[tuple[Any, ...], _Plan]()

    def get_inputs(self) -> tuple[ValueInfo, ...]:
        """Return the inputs."""
        return self._inputs

    def get_outputs(self) -> tuple[ValueInfo, ...]:
        """Return the outputs."""
        return self._outputs

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Array]) -> list[Array]:
        """Return the outputs called ``names`` (None: all) on the host, once the device has finished.

        Raises `InputError` when PyTorch refuses the inputs or an operator; `UnavailableError` when the GPU's memory is
        too small, or the GPU fails.
        """
        try:
            return self._run(names, feeds)
        except _DEVICE_ERRORS as error:
            detail = str(error).strip().split("\n", 1)[0]
            raise UnavailableError(f"{self._path} fails on the GPU: {detail}", "try a smaller batch") from error

    def _run(self, names: Sequence[str] | None, feeds: Mapping[str, Array]) -> list[Array]:
        wanted = [one.name for one in self._outputs] if names is None else list(names)
        # Names and shapes decide the plan, not values: what follows from values is computed in each run.
        shapes = tuple((name, value.shape) for name, value in sorted(feeds.items()))
        with torch.inference_mode(), use_stream(torch, self._stream):
            values = {name: self._copy_to_device(value) for name, value in feeds.items()}
            if shapes not in self._plans:
                self._plans[shapes] = self._plan(dict(values))
            plan = self._plans[shapes]
            values |= plan.answers
            for step in plan.steps:
                self._execute(step.node, values, step.known)
                for name in step.over:
                    values.pop(name, None)  # an optional output may not have been made
            return [values[name].cpu().numpy() for name in wanted]

    def _plan(self, values: dict[str, Any]) -> _Plan:
        """Run once, freeing each value after its last reader, and keep what depends on weights and shapes alone."""
        outputs = {one.name for one in self._outputs}
        fixed, nodes = _split_fixed(self._nodes, self._weights)
        read_later = {name for node in nodes for name in node.inputs} & fixed
        last_uses = _find_last_uses(self._nodes)
        values |= self._weights
        for position, node in enumerate(self._nodes):
            self._execute(node, values)
            for name in last_uses.get(position, ()):
                if name not in outputs and name not in read_later:
                    values.pop(name, None)
        known = values_read_by_node(
            [(node.op_type, node.inputs) for node in nodes], {name: values[name] for name in read_later}, self._device
        )
        answers = {name: values[name] for name in fixed & outputs}
        values.clear()
        if self._device.type == "cuda":  # what only the first run took must not count as what the model holds
            torch.cuda.empty_cache()
        over = _find_last_uses(nodes)
        steps = tuple(
            _Step(node, known[place], tuple(name for name in over.get(place, ()) if name not in fixed | outputs))
            for place, node in enumerate(nodes)
        )
        return _Plan(steps, answers)

    def _execute(self, node: _Node, values: dict[str, Any], known: Mapping[int, torch.Tensor] = _NOTHING) -> None:
        given = [
            known[place] if place in known else values[name] if name else None for place, name in enumerate(node.inputs)
        ]
        try:
            with self._ranges(node.range):
                made = OPERATORS[node.op_type](node.attributes, self._opset, given)
        except _DEVICE_ERRORS:
            raise
        except (RuntimeError, IndexError, KeyError, TypeError, ValueError) as error:
            detail = str(error).split("\n", 1)[0]
            raise InputError(
                f"PyTorch refuses the {node.op_type} that makes {node.outputs[0]} in {self._path}: {detail}"
            ) from error
        values.update(zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=False))

    def _place_weight(self, value: torch.Tensor) -> torch.Tensor:
        """Put a weight on the device, unless it describes a shape."""
        if value.dtype == torch.int64 and value.dim() < 2 and value.numel() <= _MOST_HOST:
            return value
        return value.to(self._device)

    def _copy_to_device(self, value: Array) -> torch.Tensor:
        return torch.from_numpy(np.require(value, requirements=["C", "W"])).to(self._device)


def torch_gpu_unavailable_reason() -> str | None:
    """Return None when PyTorch can use a GPU, else why not, in one line: CUDA's error message."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        daemon = f"; MPS was asked for: {os.environ[MPS_PIPE]}" if MPS_PIPE in os.environ else ""
        return f"{reason}{daemon}"
    return "CUDA starts, and shows no device"


def _split_fixed(nodes: Sequence[_Node], weights: Mapping[str, Any]) -> tuple[set[str], list[_Node]]:
    """Return the values that follow from weights and shapes alone, and the nodes that make all others."""
    fixed, nodes_to_run = set(weights), []
    for node in nodes:
        if node.op_type == "Shape" or all(not name or name in fixed for name in node.inputs):
            fixed |= set(node.outputs)
        else:
            nodes_to_run.append(node)
    return fixed, nodes_to_run


def _find_last_uses(nodes: Sequence[_Node]) -> dict[int, list[str]]:
    """Return by a node's position the values that no node after it reads."""
    last = {name: position for position, node in enumerate(nodes) for name in (*node.inputs, *node.outputs) if name}
    uses: dict[int, list[str]] = {}
    for name, position in last.items():
        uses.setdefault(position, []).append(name)
    return uses


def values_read_by_node(
    nodes: Sequence[tuple[str, Sequence[str]]], values: Mapping[str, torch.Tensor], device: torch.device
) -> list[dict[int, torch.Tensor]]:
    """Return for each node (operator, names of inputs) those of ``values`` that it reads, by position.

    Each lies where it is read: on the host what describes shapes and bounds, all else on ``device``.
    """
    copies: dict[tuple[str, str], torch.Tensor] = {}
    reads = []
    for op_type, names in nodes:
        read = {}
        for place, name in enumerate(names):
            if name in values:
                target = torch.device("cpu") if place in HOST_READ.get(op_type, ()) else device
                read[place] = copies.setdefault((name, target.type), values[name].to(target))
        reads.append(read)
    return reads


def _check_operators(nodes: Sequence[_Node], path: Path) -> None:
    missing = sorted({node.op_type for node in nodes} - set(OPERATORS))
    if missing:
        raise InputError(
            f"{path} has operators that are not run by PyTorch here: {', '.join(missing)}",
            "pip install 'onnxruntime-gpu[cuda,cudnn]' in place of onnxruntime: it runs every operator",
        )


def _read_node(node: NodeProto) -> _Node:
    attributes = {one.name: _read_attribute(one) for one in node.attribute}
    if node.op_type == "Split":
        attributes["outputs"] = len(node.output)
    op_type = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}:{node.op_type}"
    return _Node(op_type, tuple(node.input), tuple(node.output), attributes)


def _make_info(value: ValueInfoProto) -> ValueInfo:
    tensor = value.type.tensor_type
    shape = tuple(side.dim_value if side.HasField("dim_value") else side.dim_param or None for side in tensor.shape.dim)
    return ValueInfo(value.name, f"tensor({_TYPES.get(tensor.elem_type, 'unknown')})", shape)


def _read_attribute(attribute: AttributeProto) -> Any:
    if attribute.type == AttributeProto.TENSOR:
        return _to_tensor(attribute.t)
    return helper.get_attribute_value(attribute)


def _to_tensor(weight: TensorProto) -> torch.Tensor:
    values = numpy_helper.to_array(weight)
    if weight.data_type == TensorProto.BFLOAT16:  # NumPy has no such type
        return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(values))
