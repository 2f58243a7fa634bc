"""Figures of a kernel database: roofline, timeline, and latency and throughput over batch and share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gpuprof.domain.plural import count_of
from gpuprof.kernel_db.schema import DeviceRow, KernelRow, ModelRow, OpRow
from gpuprof.reporting.chart import Axis, Box, Chart, Line, Points
from gpuprof.reporting.number import show_number
from gpuprof.reporting.palette import COLORS

_OTHER = COLORS - 2  # the grey of all op types but the longest, which have a colour each
_REST = "other"
_ABOVE = 1.02  # times the roof: smaller excesses are within measurement errors
#: Maximum series of a figure; with more, further figures follow.
MOST_SERIES = 24


def roofline_figure(title: str, ops: Sequence[OpRow], device: DeviceRow | None) -> Chart | None:
    """Return arithmetic intensity and rate of each op, below the device's roofline; None when no op has both.

    ``device``: the device of the roofline.
    """
    timed = [timed_op for op in ops if (timed_op := _time_op(op)) is not None]
    if not timed:
        return None
    colors = _type_colors([(op.op_type, op.duration_p50_ns) for op in ops if op.duration_p50_ns])  # as in the timeline
    groups: dict[str, list[_TimedOp]] = defaultdict(list)
    for timed_op in timed:
        groups[timed_op.op.op_type if timed_op.op.op_type in colors else _REST].append(timed_op)
    points = tuple(
        Points(
            name,
            tuple(point.intensity for point in members),
            tuple(point.gflops for point in members),
            tuple(point.tip for point in members),
            colors.get(name, _OTHER),
        )
        for name, members in groups.items()
    )
    intensity = [x for group in points for x in group.x]
    lines = _roofs(device, min(intensity) / 2, max(intensity) * 2)
    axes = Axis("FLOP per byte", log=True), Axis("GFLOP/s", log=True)
    return Chart(title, *axes, lines, points, note=_explain_above(timed, device), height=340)


@dataclass(frozen=True, slots=True)
class _TimedOp:
    """An op with its rate in GFLOP/s, its FLOP per byte and its time."""

    op: OpRow
    gflops: float
    intensity: float
    duration_us: float

    @property
    def tip(self) -> str:
        """Tooltip of this op."""
        return (
            f"{self.op.name} ({self.op.op_type}): {show_number(self.gflops)} GFLOP/s, "
            f"{self.intensity:.4g} FLOP/byte, {show_number(self.duration_us)} µs"
        )


def _time_op(op: OpRow) -> _TimedOp | None:
    moved_bytes = float((op.bytes_read or 0) + (op.bytes_written or 0))
    if not op.flops or not moved_bytes or not op.duration_p50_ns:
        return None
    return _TimedOp(op, op.flops / op.duration_p50_ns, op.flops / moved_bytes, op.duration_p50_ns / 1e3)


def _roofs(device: DeviceRow | None, low: float, high: float) -> tuple[Line, ...]:
    if device is None or not device.float32_flops_per_s or not device.dram_bytes_per_s:
        return ()
    peak, bandwidth = device.float32_flops_per_s / 1e9, device.dram_bytes_per_s / 1e9
    ridge = peak / bandwidth
    x = tuple(sorted({low, min(max(ridge, low), high), high}))
    return (Line("roof of the device, float32", x, tuple(min(peak, bandwidth * at) for at in x), 7),)


def _explain_above(timed: Sequence[_TimedOp], device: DeviceRow | None) -> str:
    """Return the number of ops above the roof, and the reasons; empty for no such op or an unknown roof."""
    if device is None or not device.float32_flops_per_s or not device.dram_bytes_per_s:
        return ""
    peak, bandwidth = device.float32_flops_per_s / 1e9, device.dram_bytes_per_s / 1e9
    by_memory = sum(op.gflops > _ABOVE * bandwidth * op.intensity and op.gflops <= _ABOVE * peak for op in timed)
    by_peak = sum(point.gflops > _ABOVE * peak for point in timed)
    if not by_memory and not by_peak:
        return ""
    reasons = []
    if by_memory:
        reasons.append(f"{by_memory:,} by its slope: their data came from caches and not from memory")
    if by_peak:
        reasons.append(
            f"{by_peak:,} by its top: the runtime did fewer operations than the graph says, or in lower precision"
        )
    return f"{count_of(by_memory + by_peak, 'op')} of {len(timed):,} above the roof: {'; '.join(reasons)}."


def timeline_figure(title: str, ops: Sequence[OpRow], kernels: Sequence[KernelRow] = ()) -> Chart | None:
    """Return the timeline of one inference, a row for each op type; None without times.

    ``ops``: drawn consecutively in the order of the graph, where no start is known; ``kernels``: with measured starts,
    the repetition of median length is drawn.
    """
    measured = _median_repeat(kernels)
    spans = measured or _in_order(ops)
    if not spans:
        return None
    first = min(span.start_ms for span in spans)
    colors = _type_colors([(span.kind, span.length_ms) for span in spans])
    rows = list(dict.fromkeys([*colors, *(_REST for span in spans if span.kind not in colors)]))
    boxes = []
    for span in spans:
        kind = span.kind if span.kind in colors else _REST
        start, row = span.start_ms - first, rows.index(kind)
        tip = f"{span.name} ({span.kind}): {show_number(span.length_ms)} ms from {show_number(start)} ms on"
        color = colors.get(kind, _OTHER)
        boxes.append(Box("", start, start + span.length_ms, row - 0.4, row + 0.4, tip, color))
    return Chart(
        title,
        Axis("time in ms", low=0.0, high=max(box.x1 for box in boxes)),
        Axis("op type", names=tuple(rows), is_downwards=True),
        boxes=tuple(boxes),
        note=f"As measured, in the repetition of median length ({len(spans)} kernels)."
        if measured
        else "Ops by their median times, one after the other in the order of the graph: no starts were measured.",
        height=max(80, 26 * len(rows)),
    )


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    kind: str
    start_ms: float
    length_ms: float


def _in_order(ops: Sequence[OpRow]) -> list[_Span]:
    timed = [(op, op.duration_p50_ns / 1e6) for op in ops if op.duration_p50_ns]
    ends = accumulate(length for _, length in timed)
    return [_Span(op.name, op.op_type, end - length, length) for (op, length), end in zip(timed, ends, strict=True)]


def _median_repeat(kernels: Sequence[KernelRow]) -> list[_Span]:
    """Return the kernels of the median repetition, by the time from its first start to its last end."""
    repeats: dict[int, list[_Span]] = defaultdict(list)
    for kernel in kernels:
        if kernel.start_ns is not None and kernel.duration_ns:
            span = _Span(kernel.name, kernel.op_type or _REST, kernel.start_ns / 1e6, kernel.duration_ns / 1e6)
            repeats[kernel.repeat].append(span)

    def length_ms(spans: Sequence[_Span]) -> float:
        return max(span.start_ms + span.length_ms for span in spans) - min(span.start_ms for span in spans)

    ordered = sorted(repeats.values(), key=length_ms)
    return sorted(ordered[len(ordered) // 2], key=lambda span: span.start_ms) if ordered else []


def _type_colors(times: Iterable[tuple[str, float]]) -> dict[str, int]:
    """Return the op types that take the most time and a colour for each."""
    sums: dict[str, float] = defaultdict(float)
    for op_type, time in times:
        sums[op_type] += time
    largest = sorted(sums, key=lambda name: (-sums[name], name))[:_OTHER]
    return {name: i for i, name in enumerate(largest)}


def batch_and_share_figures(models: Sequence[ModelRow], model: str = "") -> list[Chart]:
    """Return latency and throughput over the batch, and latency over the share, from measured rows.

    With rows of a single ``model``, its name is in the titles instead of in every key.

    Where there are too many series for a figure, further figures follow.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(row.model for row in models))}
    ordered = sorted(
        (row for row in models if row.latency_p50_ms and row.batch),
        key=lambda row: (places[row.model], row.mig_profile or "", row.sm_share_pct or 0.0, row.batch, row.processes),
    )
    rows = [replace(row, model="") if model else row for row in ordered]
    return [
        chart
        for column, x_label, key, y_label, title in (
            ("batch", "batch size", "latency_p50_ms", "median latency in ms", "latency over the batch"),
            ("batch", "batch size", "throughput_rps", "requests/s", "throughput over the batch"),
            ("sm_share_pct", "share in %", "latency_p50_ms", "median latency in ms", "latency over the share"),
        )
        for chart in _over(rows, column, x_label, key, y_label, f"{model}: {title}" if model else title.capitalize())
    ]


