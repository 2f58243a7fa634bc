"""Groups of ops executed together, and their costs in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gpuprof.domain.model import ModelGraph
from gpuprof.errors import InputError
from gpuprof.estimators.learned.features import KINDS
from gpuprof.estimators.learned.op_facts import OpFacts, facts_of_op
from gpuprof.estimators.memory.liveness import peak_activation_bytes
from gpuprof.graph.executed_graph import find_costliest, tie_nodes
from gpuprof.runtime.optimizer import executed_nodes

#: Position of each op with a time of its own → positions of all ops executed with it, its own included.
Groups = Mapping[int, tuple[int, ...]]

_FUSED_INTO = "fused into "


class OpTiming(Protocol):
    """Columns of the table ``ops`` that show which ops were executed together."""

    @property
    def name(self) -> str: ...  # noqa: D102 - see `gpuprof.kernel_db.schema.OpRow`

    @property
    def duration_p50_ns(self) -> int | None: ...  # noqa: D102

    @property
    def note(self) -> str | None: ...  # noqa: D102


def optimized_groups(graph: ModelGraph) -> Groups | None:
    """Return the groups made by ONNX Runtime's own optimizer from the graph's file on a CPU; None where unknown."""
    try:
        nodes = executed_nodes(Path(graph.path)) if Path(graph.path).is_file() else None
    except InputError:
        return None
    if nodes is None:
        return None
    groups = (tuple(sorted(group.ops)) for group in tie_nodes(graph, nodes).groups)
    return {find_costliest(group, graph.ops): group for group in groups}


def measured_groups(graph: ModelGraph, rows: Sequence[OpTiming]) -> Groups | None:
    """Return the groups executed together when the rows of ``ops`` of this graph were measured.

    ``rows``: in the order of the graph's ops; None is returned if they belong to another graph.
    """
    if [row.name for row in rows] != [op.name for op in graph.ops]:
        return None
    position = {op.name: place for place, op in enumerate(graph.ops)}
    groups = {place: [place] for place, row in enumerate(rows) if row.duration_p50_ns is not None}
    for place, row in enumerate(rows):
        note = row.note or ""
        anchor = position.get(note.removeprefix(_FUSED_INTO)) if note.startswith(_FUSED_INTO) else None
        if anchor in groups:
            groups[anchor].append(place)
    return {anchor: tuple(sorted(group)) for anchor, group in groups.items()}


def group_facts(graph: ModelGraph, groups: Groups) -> list[OpFacts]:
    """Return the facts of each group: of the op with the group's time, and of the ops fused into it."""
    maker = {tensor.name: place for place, op in enumerate(graph.ops) for tensor in op.outputs}
    touched = working_set_bytes(graph)
    return [replace(_facts(graph, anchor, group, maker), working_set=touched) for anchor, group in groups.items()]


def working_set_bytes(graph: ModelGraph) -> float:
    """Return the bytes that an execution of the model touches: weights, and the largest size of live activations."""
    return float(graph.weight_bytes + peak_activation_bytes(graph))


def _facts(graph: ModelGraph, anchor: int, group: tuple[int, ...], maker: Mapping[str, int]) -> OpFacts:
    followers = [graph.ops[place] for place in group if place != anchor]
    anchor_inputs = {tensor.name for tensor in graph.ops[anchor].inputs}
    more = {
        tensor.name
        for op in followers
        for tensor in op.inputs
        if tensor not in op.weights and tensor.name not in anchor_inputs and maker.get(tensor.name) not in group
    }
    return replace(
        facts_of_op(graph.ops[anchor], graph.batch),
        fused=len(group),
        fused_functions=sum(op.op_type in KINDS["function"] for op in followers),
        fused_inputs=len(more),
    )
