"""Figures of a kernel database: roofline, timeline, and latency and throughput over batch and share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from gpuprof.reporting.chart import Axis, Box, Chart, Line, Points

Row = Mapping[str, Any]
_TYPES = 6  # op types with a colour of their own, those that take the most time; the others share one
_OTHER = 6
_REST = "other"
_MOST_MARKS = 10  # labels of an axis that stand at what was measured


def roofline_figure(title: str, ops: Sequence[Row], device: Row | None) -> Chart | None:
    """Return arithmetic intensity and rate of each op, under what the device can do; None when no op has both.

    Parameters
    ----------
    title : str
    ops : sequence of mapping
        With ``name``, ``op_type``, ``flops``, ``bytes_read``, ``bytes_written``, ``duration_p50_ns``.
    device : mapping or None
        With ``float32_flops_per_s`` and ``dram_bytes_per_s``, whose roofs are drawn.
    """
    kept = [op for op in ops if op["flops"] and _bytes(op) and op["duration_p50_ns"]]
    if not kept:
        return None
    colors = _type_colors([op for op in ops if op["duration_p50_ns"]])  # as in the timeline
    groups: dict[str, list[Row]] = defaultdict(list)
    for op in kept:
        groups[op["op_type"] if op["op_type"] in colors else "other"].append(op)
    points = tuple(
        Points(
            name,
            tuple(op["flops"] / _bytes(op) for op in rows),
            tuple(op["flops"] / op["duration_p50_ns"] for op in rows),
            tuple(_op_tip(op) for op in rows),
            colors.get(name, _OTHER),
        )
        for name, rows in groups.items()
    )
    intensity = [x for group in points for x in group.x]
    lines = _roofs(device, min(intensity) / 2, max(intensity) * 2)
    return Chart(title, Axis("FLOP per byte", log=True), Axis("GFLOP/s", log=True), lines, points, height=340)


def _bytes(op: Row) -> float:
    return float((op["bytes_read"] or 0) + (op["bytes_written"] or 0))


def _op_tip(op: Row) -> str:
    return (
        f"{op['name']} ({op['op_type']}): {op['flops'] / op['duration_p50_ns']:.4g} GFLOP/s, "
        f"{op['flops'] / _bytes(op):.4g} FLOP/byte, {op['duration_p50_ns'] / 1e3:.4g} µs"
    )


def _roofs(device: Row | None, low: float, high: float) -> tuple[Line, ...]:
    if device is None or not device.get("float32_flops_per_s") or not device.get("dram_bytes_per_s"):
        return ()
    peak, bandwidth = device["float32_flops_per_s"] / 1e9, device["dram_bytes_per_s"] / 1e9
    ridge = peak / bandwidth
    x = tuple(sorted({low, min(max(ridge, low), high), high}))
    return (Line("roof of the device, float32", x, tuple(min(peak, bandwidth * at) for at in x), 7),)


def timeline_figure(title: str, ops: Sequence[Row], kernels: Sequence[Row] = ()) -> Chart | None:
    """Return when what runs in one inference, a row an op type; None when nothing was timed.

    Parameters
    ----------
    title : str
    ops : sequence of mapping
        With ``name``, ``op_type``, ``duration_p50_ns``; where the start of nothing is known, they stand one after the
        other in the order of the graph.
    kernels : sequence of mapping
        With ``name``, ``op_type``, ``repeat``, ``start_ns``, ``duration_ns``; where starts were measured, the
        repetition of median length is shown as it ran.
    """
    measured = _median_repeat(kernels)
    spans = [_Span(row["name"], row["op_type"], *_when(row)) for row in measured] or _in_order(ops)
    if not spans:
        return None
    first = min(span.start_ms for span in spans)
    colors = _type_colors([{"op_type": span.kind, "duration_p50_ns": span.length_ms} for span in spans])
    rows = [*colors, *([_REST] if any(span.kind not in colors for span in spans) else [])]
    boxes = []
    for span in spans:
        kind = span.kind if span.kind in colors else _REST
        start, row = span.start_ms - first, rows.index(kind)
        tip = f"{span.name} ({span.kind}): {span.length_ms:.4g} ms from {start:.4g} ms on"
        color = colors.get(kind, _OTHER)
        boxes.append(Box("", start, start + span.length_ms, row - 0.4, row + 0.4, tip, color))
    return Chart(
        title,
        Axis("time in ms", low=0.0, high=max(box.x1 for box in boxes)),
        Axis("op type", names=tuple(rows)),
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


def _in_order(ops: Sequence[Row]) -> list[_Span]:
    timed = [op for op in ops if op["duration_p50_ns"]]
    ends = list(accumulate(op["duration_p50_ns"] / 1e6 for op in timed))
    lengths = [op["duration_p50_ns"] / 1e6 for op in timed]
    return [
        _Span(op["name"], op["op_type"], end - length, length)
        for op, end, length in zip(timed, ends, lengths, strict=True)
    ]


def _when(kernel: Row) -> tuple[float, float]:
    return kernel["start_ns"] / 1e6, kernel["duration_ns"] / 1e6


def _median_repeat(kernels: Sequence[Row]) -> list[Row]:
    """Return the kernels of the repetition whose time from its first start to its last end is the median of all."""
    repeats: dict[int, list[Row]] = defaultdict(list)
    for kernel in kernels:
        if kernel["start_ns"] is not None and kernel["duration_ns"]:
            repeats[kernel["repeat"]].append({**kernel, "op_type": kernel["op_type"] or _REST})

    def length_ns(rows: Sequence[Row]) -> float:
        return float(max(row["start_ns"] + row["duration_ns"] for row in rows) - min(row["start_ns"] for row in rows))

    ordered = sorted(repeats.values(), key=length_ns)
    return sorted(ordered[len(ordered) // 2], key=lambda row: float(row["start_ns"])) if ordered else []


def _type_colors(ops: Sequence[Row]) -> dict[str, int]:
    """Return the op types that take the most time and a colour for each."""
    times: dict[str, float] = defaultdict(float)
    for op in ops:
        times[op["op_type"]] += op["duration_p50_ns"]
    largest = sorted(times, key=lambda name: (-times[name], name))[:_TYPES]
    return {name: i for i, name in enumerate(largest)}


def over_figures(models: Sequence[Row]) -> list[Chart]:
    """Return latency and throughput over the batch, and latency over the share, of what was measured."""
    rows = [row for row in models if row["latency_p50_ms"] and row["batch"]]
    return [
        chart
        for chart in (
            _over(rows, "batch", "batch size", "latency_p50_ms", "median latency in ms", "Latency over the batch"),
            _over(rows, "batch", "batch size", "throughput_rps", "requests/s", "Throughput over the batch"),
            _over(
                rows, "sm_share_pct", "share in %", "latency_p50_ms", "median latency in ms", "Latency over the share"
            ),
        )
        if chart is not None
    ]


def _over(rows: Sequence[Row], along: str, x_label: str, key: str, y_label: str, title: str) -> Chart | None:
    others = [name for name in ("batch", "sm_share_pct", "mig_profile", "processes") if name != along]
    series: dict[str, dict[float, float]] = defaultdict(dict)
    for row in rows:
        if row.get(key):
            series[_label(row, others)][float(row[along])] = float(row[key])
    several = {name: points for name, points in series.items() if len(points) > 1}
    if not several:
        return None
    lines = tuple(
        Line(name, tuple(sorted(points)), tuple(points[x] for x in sorted(points)), i, dashed=i >= 8)
        for i, (name, points) in enumerate(several.items())
    )
    dots = tuple(
        Points(
            "",
            line.x,
            line.y,
            tuple(f"{line.name}: {y:.4g} at {x:g}" for x, y in zip(line.x, line.y, strict=True)),
            line.color,
        )
        for line in lines
    )
    values = tuple(sorted({x for line in lines for x in line.x}))
    marks = values if len(values) <= _MOST_MARKS else ()
    return Chart(title, Axis(x_label, log=along == "batch", marks=marks), Axis(y_label, log=True), lines, dots)


def _label(row: Row, names: Sequence[str]) -> str:
    words = [str(row["model"])]
    if "batch" in names:
        words.append(f"batch {row['batch']}")
    if "sm_share_pct" in names and row["sm_share_pct"] is not None:
        words.append(f"{row['sm_share_pct']:g}%")
    if row.get("mig_profile"):
        words.append(str(row["mig_profile"]))
    if (row.get("processes") or 1) > 1:
        words.append(f"{row['processes']} processes")
    return " ".join(words)
