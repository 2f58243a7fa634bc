"""Times of the nodes that a runtime executed, tied to the ops of the model, as rows of ``ops`` and ``kernels``."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.graph.executed_graph import ExecutedNode, Group, Tie, find_costliest, tie_nodes
from gpuprof.kernel_db.schema import KernelRow, OpRow
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.timeline import Timeline
from gpuprof.profiling.worker.job import WARM_UP_RUNS, Request

#: Runs with individually stored kernels.
KERNEL_REPEATS = 3


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """An execution of a node."""

    #: ``name``, ``op_type``: Name and type of the node in the graph executed by the runtime.
    name: str
    op_type: str
    repeat: int  #: Number of the model's run, from 0; -1 outside any run.
    start_ns: int
    duration_ns: int  #: In whole microseconds if timed by ONNX Runtime's own profiler.
    provider: str = ""


def node_events(timeline: Timeline) -> tuple[NodeEvent, ...]:
    """Return the executions of nodes in a timeline, in the order in which they began."""
    columns = ("name", "op_type", "repeat", "start_ns", "duration_ns", "provider")
    return tuple(NodeEvent(*row) for row in zip(*(timeline.nodes[name].tolist() for name in columns), strict=True))


def read_node_events(path: Path) -> tuple[NodeEvent, ...]:
    """Return the executions of nodes in ONNX Runtime's profile; empty for a model of constants only.

    Raises `InputError` when the file is no such profile, is cut off, or holds no execution of a node or model.
    """
    return node_events(read_json_trace(path))


@dataclass(frozen=True, slots=True)
class GroupTime:
    """Time of ops executed together, in nanoseconds per run of the model."""

    group: Group
    mean_ns: float
    p50_ns: float
    min_ns: int


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Times of a model's nodes."""

    executed: tuple[ExecutedNode, ...]
    tie: Tie
    groups: tuple[GroupTime, ...]  #: Time of each group of ``tie``.
    events: tuple[tuple[int, NodeEvent], ...]  #: Each execution with its position in ``executed``, warm-up left out.
    repeats: int
    #: ``total_ns``, ``untied_ns``: Mean time of all nodes in a run, and its part not tied to any op.
    total_ns: float
    untied_ns: float

    def notes(self) -> tuple[str, ...]:
        """Return a note on the nodes that could not be tied."""
        if not self.tie.untied or not self.total_ns:
            return ()
        kinds = Counter(self.executed[index].op_type for index in self.tie.untied)
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return (f"{100 * self.untied_ns / self.total_ns:.1f}% of the nodes' time belongs to no op: {counts}",)


def node_times(graph: ModelGraph, executed: Sequence[ExecutedNode], trace: Sequence[NodeEvent]) -> NodeTimes:
    """Tie the executions in ``trace`` to the ops of ``graph`` and sum them up.

    ``executed``: graph executed by the runtime; ``trace``: in order of time.
    """
    tied = tie_nodes(graph, executed)
    nodes = zip(match_events(executed, trace), trace, strict=True)
    placed = [(index, event) for index, event in nodes if index is not None]
    last = max((event.repeat for _, event in placed), default=0)
    first = min(WARM_UP_RUNS, last)
    events = tuple((index, event) for index, event in placed if event.repeat >= first)
    repeats = last - first + 1
    durations: dict[int, list[int]] = defaultdict(lambda: [0] * repeats)
    for index, event in events:
        durations[index][event.repeat - first] += event.duration_ns
    return NodeTimes(
        executed=tuple(executed),
        tie=tied,
        groups=tuple(_summarize_group(group, durations) for group in tied.groups),
        events=events,
        repeats=repeats,
        total_ns=sum(fmean(times) for times in durations.values()),
        untied_ns=sum(fmean(durations[index]) for index in tied.untied if index in durations),
    )


def _summarize_group(group: Group, durations: dict[int, list[int]]) -> GroupTime:
    sums = [sum(times) for times in zip(*(durations[index] for index in group.executed), strict=True)]
    return GroupTime(group, fmean(sums), median(sums), min(sums))


