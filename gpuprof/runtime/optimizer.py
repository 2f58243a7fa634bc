"""Graph of a model after ONNX Runtime's optimizer, obtained without reading the model's weights.

Fusion of ops decides the cost of a model, and only the runtime can tell it. The optimizer uses the graph and small
constants; of large weights it uses only the shape, so zeros from a sparse file replace them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.domain.runtime_variant import RuntimeVariant
from gpuprof.errors import InputError, UnavailableError
from gpuprof.graph.executed_graph import ExecutedNode, read_executed
from gpuprof.runtime.child_process import CrashError, call_apart

if TYPE_CHECKING:
    from gpuprof.graph.file import OnnxFile


_ZEROS = "zeros"
#: Oldest opset with kernels in ONNX Runtime (its page on compatibility: "ONNX 1.2+", which is opset 7).
_OLDEST_OPSET = 7
_known: dict[str, tuple[ExecutedNode, ...] | None] = {}


def executed_nodes(path: Path) -> tuple[ExecutedNode, ...] | None:
    """Return the nodes of ``path`` executed by ONNX Runtime on a CPU; None without the runtime, or if refused."""
    from gpuprof.graph.file import read_onnx

    file = read_onnx(path)
    if file.sha256 not in _known:
        nodes = None
        with contextlib.suppress(CrashError):
            if not _is_large(file):
                light, weights = file.model.SerializeToString(), tuple(file.weights.values())
                nodes = call_apart(_optimize_declared, path, light, weights)
        _known[file.sha256] = nodes
    return _known[file.sha256]


def find_refusal(path: Path, on_gpu: bool) -> InputError | None:
    """Return why ONNX Runtime cannot serve a file; None if it can, or if this cannot be tested here.

    Models of more than 2 GiB are not loaded. ``on_gpu``: the file is meant for a GPU, so that an op without an
    implementation for a CPU is no reason, unless its opset is older than ONNX Runtime's kernels.
    """
    from gpuprof.graph.file import read_onnx
    from gpuprof.graph.served_interface import find_uncarried

    file = read_onnx(path)
    if uncarried := find_uncarried(file):
        return uncarried
    # Shapes in external data are read here, but not by ONNX Runtime: only the file itself shows whether it loads.
    if _is_large(file) or (not file.external and executed_nodes(path) is not None):
        return None
    try:
        # With its weights: zeros in their place may be what was refused.
        call_apart(_load, path, on_gpu and file.opsets.get("", 1) >= _OLDEST_OPSET)
    except UnavailableError:
        return None
    except InputError as error:
        return error
    return None


def _load(path: Path, may_lack_kernels: bool) -> None:
    from gpuprof.runtime.session import open_session

    try:
        open_session(path, threads=1)
    except InputError as error:
        if not (may_lack_kernels and type(error.__cause__).__name__ == "NotImplemented"):
            raise


def _is_large(file: OnnxFile) -> bool:
    from gpuprof.graph.file import LARGEST_FILE_BYTES

    # ONNX Runtime holds and writes all weights, even if only zeros.
    return sum(weight.bytes for weight in file.weights.values()) > LARGEST_FILE_BYTES


def _optimize_declared(path: Path, light: bytes, weights: Iterable[Tensor]) -> tuple[ExecutedNode, ...] | None:
    """Return the nodes executed by the runtime for a model whose large weights are only declared."""
    try:
        import onnxruntime as ort
    except ImportError:
        return None
    from gpuprof.errors import runtime_errors
    from gpuprof.runtime.session import session_options

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(*runtime_errors(), OSError, KeyError):
        model, optimized = Path(folder, "model.onnx"), Path(folder, "optimized.onnx")
        _write_declared(model, light, weights)
        options = session_options(1, optimized)
        options.add_session_config_entry("session.disable_prepacking", "1")  # nothing is going to run
        ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        return read_executed(optimized)
    return None


def _write_declared(path: Path, light: bytes, weights: Iterable[Tensor]) -> None:
    """Write the model with its declared weights as external data, all in the same sparse file."""
    from onnx import ModelProto, TensorProto

    from gpuprof.graph.element_types import elem_type

    model = ModelProto.FromString(light)
    graph = model.graph
    present = {tensor.name for tensor in graph.initializer} | {name for node in graph.node for name in node.output}
    absent = [weight for weight in weights if weight.name not in present]
    names = {weight.name for weight in absent}
    inputs = [info for info in graph.input if info.name not in names]  # an input would not be constant
    del graph.input[:]
    graph.input.extend(inputs)
    for weight in absent:
        tensor = TensorProto(
            name=weight.name, dims=weight.shape, data_type=elem_type(weight.dtype), data_location=TensorProto.EXTERNAL
        )
        for key, value in (("location", _ZEROS), ("offset", "0"), ("length", str(weight.bytes))):
            tensor.external_data.add(key=key, value=value)
        graph.initializer.append(tensor)
    path.write_bytes(model.SerializeToString())
    with Path(path.parent, _ZEROS).open("wb") as zeros:
        os.truncate(zeros.fileno(), max((weight.bytes for weight in absent), default=1))


_EIGHT_BITS = frozenset({"int8", "uint8"})
_ARITHMETIC = ("float", "bfloat", "complex")


def executed_variant(graph: ModelGraph, device: Device) -> RuntimeVariant:
    """Return the variant of ``graph`` executed by a session of `open_session` on ``device``."""
    return RuntimeVariant("onnxruntime", "fused", arithmetic_precision(graph, device))


def arithmetic_precision(graph: ModelGraph, device: Device) -> str | None:
    """Return the type in which most of a model's FLOPs are computed; None if unknown.

    The inputs' type may differ: a language model takes whole numbers. On a GPU with TF32, products of float32 are
    computed in TF32, as configured in every session.
    """
    work: Counter[str] = Counter()
    for op in graph.ops:
        if op.flops and (dtype := _operand_type(op)) is not None:
            work[dtype] += op.flops
    if not work:
        dtypes = [tensor.dtype for tensor in (*graph.weights, *graph.inputs) if tensor.dtype.startswith(_ARITHMETIC)]
        work.update(dtypes)
    if not work:
        return None
    ((main_type, _),) = work.most_common(1)
    return "tf32" if main_type == "float32" and "tfloat32" in device.flops_per_s else main_type


def _operand_type(op: Op) -> str | None:
    """Return the type of an op's first operand that is not an index; ``int8`` for signed and unsigned eight bits."""
    for tensor in op.inputs:
        if tensor.dtype in _EIGHT_BITS:
            return "int8"
        if tensor.dtype.startswith(_ARITHMETIC):
            return tensor.dtype
    return None
