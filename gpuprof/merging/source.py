"""A source model of a merge: nodes, weights, and the size of every value as a function of the batch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from gpuprof.domain.model import Tensor
from gpuprof.errors import InputError
from gpuprof.graph.batch_axes import Dim, batch_axes
from gpuprof.graph.dims import declared_dims
from gpuprof.graph.element_types import dtype_name
from gpuprof.graph.file import OnnxFile, read_onnx
from gpuprof.graph.load import infer_shapes
from gpuprof.graph.nodes import constant_tensor, list_captured
from gpuprof.graph.shapes import Shapes

Array = npt.NDArray[np.generic]

#: First opset in which Slice takes its bounds as inputs, as a free batch requires.
OLDEST_OPSET = 10


@dataclass(frozen=True, slots=True)
class Size:
    """A dimension: ``fixed + per_batch × batch``."""

    fixed: int
    per_batch: int = 0

    def at(self, batch: int) -> int:
        """Return the size at a batch."""
        return self.fixed + self.per_batch * batch


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a graph: its element type and its dimensions."""

    name: str
    dtype: str
    dims: tuple[Size, ...]

    def bytes_at(self, batch: int) -> int:
        """Return the size of the value in bytes at a batch."""
        return Tensor(self.name, self.dtype, tuple(dim.at(batch) for dim in self.dims)).bytes


@dataclass(slots=True)
class SourceModel:
    """A model read for merging."""

    name: str  #: Name in the merged model: the prefix of its inputs and outputs.
    path: Path
    sha256: str
    opsets: dict[str, int]  #: Version by domain.
    ir_version: int
    nodes: list[NodeProto]  #: Nodes in topological order, cleaned up by `gpuprof.merging.normalisation`.
    weights: dict[str, TensorProto]  #: Constants by name, with their data.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: dict[str, Value]
    constants: dict[str, Array]  #: Small values that depend on shapes and constants only and are equal at every batch.
    #: (input, axis) whose size is the batch at run time; None if the batch is fixed, in a model read for its weights.
    batch_input: tuple[str, int] | None
    external: bool  #: Whether weights are in files of their own.
    dims: Mapping[str, int]  #: Sizes of the free dimensions other than the batch.
    _digests: dict[str, str] = field(default_factory=dict)
    _arrays: dict[str, Array] = field(default_factory=dict)
    _indexed: list[NodeProto] | None = None
    _makers: dict[str, NodeProto] = field(default_factory=dict)
    _uses: Counter[str] = field(default_factory=Counter)

    def array(self, weight: str) -> Array:
        """Return the data of a weight."""
        if weight not in self._arrays:
            self._arrays[weight] = numpy_helper.to_array(self.weights[weight])
        return self._arrays[weight]

    def digest(self, weight: str) -> str:
        """Return a hash of a weight's type, shape and data: equal for equal weights."""
        if weight not in self._digests:
            tensor = self.weights[weight]
            data = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
            hasher = hashlib.blake2b(f"{tensor.data_type}{list(tensor.dims)}".encode(), digest_size=16)
            hasher.update(data)
            self._digests[weight] = hasher.hexdigest()
        return self._digests[weight]

    def weight_bytes(self, weight: str) -> int:
        """Return the size of a weight."""
        return _describe(self.weights[weight], weight).bytes

    def maker(self, name: str) -> NodeProto | None:
        """Return the node that computes a value; None for inputs and weights."""
        self._index()
        return self._makers.get(name)

    def uses(self, name: str) -> int:
        """Return the number of uses of a value: by nodes, and as an output."""
        self._index()
        return self._uses[name] + (name in self.outputs)

    def _index(self) -> None:
        if self._indexed is self.nodes:  # normalisation replaces the list
            return
        self._makers = {name: node for node in self.nodes for name in node.output if name}
        self._uses = Counter(name for node in self.nodes for name in {*node.input, *list_captured(node)})
        self._indexed = self.nodes