def match_events(executed: Sequence[ExecutedNode], trace: Sequence[NodeEvent]) -> list[int | None]:
    """Return for each event the position of its node in ``executed``, None without such a node.

    Nodes without a name are distinguished by their order, equal in every run.
    """
    by_name = {node.name: index for index, node in enumerate(executed) if node.name}
    nameless: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(executed):
        if not node.name:
            nameless[node.op_type].append(index)
    matched: list[int | None] = []
    turns: Counter[tuple[int, str]] = Counter()
    for event in trace:
        turn = turns[event.repeat, event.op_type]
        if event.name not in by_name and turn < len(nameless[event.op_type]):
            matched.append(nameless[event.op_type][turn])
            turns[event.repeat, event.op_type] += 1
        else:
            matched.append(by_name.get(event.name))
    return matched


def op_rows(request: Request, times: NodeTimes) -> tuple[OpRow, ...]:
    """Return a row for each op of the model, in order; the costliest op of a fused node carries the node's time."""
    ops = request.job.graph.ops
    anchors: dict[int, GroupTime] = {}
    notes: dict[int, str] = {}
    for timed in times.groups:
        anchor = find_costliest(timed.group.ops, ops)
        anchors[anchor] = timed
        notes |= {position: f"fused into {ops[anchor].name}" for position in timed.group.ops if position != anchor}
        if len(timed.group.ops) > 1:
            notes[anchor] = "with " + ", ".join(ops[p].name for p in timed.group.ops if p != anchor)
    notes |= dict.fromkeys(times.tie.unexecuted, "not executed: a view, or computed when the model was loaded")
    return tuple(
        op_row(request, position, op, anchors.get(position), times.repeats, notes.get(position))
        for position, op in enumerate(ops)
    )


def op_row(request: Request, position: int, op: Op, timed: GroupTime | None, repeats: int, note: str | None) -> OpRow:
    """Return the row of an op; ``timed`` is None for an op without a time of its own."""
    return OpRow(
        **request.columns(),
        position=position,
        name=op.name,
        model_sha256=request.job.graph.sha256,
        **op_facts(op),
        fused=len(timed.group.ops) if timed else 1,
        duration_mean_ns=round(timed.mean_ns) if timed else None,
        duration_p50_ns=round(timed.p50_ns) if timed else None,
        duration_min_ns=timed.min_ns if timed else None,
        repeats=repeats if timed else None,
        note=note,
    )


def kernel_rows(request: Request, times: NodeTimes) -> tuple[KernelRow, ...]:
    """Return a row for each execution of a node in the last few runs of the model."""
    ops = request.job.graph.ops
    owner = {
        index: ops[find_costliest(timed.group.ops, ops)] for timed in times.groups for index in timed.group.executed
    }
    last = max((event.repeat for _, event in times.events), default=0)
    events = [(index, event) for index, event in times.events if event.repeat > last - KERNEL_REPEATS]
    origin = events[0][1].start_ns if events else 0
    rows = []
    turn: dict[int, int] = {}
    for index, event in events:
        op = owner.get(index)
        turn[event.repeat] = turn.get(event.repeat, -1) + 1
        row = KernelRow(
            **request.columns(),
            name=f"{event.provider.removesuffix('ExecutionProvider')}:{event.op_type}",
            position=turn[event.repeat],
            repeat=event.repeat,
            op_signature=op.signature if op else None,
            op_type=op.op_type if op else None,
            op_name=op.name if op else None,
            start_ns=event.start_ns - origin,
            duration_ns=event.duration_ns,
        )
        rows.append(row)
    return tuple(rows)


def op_facts(op: Op) -> dict[str, Any]:
    """Return the columns of ``ops`` determined by the op itself, independent of device and runtime."""
    return {
        "op_type": op.op_type,
        "signature": op.signature,
        "shapes": shapes_text(op),
        "dtype": (op.inputs or op.outputs)[0].dtype if op.inputs or op.outputs else None,
        "attributes": json.dumps(op.attributes, default=str, sort_keys=True),
        "flops": op.flops,
        "bytes_read": op.bytes_read,
        "bytes_written": op.bytes_written,
        "weight_bytes": op.weight_bytes,
    }


def shapes_text(op: Op) -> str:
    """Return ``"1x3x224x224,64x3x7x7->1x64x112x112"``; a scalar is ``"()"``."""
    return f"{','.join(map(_shape, op.inputs))}->{','.join(map(_shape, op.outputs))}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "()"
