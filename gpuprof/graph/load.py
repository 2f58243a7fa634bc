"""Reads an ONNX file as a `ModelGraph`: all shapes known at a batch, all ops with FLOPs and bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.errors import InputError
from gpuprof.graph.dims import (
    COUNTED,
    LONGER_DIM,
    SHORTER_DIMS,
    FreeDim,
    bind_inputs,
    bound_dims,
    declared_dims,
    fixed_batch,
    list_free_dims,
    past_dims,
    sequence_dims,
)
from gpuprof.graph.element_types import dtype_name
from gpuprof.graph.file import OnnxFile, read_onnx
from gpuprof.graph.nodes import Array, graphs_of, list_captured, name_loop, used_names
from gpuprof.graph.op_costs import OpCost, cost_of
from gpuprof.graph.shapes import Body, Shapes, UnknownShapeError

#: Suffix of the dimension for the iterations of a Loop: ``--dim NODE.turns=20``.
TURNS = ".turns"
#: Cached walks, for the nodes behind the ops of a graph, which a plan needs after reading all models. A walk of 2,300
#: ops takes 3.4 MB.
_MOST_WALKS = 8


def load_graph(
    path: Path, batch: int = 1, name: str | None = None, dims: Mapping[str, int] | None = None
) -> ModelGraph:
    """Return the model in ``path`` at ``batch``; results are cached.

    Constant nodes, and ops on weights alone, which runtimes compute at loading, are weights and not ops. Subgraphs of
    If, Loop and Scan are part of their node: the costlier branch, and every iteration like the first. Raises
    `InputError` if the file is not ONNX, is damaged, is inconsistent, fixes another batch, uses an op missing from the
    declared opset, or leaves a shape unknown (`UnknownShapeError`); the message names the node.

    Parameters
    ----------
    path : Path
        An ONNX file; external data must be in the same directory.
    batch : int
        Size of the batch dimension of every input.
    name : str, optional
        Name of the model; the file's stem by default.
    dims : mapping of str to int, optional
        Sizes of other free dimensions by name, or by ``"input:axis"`` for unnamed dimensions. By default an image has
        sides of 224 and 3 channels, and other dimensions (sequence lengths) are 128, or 64, 32, 16 or 8 where the model
        refuses longer sequences; the graph's ``assumed`` names them.
    """
    file = read_onnx(Path(path))
    key = tuple(sorted((dims or {}).items()))
    return _load(file.path, file.stamp, batch, Path(path).stem if name is None else name, key)


def load_runnable(
    path: Path, batch: int = 1, name: str | None = None, dims: Mapping[str, int] | None = None
) -> ModelGraph:
    """Return the model as `load_graph` does, or a graph with inputs alone where shapes are unknown.

    Shapes are unknown in pipelines of ``ai.onnx.ml``, models with sequences, and models with data-dependent shapes; the
    graph's ``unread`` gives the reason. Raises `InputError` as `load_graph`, except for unknown shapes.
    """
    try:
        return load_graph(path, batch, name, dims)
    except UnknownShapeError as error:
        file = read_onnx(Path(path))
        inputs, _ = bind_inputs(file.inputs, batch, _input_sizes(file, dims or {}), file.path.name)
        return ModelGraph(
            name=Path(path).stem if name is None else name,
            batch=batch,
            ops=(),
            inputs=tuple(inputs.values()),
            outputs=(),
            weights=(),
            opset=file.opsets.get("", 1),
            path=str(file.path),
            content=file.content,
            **_record_sizes(file, inputs, tuple((dims or {}).items())),
            unread=error.message,
        )


def require_sizes(graph: ModelGraph) -> ModelGraph:
    """Return the graph unchanged if no dimension was guessed.

    Raises `InputError` for a dimension without a given or a usual size, such as the samples of a sound.
    """
    if not graph.guessed:
        return graph
    names = " and ".join(graph.guessed)
    raise InputError(
        f"{graph.name}: nothing says how large {names} {'is' if len(graph.guessed) == 1 else 'are'} in its requests"
        + explain_numbered_names(Path(graph.path), graph.guessed),
        " ".join(f"--dim {name}=SIZE" for name in graph.guessed),
    )


def describe_assumed_sizes(graph: ModelGraph) -> str | None:
    """Return a remark on assumed sizes, with the option to set others; None if none were assumed."""
    sizes = dict(graph.sizes)
    names = [name for name in graph.assumed if name not in graph.guessed]  # `require_sizes` refuses guessed sizes
    if not names:
        return None
    text = ", ".join(f"{name}={sizes[name]}" for name in names)
    text += explain_numbered_names(Path(graph.path), names)
    return f"{graph.name}: {text} assumed; another size: --dim {names[0]}=SIZE"


def describe_reading(graph: ModelGraph) -> list[str]:
    """Return remarks on the reading of the file: assumed sizes, wrongly declared outputs."""
    assumed = describe_assumed_sizes(graph)
    return [*([assumed] if assumed else []), *(f"{graph.name}: {remark}" for remark in graph.remarks)]


def explain_numbered_names(path: Path, names: Iterable[str]) -> str:
    """Return the input and axis of dimensions with meaningless numbered names, such as ``s20``.

    The text is in parentheses after a space; empty without such names.
    """
    numbered = {name for name in names if COUNTED.fullmatch(name)}
    if not numbered or not path.is_file():
        return ""
    places = (
        f"{dim.name} is dimension {dim.axis} of {dim.source}" for dim in read_free_dims(path) if dim.name in numbered
    )
    return f" ({', '.join(places)})"


def read_fixed_batch(path: Path) -> int | None:
    """Return the fixed batch of the model in ``path``, 1 where no input has a batch, None for a free batch.

    Raises `InputError` if the file is not ONNX or damaged.
    """
    file = read_onnx(Path(path))
    return fixed_batch(file.inputs)


def read_free_dims(path: Path) -> tuple[FreeDim, ...]:
    """Return the free dimensions of the model in ``path``, except the batch.

    Raises `InputError` if the file is not ONNX or damaged.
    """
    return list_free_dims(read_onnx(Path(path)).inputs)


def read_turns(path: Path) -> tuple[str, ...]:
    """Return the dimension names for the iterations of the model's Loops, such as ``decoder.turns``.

    Raises `InputError` if the file is not ONNX or damaged.
    """
    return tuple(f"{name}{TURNS}" for name in _list_loops(read_onnx(Path(path))))


def load_nodes(
    path: Path, batch: int = 1, dims: Mapping[str, int] | None = None
) -> tuple[tuple[NodeProto, ...], dict[str, Array]]:
    """Return the graph nodes behind the ops of `load_graph`, in their order, and the constants known without a run.

    Raises `InputError` as `load_graph` does.
    """
    file = read_onnx(Path(path))
    _, _, shapes, nodes = _walk_file(file.path, file.stamp, batch, tuple(sorted((dims or {}).items())))
    return tuple(nodes), dict(shapes.values)


_WalkResult = tuple[dict[str, Tensor], dict[str, int], Shapes, list[NodeProto]]


@lru_cache(maxsize=_MOST_WALKS)
def _walk_file(
    path: Path, stamp: tuple[tuple[int, int], ...], batch: int, dims: tuple[tuple[str, int], ...]
) -> _WalkResult:
    return _walk_graph(read_onnx(path), batch, dict(dims))


def _walk_graph(file: OnnxFile, batch: int, dims: dict[str, int]) -> _WalkResult:
    """Walk the graph; if the model refuses the assumed sizes, retry with shorter or longer sizes."""
    try:
        return _walk_at(file, batch, dims)
    except InputError:
        free = file.inputs
        lengths = set(sequence_dims(free)) - set(dims)
        for shorter in SHORTER_DIMS if lengths else ():
            with suppress(InputError):
                return _walk_at(file, batch, dims | dict.fromkeys(lengths, shorter))
        # Exports by torch.export of a single-token step with a cache.
        if steps := lengths - past_dims(free):
            with suppress(InputError):
                return _walk_at(file, batch, dims | dict.fromkeys(steps, 1))
        unknown = {dim.name for dim in list_free_dims(free) if not dim.is_usual} - set(dims)
        if unknown:
            with suppress(InputError):
                return _walk_at(file, batch, dims | dict.fromkeys(unknown, LONGER_DIM))
        raise


def _walk_at(file: OnnxFile, batch: int, dims: dict[str, int]) -> _WalkResult:
    """Return the bound inputs, the sizes of named dimensions, all shapes, and the nodes that are ops."""
    graph, model = file.model.graph, file.path.name
    free = file.inputs
    inputs, names = bind_inputs(free, batch, _input_sizes(file, dims), model)
    shapes = Shapes(
        inputs | file.weights,
        file.weights,
        _list_declared(graph, names),
        file.opsets,
        used_names(graph),
        model,
        _given_turns(file, dims),
    )
    for tensor in graph.initializer:
        shapes.add_value(tensor)
    try:
        return inputs, names, shapes, [node for node in graph.node if not shapes.add(node)]
    except InputError as error:
        raise _explain_error(error, inputs, free, batch) from error


def infer_shapes(file: OnnxFile, batch: int, dims: Mapping[str, int]) -> Shapes:
    """Return the shapes and known values of all tensors. Raises `InputError` where sizes contradict one another."""
    return _walk_at(file, batch, dict(dims))[2]


def _list_loops(file: OnnxFile) -> list[str]:
    graphs = graphs_of(file.model.graph)
    return [name_loop(node) for graph in graphs for node in graph.node if node.op_type == "Loop"]


def _given_turns(file: OnnxFile, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the given iterations of Loops by node name, from sizes such as ``decoder.turns`` = 20."""
    loops = _list_loops(file)
    turns = {name.removesuffix(TURNS): size for name, size in dims.items() if name.endswith(TURNS)}
    return {name: size for name, size in turns.items() if name in loops and size >= 1}