def read_source(
    path: Path, name: str, dims: Mapping[str, int] | None = None, opset: int | None = None, any_length: bool = False
) -> SourceModel:
    """Read a model for merging.

    Raises `InputError` if the file is no valid model, has a fixed batch, or a free dimension other than its batch not
    bound by ``dims``, keeps sparse weights, or cannot be converted. ``dims``: sizes of free dimensions other than the
    batch, by name; unknown names are ignored; ``opset``: version of ONNX's operators to convert the model to;
    ``any_length``: bind remaining free dimensions to their usual sizes and accept a fixed batch, which suffices for
    reading weights, not for merging.
    """
    file = read_onnx(path)
    model = _convert_opset(file, opset)
    graph = model.graph
    weights = _collect_weights(file, model)
    infos = [info for info in graph.input if info.name not in file.weights]
    declared = {info.name: declared_dims(info) or () for info in infos}
    axes = batch_axes(declared)
    if not axes and not any_length:
        raise InputError(
            f"{path} has a fixed batch, so its requests cannot share a call with others",
            f"gpuprof zoo rebatch {path} -o FILE frees it",
        )
    bound = {} if any_length else _bind_dims(declared, axes, dict(dims or {}), path)
    fixed = next((int(shape[0]) for shape in declared.values() if shape and isinstance(shape[0], int)), 1)
    # At two batches: sizes that differ between them grow with the batch.
    file = replace(file, model=model, weights={name: _describe(tensor, name) for name, tensor in weights.items()})
    small, large = (infer_shapes(file, batch, bound) for batch in ((2, 3) if axes else (fixed, fixed)))
    return SourceModel(
        name=name,
        path=path,
        sha256=file.sha256,
        opsets={opset.domain: opset.version for opset in model.opset_import},
        ir_version=model.ir_version,
        nodes=[NodeProto.FromString(n.SerializeToString()) for n in graph.node if n.op_type != "Constant"],
        weights=weights,
        inputs=tuple(info.name for info in infos),
        outputs=tuple(info.name for info in graph.output),
        values=_solve_sizes(small, large),
        constants=_find_constant_values(small, large),
        batch_input=next(iter(axes.items())) if axes else None,
        external=bool(file.external),
        dims=bound,
    )


def _convert_opset(file: OnnxFile, opset: int | None) -> ModelProto:
    domains = {o.domain if o.domain != "ai.onnx" else "": o.version for o in file.model.opset_import}
    if opset is None or domains.get("") == opset:
        return file.model
    try:
        return onnx.version_converter.convert_version(file.model, opset)
    except Exception as error:  # the converter passes on any exception of its C++ code and its checker
        message = " ".join(str(error).split())[:200]
        raise InputError(
            f"{file.path} has opset {domains.get('')} and cannot be converted to {opset}: {message}",
            "export the models with the same opset",
        ) from error


def _bind_dims(
    declared: Mapping[str, tuple[Dim, ...]], axes: Mapping[str, int], dims: Mapping[str, int], path: Path
) -> dict[str, int]:
    """Return the sizes of the free dimensions other than the batch; raise `InputError` if a size is not given."""
    bound = {}
    for name, shape in declared.items():
        for axis, dim in enumerate(shape):
            if isinstance(dim, int) or axes.get(name) == axis:
                continue
            key = dim if dim is not None else f"{name}:{axis}"
            if key not in dims:
                raise InputError(
                    f"{path}: input {name} has the free dimension {key!r} beside its batch, and inputs of different "
                    "lengths cannot be concatenated",
                    f"fix it for the merged model with --dim {key}=SIZE",
                )
            bound[key] = dims[key]
    return bound


def _collect_weights(file: OnnxFile, model: ModelProto) -> dict[str, TensorProto]:
    """Return all constants with their data, those of Constant nodes included."""
    loaded = onnx.load(str(file.path))
    if loaded.graph.sparse_initializer:
        raise InputError(f"{file.path} keeps sparse weights, which the merger does not read", "export it densely")
    tensors = {tensor.name: tensor for tensor in loaded.graph.initializer}
    for graph in (model.graph, loaded.graph):
        for node in graph.node:
            if node.op_type == "Constant" and node.output[0] not in tensors:
                tensors[node.output[0]] = constant_tensor(node)
    for tensor in model.graph.initializer:  # added by a conversion of the opset
        tensors.setdefault(tensor.name, tensor)
    return tensors


def _describe(tensor: TensorProto, name: str) -> Tensor:
    return Tensor(name, dtype_name(tensor.data_type), tuple(tensor.dims))


def _solve_sizes(at_two: Shapes, at_three: Shapes) -> dict[str, Value]:
    values = {}
    for name, tensor in at_two.tensors.items():
        sizes = zip(tensor.shape, at_three.tensors[name].shape, strict=True)
        dims = tuple(Size(small - 2 * (large - small), large - small) for small, large in sizes)
        values[name] = Value(name, tensor.dtype, dims)
    return values


def _find_constant_values(at_two: Shapes, at_three: Shapes) -> dict[str, Array]:
    values = at_three.values
    return {
        name: value
        for name, value in at_two.values.items()
        if name in values and value.shape == values[name].shape and np.array_equal(value, values[name])
    }


def number_names(names: Iterable[str], form: str) -> list[str]:
    """Return distinct names: repeated names become ``form`` of the name and a number from 2 on."""
    numbered: list[str] = []
    for first in names:
        name, count = first, 1
        while name in numbered:
            count += 1
            name = form.format(first, count)
        numbered.append(name)
    return numbered
