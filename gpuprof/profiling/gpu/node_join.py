"""Ties kernels to the ONNX Runtime nodes that launched them, and through these to the ops of the model.

ONNX Runtime runs nodes sequentially on a single thread, and its own profile has begin and end of each node; CUPTI has
the begin of each launch. A launch belongs to the node in which it began. Both clocks are joined by the Unix time of
their zeros if both files have it, else by the runs marked in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.domain.model import ModelGraph
from gpuprof.errors import InputError
from gpuprof.graph.executed_graph import ExecutedNode, find_costliest, tie_nodes
from gpuprof.profiling.cpu.node_times import NodeTimes, match_events, node_events, node_times
from gpuprof.profiling.timeline.attribution import NO_RANGE, Integers, find_innermost_ranges
from gpuprof.profiling.timeline.timeline import OUTSIDE, RUN_RANGE, Timeline, column, find_runs, list_names

_TICK_NS = 1000  # ONNX Runtime's profile is in whole microseconds


def join_nodes(timeline: Timeline, profile: Timeline) -> Timeline:
    """Return the timeline with ONNX Runtime's ``nodes``, and for each kernel the row of its ``node``, or -1.

    ``timeline``: the selected runs (`Timeline.select_runs`); ``profile``: of the same session, which ends with these
    runs. Raises `InputError` when the clocks cannot be aligned.
    """
    runs = find_runs(timeline.ranges)[0]
    offset = _find_offset(timeline, profile, runs)
    nodes = profile.nodes.assign(start_ns=profile.nodes["start_ns"] + offset)
    if len(runs):
        turn = nodes["repeat"].to_numpy(dtype=np.int64) - (profile_runs(profile) - len(runs))
        nodes = nodes.assign(repeat=np.where(turn >= 0, turn, OUTSIDE))
        nodes = nodes[nodes["repeat"] != OUTSIDE].reset_index(drop=True)
    owners = _find_owners(nodes, _launch_times(timeline.kernels))
    names = np.array([*nodes["name"].tolist(), None], dtype=object)
    kernels = timeline.kernels.assign(node=owners, range=pd.Series(names[owners], dtype="object"))
    total, outside = float(kernels["duration_ns"].sum()), kernels[kernels["node"] == NO_RANGE]
    notes = timeline.notes
    if len(outside):
        part = 100.0 * float(outside["duration_ns"].sum()) / max(total, 1.0)
        notes += (f"{part:.2g}% of the kernels' time is outside of any node: {list_names(outside['name'])}",)
    return replace(timeline, kernels=kernels, nodes=nodes, notes=notes)


def tie_to_ops(timeline: Timeline, graph: ModelGraph, executed: Sequence[ExecutedNode]) -> tuple[Timeline, NodeTimes]:
    """Return the timeline with the op of each kernel, and the kernels' times by node and op.

    A fused node's kernels belong to its costliest op; kernels of a node without an op, such as a copy or a change of
    layout, carry the node's name and type. ``executed``: graph executed by the runtime; empty: each node stands for the
    op of its name.
    """
    events = node_events(timeline)
    nodes = executed or [ExecutedNode(name, kind, (), ()) for name, kind in {e.name: e.op_type for e in events}.items()]
    owned = {
        index: find_costliest(group.ops, graph.ops)
        for group in tie_nodes(graph, nodes).groups
        for index in group.executed
    }
    ops = [None if index is None else owned.get(index) for index in match_events(nodes, events)]
    sums = timeline.kernels.groupby("node")["duration_ns"].sum()
    timed = [replace(event, duration_ns=int(sums.get(row, 0))) for row, event in enumerate(events)]
    columns: dict[str, Any] = {"op_name": [], "op_type": [], "op_signature": []}
    for row in timeline.kernels["node"].tolist():
        position = ops[row] if row != NO_RANGE else None
        op = None if position is None else graph.ops[position]
        event = events[row] if row != NO_RANGE else None
        columns["op_name"].append(op.name if op else event.name if event else None)
        columns["op_type"].append(op.op_type if op else event.op_type if event else None)
        columns["op_signature"].append(op.signature if op else None)
    return replace(timeline, kernels=timeline.kernels.assign(**columns)), node_times(graph, nodes, timed)


def profile_runs(profile: Timeline) -> int:
    """Return the runs of the model in ONNX Runtime's profile."""
    return int((profile.ranges["name"] == RUN_RANGE).sum())


def _find_offset(timeline: Timeline, profile: Timeline, runs: pd.DataFrame) -> int:
    """Return the nanoseconds to add to the profile's times."""
    ranges = profile.ranges.sort_values("start_ns")
    # Clocks declared as Unix time may still differ: the runs decide.
    by_clock = None
    if timeline.epoch_ns is not None and profile.epoch_ns is not None:
        by_clock = profile.epoch_ns - timeline.epoch_ns
    if not len(runs) or len(ranges) < len(runs):
        if by_clock is None:
            raise InputError(
                "ONNX Runtime's profile cannot be joined with the kernels: neither file has the clock of the other",
                "record runs in ranges, and the profile of the same session",
            )
        return by_clock
    ranges = ranges.tail(len(runs))
    first = int((runs["start_ns"].to_numpy() - ranges["start_ns"].to_numpy()).max())
    last = int((runs["end_ns"].to_numpy() - ranges["end_ns"].to_numpy()).min()) + _TICK_NS
    if by_clock is not None and first - _TICK_NS <= by_clock <= last:
        return by_clock
    if first > last + _TICK_NS:
        raise InputError(
            "ONNX Runtime's profile is not of the recorded runs: its runs do not fit into theirs",
            "give the profile of the same session",
        )
    # Tried within the interval allowed by the runs.
    offsets = np.linspace(first, max(first, last)).astype(np.int64)
    moments, ends = (_launch_times(timeline.kernels, name) for name in ("launch_start_ns", "launch_end_ns"))
    places: Integers = timeline.kernels.groupby("repeat").cumcount().to_numpy().astype(np.int64)
    scores = np.array(
        [_score(profile.nodes, moments - offset, np.maximum(moments, ends) - offset, places) for offset in offsets]
    )
    return int(np.median(offsets[scores == scores.max()]))


def _score(nodes: pd.DataFrame, moments: Integers, ends: Integers, places: Integers) -> int:
    """Return the number of launches that lie completely in the node most runs have for the same launch position.

    If the clocks differ, launches near node borders fall into different nodes in different runs.
    """
    owners = _find_owners(nodes, moments)
    names = np.array([*nodes["name"].tolist(), ""], dtype=object)[owners]
    inside = (owners != NO_RANGE) & (owners == _find_owners(nodes, ends))
    counts = pd.DataFrame({"place": places[inside], "node": names[inside]}).value_counts(["place", "node"])
    return int(counts.groupby("place").max().sum())


def _launch_times(kernels: pd.DataFrame, name: str = "launch_start_ns") -> Integers:
    values = column(kernels, name)
    return np.array([NO_RANGE if pd.isna(value) else int(value) for value in values.tolist()], dtype=np.int64)


def _find_owners(nodes: pd.DataFrame, moments: Integers) -> Integers:
    """Return the row of the node around each launch; thread ids are ignored, since nodes run sequentially."""
    zeros = np.zeros(len(nodes), dtype=np.int64)
    ends = nodes["start_ns"] + nodes["duration_ns"] + _TICK_NS
    ranges = pd.DataFrame({"start_ns": nodes["start_ns"], "end_ns": ends, "process_id": zeros, "thread_id": zeros})
    nowhere = np.zeros(len(moments), dtype=np.int64)
    return find_innermost_ranges(ranges, nowhere, nowhere, moments)