def _input_sizes(file: OnnxFile, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the inputs' dimensions, without iterations of Loops."""
    turns = _given_turns(file, dims)
    return {name: size for name, size in dims.items() if name.removesuffix(TURNS) not in turns}


def _explain_error(
    error: InputError, tensors: Mapping[str, Tensor], inputs: Sequence[ValueInfoProto], batch: int
) -> InputError:
    """Return the error of a node, with a fix that names the sizes if these may be the cause."""
    sizes = {dim.name: tensors[dim.source].shape[dim.axis] for dim in list_free_dims(inputs)}
    if isinstance(error, UnknownShapeError) or error.fix or not sizes:
        return error
    text = ", ".join(f"{dim} as {size}" for dim, size in sizes.items())
    return InputError(
        error.message,
        f"it was read with {text} at batch {batch}; give the sizes of what is sent to it: "
        + " ".join(f"--dim {dim}=SIZE" for dim in sizes),
    )


@lru_cache
def _load(
    path: Path, stamp: tuple[tuple[int, int], ...], batch: int, name: str, dims: tuple[tuple[str, int], ...]
) -> ModelGraph:
    file = read_onnx(path)
    graph, model = file.model.graph, path.name
    inputs, names, shapes, ops = _walk_file(path, stamp, batch, dims)
    try:
        outputs = _make_outputs(graph, shapes, names, batch, model)
    except InputError as error:
        explanation = _explain_error(error, inputs, file.inputs, batch)
        raise InputError(explanation.message, explanation.fix or "export the model again") from error
    sizes = _record_sizes(file, inputs, dims)
    return ModelGraph(
        name=name,
        batch=batch,
        ops=_make_ops(ops, shapes),
        inputs=tuple(inputs.values()),
        outputs=outputs,
        weights=_list_used_weights(ops, graph, shapes),
        opset=file.opsets.get("", 1),
        path=str(path),
        content=file.content,
        **sizes,
        remarks=_describe_outputs(graph, outputs, names, batch),
    )


def _record_sizes(file: OnnxFile, inputs: Mapping[str, Tensor], dims: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    """Return the sizes of a graph's free dimensions, and the names of assumed and guessed dimensions."""
    free = list_free_dims(file.inputs)
    given_sizes = dict(dims)
    sizes = given_sizes | {dim.name: inputs[dim.source].shape[dim.axis] for dim in free}
    return {
        "sizes": tuple(sorted(sizes.items())),
        "assumed": tuple(dim.name for dim in free if dim.name not in given_sizes),
        "guessed": tuple(dim.name for dim in free if dim.name not in given_sizes and not dim.is_usual),
    }


def _list_declared(graph: GraphProto, names: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the intermediate values with a fully declared shape, for custom ops."""
    tensors = {}
    for info in (*graph.value_info, *graph.output):
        dims = declared_dims(info) if info.type.HasField("tensor_type") else None
        bound = bound_dims(dims, names) if dims is not None else (None,)
        if None not in bound:
            shape = tuple(dim for dim in bound if dim is not None)
            tensors[info.name] = Tensor(info.name, dtype_name(info.type.tensor_type.elem_type), shape)
    return tensors


def _make_outputs(
    graph: GraphProto, shapes: Shapes, names: Mapping[str, int], batch: int, model: str
) -> tuple[Tensor, ...]:
    tensors = []
    for info in graph.output:
        if info.name not in shapes.tensors:
            raise InputError(f"{model}: nothing gives the output {info.name!r}")
        tensor = shapes.tensors[info.name]
        dims = declared_dims(info) if info.type.HasField("tensor_type") else None
        # Runtimes only warn of a wrong declaration. A first dimension other than declared means that the model cannot
        # be batched.
        first = bound_dims((dims or ())[:1], names)
        if batch > 1 and dims is not None and not _is_plausible_shape(tensor.shape[:1], first, batch):
            raise InputError(f"{model}: output {info.name} is declared {list(dims)} but has shape {list(tensor.shape)}")
        tensors.append(tensor)
    return tuple(tensors)


def _describe_outputs(
    graph: GraphProto, outputs: Iterable[Tensor], names: Mapping[str, int], batch: int
) -> tuple[str, ...]:
    """Return a remark on each output whose shape differs from its declaration."""
    declared = {info.name: declared_dims(info) for info in graph.output if info.type.HasField("tensor_type")}
    return tuple(
        f"output {tensor.name} is declared {list(dims)}; its shape is {list(tensor.shape)}"
        for tensor in outputs
        if (dims := declared.get(tensor.name)) is not None
        and not _is_plausible_shape(tensor.shape, bound_dims(dims, names), batch)
    )


def _is_plausible_shape(shape: tuple[int, ...], declared: tuple[int | None, ...], batch: int) -> bool:
    """Return whether a declared shape is plausible: exporters leave the batch of a dynamic model's output at 1."""
    return len(shape) == len(declared) and all(
        want is None or want == size or want * batch == size for size, want in zip(shape, declared, strict=True)
    )


def _make_ops(nodes: Sequence[NodeProto], shapes: Shapes) -> tuple[Op, ...]:
    names: set[str] = set()
    return tuple(_make_op(node, _make_unique_name(node, i, names), shapes) for i, node in enumerate(nodes))


def _make_unique_name(node: NodeProto, position: int, names: set[str]) -> str:
    name = node.name or f"{node.op_type}_{position}"
    while name in names:
        name = f"{name}_{position}"
    names.add(name)
    return name


def _make_op(node: NodeProto, name: str, shapes: Shapes) -> Op:
    operands = [shapes.tensors[value] if value else None for value in node.input]
    outputs = [shapes.tensors.get(value) for value in node.output]
    # Outer values used in the bodies of If, Loop and Scan are also read by the node.
    outer = [shapes.tensors[value] for value in list_captured(node) if value not in node.input]
    inputs = (*(tensor for tensor in operands if tensor is not None), *outer)
    attributes = {attribute.name: _to_plain_value(attribute) for attribute in node.attribute}
    cost = cost_of(node.op_type, node.domain, (*operands, *outer), outputs, attributes)
    cost, launches = max(
        (_sum_body_cost(body) for body in shapes.body_of(node)), key=lambda pair: _rank_cost(pair[0]), default=(cost, 1)
    )
    return Op(
        name=name,
        op_type=node.op_type,
        domain=node.domain,
        inputs=inputs,
        outputs=tuple(tensor for tensor in outputs if tensor is not None),
        weights=tuple(tensor for tensor in inputs if tensor.name in shapes.constants),
        attributes=attributes,
        flops=cost.flops,
        bytes_read=cost.bytes_read,
        bytes_written=cost.bytes_written,
        launches=launches,
    )


def _sum_body_cost(body: Body) -> tuple[OpCost, int]:
    """Return the total cost of all iterations of a nested graph, and the number of executed nodes without views.

    FLOPs are None if any op has no formula.
    """
    ops = _make_ops(body.nodes, body.shapes)
    flops = [op.flops for op in ops]
    cost = OpCost(
        None if None in flops else body.times * sum(count or 0 for count in flops),
        body.times * sum(op.bytes_read for op in ops),
        body.times * sum(op.bytes_written for op in ops),
    )
    return cost, max(1, body.times * sum(op.launches for op in ops if op.flops or op.bytes_written))


def _rank_cost(cost: OpCost) -> tuple[bool, int, int]:
    return cost.flops is None, cost.flops or 0, cost.bytes_read + cost.bytes_written


def _to_plain_value(attribute: AttributeProto) -> object:
    """Return an attribute as a Python value; tensors and graphs by the hash of their bytes."""
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float | int | str):
        return value
    if isinstance(value, TensorProto | GraphProto) or hasattr(value, "SerializeToString"):
        return hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()
    return tuple(
        item.decode(errors="replace")
        if isinstance(item, bytes)
        else item
        if isinstance(item, float | int)
        else hashlib.sha256(item.SerializeToString(deterministic=True)).hexdigest()
        for item in value
    )


def _list_used_weights(nodes: Sequence[NodeProto], graph: GraphProto, shapes: Shapes) -> tuple[Tensor, ...]:
    names = [name for node in nodes for name in (*node.input, *list_captured(node))]
    names += [info.name for info in graph.output]
    return tuple(shapes.tensors[name] for name in dict.fromkeys(names) if name in shapes.constants)
