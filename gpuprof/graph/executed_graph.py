"""Maps executed nodes to the ops of the model: runtimes fuse, rename, drop and add nodes.

Tensors survive these changes. An executed node with a tensor of the model as its output computes all ops between that
tensor and the nearest tensors made by other executed nodes. So ops form groups, each computed by one or more executed
nodes, and a group's time belongs to its ops together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuprof.domain.model import ModelGraph, Op

# The blocked-layout rewrite names a convolution after its output tensor, and renames the tensor.
_BLOCKED = re.compile(r"(?P<tensor>.+)_nchwc(?:_\d+)?")


@dataclass(frozen=True, slots=True)
class ExecutedNode:
    """A node of the runtime's graph of the model."""

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(slots=True)
class Group:
    """Ops executed together."""

    ops: list[int] = field(default_factory=list)  #: Positions in ``ModelGraph.ops``, ascending.
    executed: list[int] = field(default_factory=list)  #: Positions in the executed graph.


@dataclass(frozen=True, slots=True)
class Tie:
    """The correspondence between an executed graph and its model."""

    groups: tuple[Group, ...]
    untied: tuple[int, ...]  #: Executed nodes without an op, such as layout changes between several groups.
    #: Ops without an executed node: views, or ops computed once at loading.
    unexecuted: tuple[int, ...]


def read_executed(path: Path) -> tuple[ExecutedNode, ...]:
    """Return the nodes of the runtime's graph in the file ``path``, in topological order."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    return tuple(ExecutedNode(node.name, node.op_type, tuple(node.input), tuple(node.output)) for node in graph.node)


def tie_nodes(graph: ModelGraph, executed: Sequence[ExecutedNode]) -> Tie:
    """Return the correspondence of executed nodes to the ops of ``graph``."""
    producer = {tensor.name: position for position, op in enumerate(graph.ops) for tensor in op.outputs}
    targets = _find_targets(graph, executed, producer)
    tensors = {tensor for names in targets for tensor in names}
    owner: dict[int, int] = {}
    groups: dict[int, Group] = {}
    for index, names in enumerate(targets):
        claimed = _find_claimed(graph, names, producer, tensors, owner)
        # An op belongs to the first executed node that reaches the op, so that no time is counted twice.
        if claimed:
            owner.update(dict.fromkeys(claimed, index))
            groups[index] = Group(claimed, [index])
    unassigned = _join_groups(executed, targets, producer, owner, groups)
    return Tie(
        groups=tuple(groups.values()),
        untied=tuple(unassigned),
        unexecuted=tuple(position for position in range(len(graph.ops)) if position not in owner),
    )


def find_costliest(positions: Iterable[int], ops: Sequence[Op]) -> int:
    """Return the position of the op charged with a group's time: the first of those with the most FLOPs."""
    return max(positions, key=lambda position: (ops[position].flops or 0, -position))


def _find_targets(
    graph: ModelGraph, executed: Sequence[ExecutedNode], producer: dict[str, int]
) -> list[tuple[str, ...]]:
    by_name = {op.name: op for op in graph.ops}
    targets: list[tuple[str, ...]] = []
    for node in executed:
        names = tuple(name for name in node.outputs if name in producer)
        blocked = _BLOCKED.fullmatch(node.name)
        if not names and blocked and blocked["tensor"] in producer:
            names = (blocked["tensor"],)
        elif not names and node.name in by_name:
            names = tuple(tensor.name for tensor in by_name[node.name].outputs)
        targets.append(names)
    return targets


def _find_claimed(
    graph: ModelGraph, names: Iterable[str], producer: dict[str, int], tensors: set[str], owner: dict[int, int]
) -> list[int]:
    """Return the ops between ``names`` and the nearest tensors made by other executed nodes."""
    waiting = [producer[name] for name in names]
    claimed: set[int] = set()
    while waiting:
        position = waiting.pop()
        if position in claimed or position in owner:
            continue
        claimed.add(position)
        inputs = [tensor.name for tensor in graph.ops[position].inputs]
        waiting += [producer[name] for name in inputs if name in producer and name not in tensors]
    return sorted(claimed)


def _join_groups(
    executed: Sequence[ExecutedNode],
    targets: Sequence[tuple[str, ...]],
    producer: dict[str, int],
    owner: dict[int, int],
    groups: dict[int, Group],
) -> list[int]:
    """Add executed nodes without an op to the group that uses their output; return the remaining nodes.

    A node whose tensor another node has already computed (a change back from a blocked layout) joins that node's
    group; otherwise, the group that alone consumes its output.
    """
    consumers: dict[str, set[int]] = defaultdict(set)
    for index, node in enumerate(executed):
        for name in node.inputs:
            consumers[name].add(index)
    home = {index: index for index in groups}
    unassigned = []
    # In reverse order: a node's consumers must have a group before the node.
    for index in range(len(executed) - 1, -1, -1):
        if index in home:
            continue
        served = {owner[producer[name]] for name in targets[index]}
        served = served or {home.get(user, -1) for name in executed[index].outputs for user in consumers[name]}
        if len(served) == 1 and (group := served.pop()) in groups:
            home[index] = group
            groups[group].executed.append(index)
        else:
            unassigned.append(index)
    return unassigned[::-1]