def _over(rows: Sequence[ModelRow], column: str, x_label: str, key: str, y_label: str, title: str) -> Iterator[Chart]:
    """Yield the chart of all series of several points; further charts where they are too many for one."""
    other_columns = [name for name in ("batch", "sm_share_pct", "mig_profile", "processes") if name != column]
    series: dict[str, dict[float, float]] = defaultdict(dict)
    for row in rows:
        if value := getattr(row, key):
            series[_label(row, other_columns)][float(getattr(row, column))] = float(value)
    names = [name for name, points in series.items() if len(points) > 1]
    chart_size = math.ceil(len(names) / max(1, math.ceil(len(names) / MOST_SERIES)))
    for first in range(0, len(names), max(1, chart_size)):
        chart_names = names[first : first + chart_size]
        lines, dots = [], []
        for i, name in enumerate(chart_names):
            x = tuple(sorted(series[name]))
            y = tuple(series[name][at] for at in x)
            lines.append(Line(name, x, y, i))
            tips = tuple(f"{name}: {show_number(b)} at {a:g}" for a, b in zip(x, y, strict=True))
            dots.append(Points("", x, y, tips, i, name))
        values = tuple(sorted({at for line in lines for at in line.x}))
        part = f" ({first + 1} to {first + len(chart_names)} of {len(names)})" if len(names) > MOST_SERIES else ""
        x_axis = Axis(x_label, log=column == "batch", marks=values if len(values) <= 10 else ())
        yield Chart(f"{title}{part}", x_axis, Axis(y_label, log=True), tuple(lines), tuple(dots))


def _label(row: ModelRow, names: Sequence[str]) -> str:
    parts = [row.model] if row.model else []
    if "batch" in names:
        parts.append(f"batch {row.batch}")
    if "sm_share_pct" in names and row.sm_share_pct is not None:
        parts.append(f"{row.sm_share_pct:g}%")
    if row.mig_profile:
        parts.append(row.mig_profile)
    if row.processes > 1:
        parts.append(f"{row.processes} processes")
    return " ".join(parts)
