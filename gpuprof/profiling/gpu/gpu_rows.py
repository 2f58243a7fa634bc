"""Makes rows of the kernel database from what was recorded on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean, median
from typing import Any

import pandas as pd

from gpuprof.domain.device import Device
from gpuprof.domain.gpu_description import GpuDescription
from gpuprof.domain.model import Op
from gpuprof.graph.executed_graph import Group
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, KernelRow, ModelRow, OpRow
from gpuprof.profiling.child.job import Request
from gpuprof.profiling.child.measurement import Timing
from gpuprof.profiling.cpu.node_times import GroupTime
from gpuprof.profiling.cpu.op_rows import op_row
from gpuprof.profiling.cpu.ort import colocation_rows
from gpuprof.profiling.gpu.nvml import NvmlFigures
from gpuprof.profiling.timeline.creq import GpuRequirement, compute_requirement
from gpuprof.profiling.timeline.launch_occupancy import with_occupancy
from gpuprof.profiling.timeline.link import link_row
from gpuprof.profiling.timeline.timeline import column
from gpuprof.runtime.providers import NODE_RANGE

_KERNEL_REPEATS = 3  # runs of the model whose kernels are kept one by one
_COLUMNS = frozenset(field.name for field in fields(KernelRow))
_FLOATS = frozenset(name for name in _COLUMNS if name.endswith("_pct") or name == "waves_per_sm")
_OWN = frozenset(
    {"run_id", "model", "device", "batch", "sm_share_pct", "mig_profile", "position", "start_ns", "name", "repeat"}
)


@dataclass(frozen=True)
class Recording:
    """What was recorded of one workload, from whatever tools."""

    kernels: pd.DataFrame  #: Of the measured runs; see `Timeline` and `gpuprof.profiling.timeline.kernel_join`.
    copies: pd.DataFrame | None  #: None: no tool recorded them.
    gpus: tuple[GpuDescription, ...]  #: The GPUs that kernels ran on.
    tools: Mapping[str, str]  #: Tool → version.
    notes: tuple[str, ...] = ()
    #: ``plain_kernels``, ``plain_copies``: The same, recorded without ranges around nodes, which take some microseconds
    #: each: what the model's figures are made of. None: there are no such ranges.
    plain_kernels: pd.DataFrame | None = None
    plain_copies: pd.DataFrame | None = None

    def estimate_occupancy(self, device: Device) -> Recording:
        """Return the recording with the occupancy that launches allow where none was counted, and a note of it."""
        kernels, notes = with_occupancy(self.kernels, device)
        plain = None if self.plain_kernels is None else with_occupancy(self.plain_kernels, device)[0]
        return replace(self, kernels=kernels, plain_kernels=plain, notes=(*self.notes, *notes))

    def requirement(self, device: Device, latency_ms: float | None = None) -> GpuRequirement | None:
        """Return what one run of the model needs; see `gpuprof.profiling.timeline.creq.compute_requirement`."""
        of = device if device.sm else None
        if self.plain_kernels is not None:
            return compute_requirement(self.plain_kernels, self.plain_copies, of, latency_ms)
        return compute_requirement(self.kernels, self.copies, of, latency_ms)


def kernel_rows(request: Request, kernels: pd.DataFrame) -> tuple[KernelRow, ...]:
    """Return a row for each kernel of the last few runs, tied to the op whose range launched it."""
    if not len(kernels):
        return ()
    kept = kernels[kernels["repeat"] > kernels["repeat"].max() - _KERNEL_REPEATS]
    starts = column(kept, "start_ns")
    origin = 0 if starts.isna().all() else int(starts.min())
    tied = [column(kept, "range").tolist(), starts.tolist(), kept.groupby("repeat").cumcount().tolist()]
    names = [name for name in kept.columns if name in _COLUMNS - _OWN]
    # Column by column: a dictionary of each row of a frame takes several times as long.
    values = [[_plain_value(name, value) for value in kept[name].tolist()] for name in names]
    common = request.columns()
    owners = _owners(request)
    return tuple(
        KernelRow(
            **common,
            name=str(name),
            position=position,
            repeat=int(repeat),
            start_ns=None if pd.isna(start) else int(start) - origin,
            **_op_columns(owners, within),
            **dict(zip(names, row, strict=True)),
        )
        for name, repeat, within, start, position, row in zip(
            kept["name"].tolist(), kept["repeat"].tolist(), *tied, zip(*values, strict=True), strict=True
        )
    )


def op_rows(request: Request, kernels: pd.DataFrame) -> tuple[OpRow, ...]:
    """Return a row for each op of the model, with the time of its kernels in one run; empty when none could be tied."""
    ops = request.job.graph.ops
    if not len(kernels) or not ops:
        return ()
    names = {within: op.name for within, op in _owners(request).items()}
    owned = pd.Series([ops[0].name] * len(kernels)) if len(ops) == 1 else column(kernels, "range").map(names)
    timed = kernels.assign(op=owned.to_numpy())[["op", "repeat", "duration_ns"]].dropna(subset=["op"])
    if not len(timed):
        return ()
    sums = timed.groupby(["op", "repeat"])["duration_ns"].sum()
    times = {str(op): [float(value) for value in part.tolist()] for op, part in sums.groupby("op")}
    return tuple(
        op_row(request, position, op, _group_time(position, times.get(op.name)), len(times.get(op.name, ())), None)
        for position, op in enumerate(request.job.graph.ops)
    )


def device_rows(request: Request, recorded: Recording) -> tuple[DeviceRow, ...]:
    """Return what the recording says of the device itself: what its link to the host achieved."""
    recorder = next(iter(recorded.tools), "a profiler")  # counters come second
    row = link_row(request.run_id, request.device, recorded.copies, recorder)
    return () if row is None else (row,)


def model_row(request: Request, needed: GpuRequirement | None, **measured: Any) -> ModelRow:
    """Return the model's row: what its kernels say, and what was ``measured`` besides."""
    job = request.job
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
    """Return the columns of ``models`` that timing and NVML fill; memory is what the model added to the idle GPU."""
    held = None
    if sampled.memory_bytes is not None and idle.memory_bytes is not None:
        held = max(sampled.memory_bytes - idle.memory_bytes, 0) or None
    return {
        **asdict(timing.stats),
        "latency_paused_mean_ms": timing.paused_ms,
        "latency_paused_std_ms": timing.paused_std_ms,
        "throughput_rps": timing.throughput_rps,
        "client_sms": timing.sms,
        "memory_peak_bytes": held,
        "power_w": sampled.power_w,
        "idle_power_w": idle.power_w,
        "clock_mhz": sampled.clock_mhz,
    }


