"""Makes rows of the kernel database from recordings on a GPU.

Kernels are tied to the ONNX Runtime nodes that launched them (`gpuprof.profiling.gpu.node_join`), and through these to
the ops of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean, median
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.domain.catalogue import GpuDescription
from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph
from gpuprof.graph.executed_graph import ExecutedNode, Group, find_costliest, tie_nodes
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, KernelRow, ModelRow, OpRow
from gpuprof.profiling.cpu.op_rows import (
    KERNEL_REPEATS,
    GroupTime,
    NodeTimes,
    match_events,
    node_events,
    node_times,
    op_row,
)
from gpuprof.profiling.cpu.op_rows import op_rows as node_op_rows
from gpuprof.profiling.cpu.ort import colocation_rows
from gpuprof.profiling.gpu.nvml import NvmlFigures
from gpuprof.profiling.timeline.creq import GpuRequirement, compute_requirement, with_occupancy
from gpuprof.profiling.timeline.timeline import (
    D2H,
    H2D,
    NO_RANGE,
    Timeline,
    column,
)
from gpuprof.profiling.worker.job import Request
from gpuprof.profiling.worker.measurement import Timing

#: Smallest copy evaluated: at 64 GB/s it takes 16 µs, some ten times the setup of a copy.
LEAST_BYTES = 2**20
_COLUMNS = frozenset(field.name for field in fields(KernelRow))
_FLOATS = frozenset(name for name in _COLUMNS if name.endswith("_pct") or name == "waves_per_sm")
_OWN = frozenset(
    {"run_id", "model", "device", "batch", "sm_share_pct", "mig_profile", "position", "start_ns", "name", "repeat"}
)


def tie_to_ops(timeline: Timeline, graph: ModelGraph, executed: Sequence[ExecutedNode]) -> tuple[Timeline, NodeTimes]:
    """Return the timeline with the op of each kernel, and the kernels' times by node and op.

    A fused node's kernels belong to its costliest op; kernels of a node without an op, such as a copy or a change of
    layout, carry the node's name and type. ``executed``: graph executed by the runtime; empty: each node stands for the
    op of its name, and for ops without a node that use its output.
    """
    events = node_events(timeline)
    nodes = executed or _assume_executed(graph, {event.name: event.op_type for event in events})
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


def _assume_executed(graph: ModelGraph, types: Mapping[str, str]) -> list[ExecutedNode]:
    """Return the nodes with these names and types; runtimes fuse ops into the node before them."""
    outputs: dict[str, list[str]] = {name: [] for name in types}
    home: dict[str, str] = {}
    for op in graph.ops:
        producers = [home[tensor.name] for tensor in op.inputs if tensor.name in home]
        node = op.name if op.name in types else next(iter(producers), None)
        if node is not None:
            outputs[node] += [tensor.name for tensor in op.outputs]
            home |= {tensor.name: node for tensor in op.outputs}
    return [ExecutedNode(name, kind, (), tuple(outputs[name])) for name, kind in types.items()]


@dataclass(frozen=True)
class Recording:
    """A recording of a workload by any tools."""

    kernels: pd.DataFrame  #: Kernels of the measured runs; see `Timeline` and `gpuprof.profiling.timeline.timeline`.
    gpus: tuple[GpuDescription, ...]  #: The GPUs that kernels ran on.
    tools: Mapping[str, str]  #: Tool → version.
    notes: tuple[str, ...] = ()
    timeline: Timeline | None = None  #: Timeline of the same runs, with copies; None: kernels were only counted.
    #: The same, recorded while the runtime's own profiler was off: the source of the model's figures; its kernels have
    #: the counters. None: as ``timeline``.
    plain: Timeline | None = None
    nodes: NodeTimes | None = None  #: Kernels' times by the runtime's nodes and the model's ops.
    executed: tuple[ExecutedNode, ...] = ()  #: Graph executed by the runtime, if recorded.
    lost: tuple[str, ...] = ()  #: Reasons for missing requested counters.

    @property
    def runs(self) -> int:
        """Number of the model's runs in the recording, at least one."""
        return max(1, int(self.kernels["repeat"].nunique()))

    @property
    def is_on_cpu(self) -> bool:
        """True if ONNX Runtime ran the model on a CPU."""
        nodes = None if self.timeline is None or self.gpus else self.timeline.nodes
        return nodes is not None and len(nodes) > 0 and bool(nodes["provider"].str.startswith("CPU").all())

    def estimate_occupancy(self, device: Device) -> Recording:
        """Return the recording with occupancies estimated from launches, and a note if nothing was counted."""
        kernels, notes = with_occupancy(self.kernels, device)
        plain = self.plain and replace(self.plain, kernels=with_occupancy(self.plain.kernels, device)[0])
        return replace(self, kernels=kernels, plain=plain, notes=(*self.notes, *notes))

    def requirement(self, device: Device, latency_ms: float | None = None) -> GpuRequirement | None:
        """Return the requirements of a run of the model; see `gpuprof.profiling.timeline.creq.compute_requirement`."""
        kernels = self.kernels if self.plain is None else self.plain.kernels
        return compute_requirement(kernels, self.plain or self.timeline, device if device.sm else None, latency_ms)

    def tie_to_ops(self, graph: ModelGraph) -> Recording:
        """Return the recording with the op of each kernel, if the runtime's nodes were recorded."""
        if self.timeline is None or "node" not in self.kernels or not (graph.ops or len(self.timeline.nodes)):
            return self
        has_node = self.kernels["node"].notna()
        here = self.kernels[has_node].astype({"node": np.int64}).reset_index(drop=True)
        tied, nodes = tie_to_ops(replace(self.timeline, kernels=here), graph, self.executed)
        rest = self.kernels[~has_node]
        kernels = pd.concat([tied.kernels, rest], ignore_index=True) if len(rest) else tied.kernels
        return replace(self, kernels=kernels, nodes=nodes, notes=(*self.notes, *nodes.notes()))


