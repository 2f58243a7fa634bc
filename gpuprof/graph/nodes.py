"""Nodes of an ONNX graph: labels for errors, captured values, topological order, and values known without a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from math import prod

import numpy as np
import numpy.typing as npt
from onnx import (
    AttributeProto,
    GraphProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from gpuprof.errors import InputError

_GRAPHS = {AttributeProto.GRAPH, AttributeProto.GRAPHS}
#: Ops of ONNX's own domain with nested graphs; in other domains any op may have them.
HOLDING_GRAPHS = {"If", "Loop", "Scan", "SequenceMap"}
#: Most elements of a sparse Constant: dense, it must fit into a message of Protocol Buffers.
_MOST_DENSE_ELEMENTS = 2**28
Array = npt.NDArray[np.generic]
#: Values larger than this are data, not shapes.
MOST_VALUES = 1024
#: Ops whose value follows from their inputs alone and is computed here.
KNOWN_OPS = frozenset(
    {
        "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Concat", "ConstantOfShape", "Div", "Equal",
        "Exp", "Expand", "Flatten", "Floor", "Gather", "Greater", "GreaterOrEqual", "Identity", "Less",
        "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "OneHot", "Or", "Pow", "Range",
        "Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Round", "Sign",
        "Slice", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip


def label(node: NodeProto) -> str:
    """Return a node's name and type for error messages."""
    return f"{node.name or ', '.join(name for name in node.output if name)} ({node.op_type})"


def name_loop(node: NodeProto) -> str:
    """Return the name of a Loop for the option of its iterations: the node's name, or that of its first output."""
    return node.name or next((name for name in node.output if name), "")


def list_captured(node: NodeProto) -> list[str]:
    """Return the outer values used by a node's nested graphs, in order of use."""
    if node.op_type not in HOLDING_GRAPHS and node.domain in ("", "ai.onnx"):
        return []  # a search in the attributes of every node took a tenth of the reading time
    captured_names: dict[str, None] = {}
    for attribute in node.attribute:
        if attribute.type in _GRAPHS:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                captured_names |= dict.fromkeys(_free_names(graph))
    return list(captured_names)


def used_names(graph: GraphProto) -> set[str]:
    """Return the values of ``graph`` used by a node or returned as outputs."""
    names = {name for node in graph.node for name in (*node.input, *list_captured(node))}
    return names | {info.name for info in graph.output}


def _free_names(graph: GraphProto) -> list[str]:
    bound_names = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    bound_names |= {name for node in graph.node for name in node.output}
    names = [name for node in graph.node for name in (*node.input, *list_captured(node))]
    names += [info.name for info in graph.output]
    return [name for name in dict.fromkeys(names) if name and name not in bound_names]


def sort_nodes(nodes: Sequence[NodeProto], names: Iterable[str], model: str) -> list[NodeProto]:
    """Return ``nodes`` in topological order, unchanged where already sorted.

    Raises `InputError` naming a node of a cycle, or a value with two producers.
    """
    producer: dict[str, int] = {}
    names = set(names)
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and (name in producer or name in names):
                raise InputError(
                    f"{model}: node {label(node)} gives {name!r}, which something else gives already",
                    "the model is damaged: export it again",
                )
            if name:
                producer[name] = i
    needs = [{producer[name] for name in (*node.input, *list_captured(node)) if name in producer} for node in nodes]
    # The usual case: ONNX requires sorted nodes, but some tools violate this.
    if all(not need or max(need) < i for i, need in enumerate(needs)):
        return list(nodes)
    try:
        return [nodes[i] for i in TopologicalSorter(dict(enumerate(needs))).static_order()]
    except CycleError as error:
        raise InputError(
            f"{model}: node {label(nodes[error.args[1][0]])} is part of a cycle",
            "the model is damaged: export it again",
        ) from None


def graphs_of(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield ``graph`` and every graph nested in its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from graphs_of(attribute.g)
            elif attribute.type == AttributeProto.GRAPHS:
                for nested in attribute.graphs:
                    yield from graphs_of(nested)


def constant_tensor(node: NodeProto) -> TensorProto:
    """Return the value of a Constant node, named after the node's output; of texts without their data."""
    name = node.output[0]
    value = next((a for a in node.attribute if a.name.startswith(("value", "sparse_value"))), None)
    if value is None:
        raise InputError(f"the Constant {name!r} has no value", "export the model again")
    if value.HasField("t"):
        tensor = TensorProto()
        tensor.CopyFrom(value.t)
        tensor.name = name
        return tensor
    if value.HasField("sparse_tensor"):
        return numpy_helper.from_array(_to_dense(value.sparse_tensor, name), name)
    plain = helper.get_attribute_value(value)
    dtype = {"f": np.float32, "i": np.int64}.get(value.name.removeprefix("value_")[0])
    if dtype is None:
        return TensorProto(
            name=name, data_type=TensorProto.STRING, dims=[] if value.name == "value_string" else [len(plain)]
        )
    return numpy_helper.from_array(np.array(plain, dtype), name)


def _to_dense(sparse: SparseTensorProto, name: str) -> npt.NDArray[np.generic]:
    if prod(sparse.dims) > _MOST_DENSE_ELEMENTS:
        raise InputError(f"the sparse Constant {name!r} has {list(sparse.dims)} elements", "export it dense")
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    try:
        dense[tuple(indices.T) if indices.ndim == 2 else np.unravel_index(indices, dense.shape)] = values
    except (IndexError, ValueError) as error:
        raise InputError(f"the sparse Constant {name!r} is damaged: {error}", "export the model again") from None
    return dense


def known_value(node: NodeProto, values: Mapping[str, Array], opset: int) -> Array | None:
    """Return the value of a single-output node of ONNX's own domain for known ``values``, or None where unknown."""
    names = list(dict.fromkeys(name for name in node.input if name))
    if node.op_type not in KNOWN_OPS or not names or not all(name in values for name in names):
        return None
    from onnx.reference import ReferenceEvaluator  # a quarter of the reading time of a model without such ops

    infos = [ValueInfoProto(name=name) for name in names]
    graph = GraphProto(name="op", node=[node], input=infos, output=[ValueInfoProto(name=node.output[0])])
    try:
        if _count_elements(node.op_type, [values[name] for name in node.input if name]) > MOST_VALUES:
            return None
        with np.errstate(all="ignore"):
            (value,) = ReferenceEvaluator(graph, opsets={"": opset}).run(None, {name: values[name] for name in names})
    except Exception:  # an invalid op, on which the reference raises anything: shape inference gives a better error
        return None
    result = np.asarray(value)
    return result if result.size <= MOST_VALUES else None


def _count_elements(op_type: str, inputs: Sequence[Array]) -> int:
    """Return the elements of a result that may be far larger than the inputs; 0 for other ops."""
    if op_type == "ConstantOfShape":
        return prod(inputs[0].tolist())
    if op_type == "Expand":
        return prod(np.broadcast_shapes(inputs[0].shape, tuple(inputs[1].tolist())))
    if op_type == "OneHot":
        return inputs[0].size * int(inputs[1].item())
    if op_type == "Range":
        start, limit, delta = (array.item() for array in inputs)
        return int((limit - start) / delta)
    shapes = [array.shape for array in inputs]
    try:
        return prod(np.broadcast_shapes(*shapes))  # of an element-wise op
    except ValueError:
        return 0