def gpu_colocation_rows(
    request: Request, timings: Sequence[Timing], sampled: NvmlFigures, delay_ms: float | None
) -> tuple[ColocationRow, ...]:
    """Return the rows of what ran together; power and clock are the whole GPU's, the delay the first one's."""
    first, *others = colocation_rows(request, timings)
    rows = (replace(first, dispatch_ms=delay_ms), *others)
    return tuple(
        replace(row, power_w=sampled.power_w, clock_mhz=sampled.clock_mhz, client_sms=timing.sms)
        for row, timing in zip(rows, timings, strict=True)
    )


def _figures(needed: GpuRequirement) -> dict[str, Any]:
    unchanged = ("max_occupancy_pct", "wavg_occupancy_pct", "wavg_sm_util_pct", "l2_pct", "dram_pct", "dispatch_ms")
    return {
        **{name: getattr(needed, name) for name in unchanged},
        "h2d_bytes": None if needed.h2d_bytes is None else round(needed.h2d_bytes),
        "d2h_bytes": None if needed.d2h_bytes is None else round(needed.d2h_bytes),
        "kernel_count": max(1, round(needed.kernel_count)),
    }


def _owners(request: Request) -> dict[str, Op]:
    """Return the ops by the range that is around their launches: their name, or that which PyTorch runs them in."""
    ops = request.job.graph.ops
    return {op.name: op for op in ops} | {f"{NODE_RANGE}{op.outputs[0].name}": op for op in ops if op.outputs}


def _op_columns(owners: Mapping[str, Op], within: object) -> dict[str, Any]:
    if len({op.name for op in owners.values()}) == 1:  # a model of one op: whatever it launches is that op's
        within = next(iter(owners))
    op = owners.get(within) if isinstance(within, str) else None
    if op is None:
        return {"op_name": within if isinstance(within, str) and within else None}
    return {"op_name": op.name, "op_type": op.op_type, "op_signature": op.signature}


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