def kernel_rows(request: Request, kernels: pd.DataFrame) -> tuple[KernelRow, ...]:
    """Return a row for each kernel of the last few runs, with its op if known."""
    if not len(kernels):
        return ()
    tied = kernels["repeat"].isin(kernels["repeat"][column(kernels, "op_name").notna()])
    kernels = kernels[tied] if tied.any() else kernels  # rather than runs replayed from CUDA graphs
    last = kernels[kernels["repeat"] > kernels["repeat"].max() - KERNEL_REPEATS]
    ops = {op.name: op for op in request.job.graph.ops}
    if "op_name" not in last:
        names = [name if isinstance(name, str) and name else None for name in column(last, "range").tolist()]
        types = column(last, "op_type").tolist()
        last = last.assign(
            op_name=names,
            op_type=[ops[name].op_type if name in ops else kind for name, kind in zip(names, types, strict=True)],
            op_signature=[ops[name].signature if name in ops else None for name in names],
        )
    starts = column(last, "start_ns")
    origin = 0 if starts.isna().all() else int(starts.min())
    positions = last.groupby("repeat").cumcount().tolist()
    columns = [str(name) for name in last.columns if name in _COLUMNS - _OWN]
    # Column by column: a dictionary per row of a frame takes several times as long.
    values = [[_plain_value(name, value) for value in last[name].tolist()] for name in columns]
    common = request.columns()
    return tuple(
        KernelRow(
            **common,
            name=str(name),
            position=position,
            repeat=int(repeat),
            start_ns=None if pd.isna(start) else int(start) - origin,
            **dict(zip(columns, row, strict=True)),
        )
        for name, repeat, start, position, row in zip(
            last["name"].tolist(),
            last["repeat"].tolist(),
            starts.tolist(),
            positions,
            zip(*values, strict=True),
            strict=True,
        )
    )


def op_rows(request: Request, recording: Recording) -> tuple[OpRow, ...]:
    """Return a row for each op of the model, with its kernels' time in a run; empty without any tied kernel."""
    ops, kernels = request.job.graph.ops, recording.kernels
    if recording.nodes is not None:
        return node_op_rows(request, recording.nodes)
    if not len(kernels) or not ops:
        return ()
    names = {op.name: op.name for op in ops}
    timed = kernels.assign(op=column(kernels, "range").map(names).to_numpy())[["op", "repeat", "duration_ns"]].dropna(
        subset=["op"]
    )
    if not len(timed):
        return ()
    sums = timed.groupby(["op", "repeat"])["duration_ns"].sum()
    times = {str(op): [float(value) for value in part.tolist()] for op, part in sums.groupby("op")}
    return tuple(
        op_row(request, position, op, _group_time(position, times.get(op.name)), len(times.get(op.name, ())), None)
        for position, op in enumerate(ops)
    )


