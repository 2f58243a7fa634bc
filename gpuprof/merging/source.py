"""A source model of a merge: nodes, weights, and the size of every value as a function of the batch.

Exporters compute shapes by dozens of ops, which differ between two exports of the same network. With all sizes except
the batch bound, these computations are constant except for the batch, and `normalise` leaves only ops on data. A
runtime folds batch normalisations into convolutions when it loads a graph and holds the results: these are what models
can share.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gpuprof.domain.model import Tensor
from gpuprof.errors import InputError, shorten_message
from gpuprof.graph.dims import Dim, batch_axes, declared_dims
from gpuprof.graph.element_types import dtype_name
from gpuprof.graph.file import OnnxFile, read_onnx
from gpuprof.graph.load import infer_shapes
from gpuprof.graph.nodes import constant_tensor, graphs_of, list_captured
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
    nodes: list[NodeProto]  #: Nodes in topological order, cleaned up by `gpuprof.merging.source`.
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
            self._digests[weight] = digest_tensor(self.weights[weight])
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


def digest_tensor(tensor: TensorProto) -> str:
    """Return a hash of a tensor's type, shape and data."""
    hasher = hashlib.blake2b(f"{tensor.data_type}{list(tensor.dims)}".encode(), digest_size=16)
    hasher.update(tensor.raw_data or numpy_helper.to_array(tensor).tobytes())
    return hasher.hexdigest()


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
        raise InputError(
            f"{file.path} has opset {domains.get('')} and cannot be converted to {opset}: {shorten_message(error)}",
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
    """Return distinct names: a repeated name and its number, from 2 on, are joined by ``form``."""
    numbered: list[str] = []
    for first in names:
        name, count = first, 1
        while name in numbered:
            count += 1
            name = form.format(first, count)
        numbered.append(name)
    return numbered


_NOTHING = {"Identity", "Dropout"}
_REARRANGED = {"Transpose", "Reshape", "Identity"}


def normalise(source: SourceModel) -> None:
    """Clean up ``source`` in place.

    Known values become weights. Transposes and reshapes of weights are applied, and batch normalisations folded into
    the convolutions before them. Varying Reshape targets get -1 for the batch. Ops without effect are bypassed, and
    unused values removed.
    """
    renamed: dict[str, str] = {}
    nodes = []
    for node in source.nodes:
        _rename(node, renamed)
        if _is_known(source, node) or _rearrange(source, node):
            continue
        if node.op_type in _NOTHING and _is_identity(source, node):
            renamed[node.output[0]] = node.input[0]
            continue
        if node.op_type == "Reshape":
            _fix_target(source, node)
        nodes.append(node)
    source.nodes = nodes
    source.nodes = [norm for norm in nodes if not _fold_norm(source, norm)]
    source.nodes = _remove_unused(source, source.nodes)
    used_names = {name for node in source.nodes for name in (*node.input, *list_captured(node))} | set(source.outputs)
    source.weights = {name: tensor for name, tensor in source.weights.items() if name in used_names}


def attribute(node: NodeProto, name: str, default: object = None) -> object:
    """Return an attribute of a node as a Python value."""
    for item in node.attribute:
        if item.name == name:
            return helper.get_attribute_value(item)
    return default


def whole(node: NodeProto, name: str, default: int) -> int:
    """Return an integer attribute of a node."""
    value = attribute(node, name, default)
    return value if isinstance(value, int) else default


def add_weight(source: SourceModel, name: str, value: Array) -> None:
    """Add a constant to ``source``."""
    source.weights[name] = numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)


def _rename(node: NodeProto, renamed: dict[str, str]) -> None:
    for i, name in enumerate(node.input):
        if name in renamed:
            node.input[i] = renamed[name]
    for item in node.attribute:
        for nested in (*([item.g] if item.HasField("g") else []), *item.graphs):
            for graph in graphs_of(nested):
                for inner in graph.node:
                    for i, name in enumerate(inner.input):
                        inner.input[i] = renamed.get(name, name)
                for info in graph.output:
                    info.name = renamed.get(info.name, info.name)


