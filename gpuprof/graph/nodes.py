"""Nodes of an ONNX graph: what errors call them, what their nested graphs capture, and an order to run them in."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

from gpuprof.errors import InputError

_GRAPHS = {AttributeProto.GRAPH, AttributeProto.GRAPHS}
#: The ops of ONNX's own domain that hold graphs; of another domain any may.
_HOLDING_GRAPHS = {"If", "Loop", "Scan", "SequenceMap"}


def label(node: NodeProto) -> str:
    """Return a node's name and type for error messages."""
    return f"{node.name or ', '.join(name for name in node.output if name)} ({node.op_type})"


def name_loop(node: NodeProto) -> str:
    """Return the name of a Loop by which its turns are given: the node's, or that of its first output."""
    return node.name or next((name for name in node.output if name), "")


def list_captured(node: NodeProto) -> list[str]:
    """Return the names that a node's nested graphs take from outside, in order of use."""
    if node.op_type not in _HOLDING_GRAPHS and node.domain in ("", "ai.onnx"):
        return []  # looking through the attributes of every node took a tenth of reading a file
    captured_names: dict[str, None] = {}
    for attribute in node.attribute:
        if attribute.type in _GRAPHS:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                captured_names |= dict.fromkeys(_free_names(graph))
    return list(captured_names)


def used_names(graph: GraphProto) -> set[str]:
    """Return the values of ``graph`` that a node uses or that leave it."""
    used = {name for node in graph.node for name in (*node.input, *list_captured(node))}
    return used | {info.name for info in graph.output}


def _free_names(graph: GraphProto) -> list[str]:
    bound_names = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    bound_names |= {name for node in graph.node for name in node.output}
    used = [name for node in graph.node for name in (*node.input, *list_captured(node))]
    used += [info.name for info in graph.output]
    return [name for name in dict.fromkeys(used) if name and name not in bound_names]


def sort_nodes(nodes: Sequence[NodeProto], given: Iterable[str], model: str) -> list[NodeProto]:
    """Return ``nodes`` so that each follows what it needs, in their own order where that already holds.

    Raises `InputError` naming a node of the cycle, or the value that two nodes give.
    """
    producer: dict[str, int] = {}
    given = set(given)
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and (name in producer or name in given):
                raise InputError(
                    f"{model}: node {label(node)} gives {name!r}, which something else gives already",
                    "the model is damaged: export it again",
                )
            if name:
                producer[name] = i
    needs = [{producer[name] for name in (*node.input, *list_captured(node)) if name in producer} for node in nodes]
    # The usual case: ONNX demands sorted nodes, but not every tool keeps to it.
    if all(not need or max(need) < i for i, need in enumerate(needs)):
        return list(nodes)
    return [nodes[i] for i in _order(needs, nodes, model)]


def _order(needs: list[set[int]], nodes: Sequence[NodeProto], model: str) -> list[int]:
    users: dict[int, list[int]] = {}
    for i, need in enumerate(needs):
        for j in need:
            users.setdefault(j, []).append(i)
    inputs_missing = [len(need) for need in needs]
    ready = [i for i, count in enumerate(inputs_missing) if not count]
    order = []
    while ready:
        # The smallest position first, so that nodes stay as near to the file's order as their needs allow.
        order.append(heapq.heappop(ready))
        for user in users.get(order[-1], ()):
            inputs_missing[user] -= 1
            if not inputs_missing[user]:
                heapq.heappush(ready, user)
    if len(order) < len(nodes):
        stuck = next(i for i, count in enumerate(inputs_missing) if count)
        raise InputError(
            f"{model}: node {label(nodes[stuck])} is part of a cycle or waits for one",
            "the model is damaged: export it again",
        )
    return order


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
    """Return the value of a Constant node, named as its output."""
    name, value = node.output[0], node.attribute[0]
    if value.HasField("t"):
        tensor: TensorProto = TensorProto.FromString(value.t.SerializeToString())
        tensor.name = name
        return tensor
    plain = helper.get_attribute_value(value)
    dtype = {"f": np.float32, "i": np.int64}.get(value.name.removeprefix("value_")[0])
    if dtype is None:
        return TensorProto(
            name=name, data_type=TensorProto.STRING, dims=[] if value.name == "value_string" else [len(plain)]
        )
    return numpy_helper.from_array(np.array(plain, dtype), name)