def device_rows(request: Request, recorded: Recording) -> tuple[DeviceRow, ...]:
    """Return the row of the device itself, with the measured bandwidth of its link to the host; empty without copies.

    iGniter (section 3.1) divides a model's inputs and outputs by this bandwidth. Rates from pinned and from pageable
    memory differ by a factor: the kind with the most copies is used, which is typical of the models on this device.
    """
    timeline, tool = recorded.plain or recorded.timeline, next(iter(recorded.tools), "a profiler")
    if timeline is None or not len(timeline.copies):
        return ()
    copies = timeline.copies.assign(memory=column(timeline.copies, "memory").astype("object").fillna("unknown"))
    # A migration of unified memory moves pages on demand: its rate is not that of a copy.
    large = copies[(copies["bytes"] >= LEAST_BYTES) & (copies["duration_ns"] > 0) & (copies["memory"] != "unified")]
    rates: dict[str, float] = {}
    memories, texts = list[str](), list[str]()
    for direction in (H2D, D2H):
        here = large[large["direction"] == direction]
        if len(here):
            memory = str(here["memory"].value_counts().idxmax())
            chosen = here[here["memory"] == memory]
            rates[direction] = float(chosen["bytes"].sum()) / float(chosen["duration_ns"].sum()) * 1e9
            memories.append(memory)
            texts.append(f"{len(chosen)} copies {direction} of {memory} memory")
    if not rates:
        return ()
    device = request.device
    row = DeviceRow(
        run_id=request.run_id,
        device=device.name,
        kind=device.kind,
        compute_units=device.compute_units,
        compute_capability=device.compute_capability,
        pcie_bytes_per_s=rates.get(H2D),
        pcie_d2h_bytes_per_s=rates.get(D2H),
        pcie_memory=None if memories[0] == "unknown" else memories[0],
        measured=True,
        source=f"measured: {', '.join(texts)}, each of {LEAST_BYTES >> 20} MiB or more, in a timeline by {tool}",
    )
    return (row,)


def model_row(
    request: Request, needed: GpuRequirement | None, nodes: NodeTimes | None = None, **measured: Any
) -> ModelRow:
    """Return the model's row: the figures of its kernels and nodes, and further ``measured`` columns."""
    job = request.job
    if nodes is not None:
        measured |= {"node_time_ms": nodes.total_ns / 1e6, "untied_time_ms": nodes.untied_ns / 1e6}
    return ModelRow(
        **request.columns(),
        processes=job.processes,
        model_sha256=job.graph.sha256 or None,
        model_path=job.graph.path or None,
        weight_bytes=job.graph.weight_bytes if job.graph.ops else None,
        flops=job.graph.flops if job.graph.ops else None,
        **{**(_figures(needed) if needed else {}), **measured},
    )


def timing_columns(timing: Timing, sampled: NvmlFigures, idle: NvmlFigures) -> dict[str, Any]:
    """Return the columns of ``models`` from timing and NVML; memory is the increase over the idle GPU."""
    memory_bytes = None
    if sampled.memory_bytes is not None and idle.memory_bytes is not None:
        memory_bytes = max(sampled.memory_bytes - idle.memory_bytes, 0) or None
    return {
        **asdict(timing.stats),
        "latency_paused_mean_ms": timing.paused_ms,
        "latency_paused_std_ms": timing.paused_std_ms,
        "throughput_rps": timing.throughput_rps,
        "client_sms": timing.loaded.sms,
        "memory_peak_bytes": memory_bytes,
        "power_w": sampled.power_w,
        "idle_power_w": idle.power_w,
        "clock_mhz": sampled.clock_mhz,
    }


def gpu_colocation_rows(
    request: Request, timings: Sequence[Timing], sampled: NvmlFigures, delay_ms: float | None
) -> tuple[ColocationRow, ...]:
    """Return the rows of co-located workloads; power and clock are the whole GPU's, the delay the first workload's."""
    first, *rest = colocation_rows(request, timings)
    rows = (replace(first, dispatch_ms=delay_ms), *rest)
    return tuple(
        replace(row, power_w=sampled.power_w, clock_mhz=sampled.clock_mhz, client_sms=timing.loaded.sms)
        for row, timing in zip(rows, timings, strict=True)
    )


def _figures(needed: GpuRequirement) -> dict[str, Any]:
    unchanged = (
        *("max_occupancy_pct", "wavg_occupancy_pct", "wavg_sm_util_pct", "occupancy_source"),
        *("l2_pct", "dram_pct", "dispatch_ms"),
    )
    return {
        **{name: getattr(needed, name) for name in unchanged},
        "h2d_bytes": None if needed.h2d_bytes is None else round(needed.h2d_bytes),
        "d2h_bytes": None if needed.d2h_bytes is None else round(needed.d2h_bytes),
        "kernel_count": None if needed.kernel_count is None else max(1, round(needed.kernel_count)),
    }


def _group_time(position: int, times: list[float] | None) -> GroupTime | None:
    if not times:
        return None
    return GroupTime(Group([position], []), fmean(times), median(times), round(min(times)))


def _plain_value(name: str, value: Any) -> Any:
    if value is None or (not isinstance(value, str) and pd.isna(value)):
        return None
    if isinstance(value, str):
        return value
    return float(value) if name in _FLOATS else int(value)