def _is_known(source: SourceModel, node: NodeProto) -> bool:
    names = [name for name in node.output if name]
    if not all(name in source.constants and name not in source.outputs for name in names):
        return False
    for name in names:
        add_weight(source, name, source.constants[name])
    return True


def _rearrange(source: SourceModel, node: NodeProto) -> bool:
    names = [name for name in node.input if name]
    if node.op_type not in _REARRANGED or node.domain or not all(name in source.weights for name in names):
        return False
    output = node.output[0]
    if output in source.outputs:
        return False
    value = source.array(node.input[0])
    if node.op_type == "Transpose":
        order = attribute(node, "perm")
        value = np.transpose(value, list(order) if isinstance(order, list | tuple) else None)
    elif node.op_type == "Reshape":
        value = value.reshape([dim.at(1) for dim in source.values[output].dims])
    add_weight(source, output, value)
    return True


def _is_identity(source: SourceModel, node: NodeProto) -> bool:
    if node.output[0] in source.outputs or len([name for name in node.output if name]) > 1:
        return False
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        training = source.weights.get(node.input[2])
        return training is not None and not numpy_helper.to_array(training).any()
    return True


def _fold_norm(source: SourceModel, norm: NodeProto) -> bool:
    """Fold a batch normalisation of constants into the convolution before it; return whether it could be."""
    if norm.op_type != "BatchNormalization" or norm.domain or len(norm.output) > 1:
        return False
    conv = source.maker(norm.input[0])
    if conv is None or conv.op_type != "Conv" or conv.domain or source.uses(norm.input[0]) > 1:
        return False
    constants = [name for name in (*conv.input[1:], *norm.input[1:5]) if name]
    if not all(name in source.weights for name in constants) or source.array(conv.input[1]).dtype.kind != "f":
        return False
    weight = source.array(conv.input[1])
    scale, shift, mean, variance = (np.asarray(source.array(name), np.float64) for name in norm.input[1:5])
    bias = np.asarray(source.array(conv.input[2]), np.float64) if len(conv.input) > 2 and conv.input[2] else 0.0
    epsilon = attribute(norm, "epsilon", 1e-5)
    factor = scale / np.sqrt(variance + (epsilon if isinstance(epsilon, float) else 0.0))
    folded = np.asarray(weight, np.float64) * factor.reshape(-1, *(1 for _ in weight.shape[1:]))
    names = [_new_name(source, f"{norm.output[0]}/{part}") for part in ("weight", "bias")]
    add_weight(source, names[0], folded.astype(weight.dtype))
    add_weight(source, names[1], ((bias - mean) * factor + shift).astype(weight.dtype))
    conv.input[:] = [conv.input[0], *names]
    conv.output[0] = norm.output[0]
    return True


def _new_name(source: SourceModel, name: str) -> str:
    while name in source.values or name in source.weights:
        name += "_"
    return name


def _fix_target(source: SourceModel, node: NodeProto) -> None:
    dims = source.values[node.output[0]].dims
    varying = [axis for axis, dim in enumerate(dims) if dim.per_batch]
    if node.input[1] in source.weights or len(varying) != 1 or any(dim.fixed == 0 for dim in dims if not dim.per_batch):
        return
    target = _new_name(source, f"{node.output[0]}/target")
    add_weight(source, target, np.array([-1 if dim.per_batch else dim.fixed for dim in dims], np.int64))
    node.input[1] = target


def _remove_unused(source: SourceModel, nodes: list[NodeProto]) -> list[NodeProto]:
    needed_names = set(source.outputs)
    used_nodes = []
    for node in reversed(nodes):
        if any(name in needed_names for name in node.output):
            used_nodes.append(node)
            needed_names |= {*node.input, *list_captured(node)}
    return used_nodes[::-1]
