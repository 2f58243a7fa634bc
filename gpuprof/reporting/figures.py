"""Figures of simulations, load tests, comparisons, maps and kernel databases."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from gpuprof.domain.catalogue import devices as catalogued
from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition
from gpuprof.domain.device import Device
from gpuprof.domain.plural import count_of
from gpuprof.kernel_db.schema import DeviceRow, KernelRow, ModelRow, OpRow
from gpuprof.reporting.chart import (
    COLORS,
    DASHES,
    LINE,
    Axis,
    Box,
    Chart,
    Line,
    Points,
    group_bars,
    join_points,
    shade_of,
    show_number,
    stack_bars,
)

Row = Mapping[str, Any]
_STAGE_COLORS = {"network": 5, "batching": 4, "queue": 1, "service": 0}
_MISS_COLORS = {**_STAGE_COLORS, "refused": 3, "full": 7, "failed": 2}
#: Stages of a served request in their order, by the field of a load test, with the colours of the simulated stages.
_SERVED_STAGES = {
    "router_ms": ("network and router", 6),
    "queue_ms": ("queue", 1),
    "gather_ms": ("gather", 4),
    "infer_ms": ("model", 0),
    "scatter_ms": ("scatter", 5),
}
_PERCENTILES = ("p50", "p95", "p99")
#: Most bars of a figure.
_MOST_BARS = 48


def cdf_figure(series: Sequence[Row], slos_ms: Mapping[str, float]) -> Chart:
    """Return the distribution of each model's latency, and each SLO as an upright line."""
    lines = []
    models_by_slo: dict[float, dict[str, int]] = defaultdict(dict)
    for i, row in enumerate(series):
        if row["latency_ms"]:
            percent = tuple(100.0 * fraction for fraction in row["fraction"])
            # The curve starts at 0%: where many requests take the least time, its first point is far above 0%.
            times = (row["latency_ms"][0], *row["latency_ms"])
            lines.append(Line(row["model"], times, (0.0, *percent), i))
            models_by_slo[slos_ms[row["model"]]][row["model"]] = i
    lines += [_slo_line(slo_ms, models) for slo_ms, models in sorted(models_by_slo.items())]
    shared = any(len(models) > 1 for models in models_by_slo.values())
    return Chart(
        "Latency: how many requests were answered within a time",
        Axis("latency in ms", log=True),
        Axis("requests in %", low=0.0, high=100.0),
        lines=tuple(lines),
        note="Upright dashed lines: the SLOs, in the colour of their model"
        f"{'; those of several models have a key of their own' if shared else ''}.",
    )


def _slo_line(slo_ms: float, models: Mapping[str, int]) -> Line:
    """Return the vertical line of an SLO, in its model's series or, for several models, in a series of its own.

    ``models``: the models with this SLO, with the numbers of their series.
    """
    ends = (slo_ms, slo_ms), (0.0, 100.0)
    if len(models) == 1:
        ((model, number),) = models.items()
        return Line(f"{model} SLO: {show_number(slo_ms)} ms", *ends, number, True, model)
    return Line(f"SLO of {len(models)} models: {show_number(slo_ms)} ms", *ends, COLORS - 1, True)


def goodput_figure(rows: Sequence[Row]) -> Chart:
    """Return requests and goodput of each model."""
    parts: dict[str, Sequence[float | None]] = {
        "requests": [row["rate_rps"] for row in rows],
        "goodput": [row["goodput_rps"] for row in rows],
    }
    names = tuple(row["model"] for row in rows)
    return _bars("Requests and goodput", names, "requests/s", group_bars(names, parts, "requests/s"))


def stage_figure(models: Sequence[Row]) -> Chart:
    """Return the mean time of a request by stage, for each model."""
    names = tuple(model["model"] for model in models)
    parts = {stage: [model["stage_mean_ms"].get(stage) or 0.0 for model in models] for stage in _STAGE_COLORS}
    return _bars(
        "Mean latency by stage", names, "latency in ms", stack_bars(names, parts, "ms", _STAGE_COLORS.values())
    )


def stages_over_time_figure(row: Row, times_s: Sequence[float]) -> Chart:
    """Return the mean time of a request by stage, over the time of arrival."""
    spans = list(pairwise(times_s))
    groups = [f"{begin:.4g}–{end:.4g} s" for begin, end in spans]
    parts = {stage: [ms or 0.0 for ms in row["stage_mean_ms"][stage]] for stage in _STAGE_COLORS}
    return Chart(
        f"{row['model']}: mean latency by stage over time",
        Axis("time in s", low=times_s[0], high=times_s[-1]),
        Axis("latency in ms", low=0.0),
        boxes=stack_bars(groups, parts, "ms", _STAGE_COLORS.values(), spans),
    )


def goodput_over_time_figure(row: Row, times_s: Sequence[float]) -> Chart:
    """Return the requests, and the requests answered within their SLO, over time."""
    widths = [end - begin for begin, end in pairwise(times_s)]
    middle = tuple((begin + end) / 2 for begin, end in pairwise(times_s))
    lines = tuple(
        Line(name, middle, tuple(n / w for n, w in zip(row[key], widths, strict=True)), color, is_dashed)
        for name, key, color, is_dashed in (("within the SLO", "in_time", 2, False), ("requests", "arrived", 6, True))
    )
    return Chart(
        f"{row['model']}: requests and goodput over time",
        Axis("time in s", low=times_s[0], high=times_s[-1]),
        Axis("requests/s", low=0.0),
        lines=lines,
    )


def devices_over_time_figure(epochs: Mapping[str, Sequence[Row]]) -> Chart | None:
    """Return the number of devices in each policy's maps over time; None when no map changed."""
    if all(len(maps) < 2 for maps in epochs.values()):
        return None
    steps = {
        name: [(float(time), float(epoch["gpus"])) for epoch in maps for time in (epoch["begin_s"], epoch["end_s"])]
        for name, maps in epochs.items()
    }
    y = Axis("devices", low=0.0, is_count=True)
    return Chart("Devices over time", Axis("time in s"), y, lines=join_points(steps))


def in_time_over_time_figure(runs: Mapping[str, Row]) -> Chart:
    """Return the part of all requests within their SLO over time, for each policy's simulation."""
    series = {}
    for name, run in runs.items():
        windows = list(zip(*(model["in_time"] for model in run["series"]), strict=True))
        arrived = list(zip(*(model["arrived"] for model in run["series"]), strict=True))
        series[name] = [
            ((begin + end) / 2, 100.0 * sum(counts) / sum(requests))
            for (begin, end), counts, requests in zip(pairwise(run["times_s"]), windows, arrived, strict=True)
            if sum(requests)
        ]
    y = Axis("requests in %", low=0.0, high=100.0)
    return Chart("Requests within their SLO over time", Axis("time in s"), y, lines=join_points(series))


def misses_figure(models: Sequence[Row]) -> Chart | None:
    """Return the number of requests outside their SLO by cause; None when there were none."""
    causes = [cause for cause in _MISS_COLORS if any(model["missed"].get(cause) for model in models)]
    if not causes:
        return None
    names = tuple(model["model"] for model in models)
    parts = {
        cause: [100.0 * model["missed"].get(cause, 0) / max(1, model["requests"]) for model in models]
        for cause in causes
    }
    boxes = stack_bars(names, parts, "%", [_MISS_COLORS[cause] for cause in causes])
    return _bars("Requests outside their SLO, by cause", names, "requests in %", boxes)


def utilization_figure(replicas: Sequence[Row]) -> Chart:
    """Return the utilisation of each replica; if there are too many, of the first."""
    shown = replicas[:_MOST_BARS]
    names = tuple(f"{replica['place']} {replica['model']}" for replica in shown)
    boxes = group_bars(names, {"busy": [100.0 * replica["utilization"] for replica in shown]}, "%")
    note = "" if len(shown) == len(replicas) else f"The first {len(shown)} of {len(replicas)} replicas."
    y = Axis("time in %", low=0.0, high=100.0)
    return Chart("How busy the replicas were", Axis("replica", names=names), y, boxes=boxes, note=note)


def load_figures(rows: Sequence[Row]) -> list[Chart]:
    """Return the figures of a load test: goodput and latency, measured and predicted."""
    names = tuple(row["model"] for row in rows)
    keys = {name: f"{name}_ms" for name in _PERCENTILES}
    keys |= {f"{name} predicted": f"predicted_{name}_ms" for name in _PERCENTILES}
    latency = {name: [row.get(key) for row in rows] for name, key in keys.items()}
    latency = {name: values for name, values in latency.items() if any(value is not None for value in values)}
    charts = [goodput_figure(rows), _bars("Latency", names, "latency in ms", group_bars(names, latency, "ms"))]
    staged = [row for row in rows if (row.get("stages") or {}).get("infer_ms") is not None]
    if staged:  # a server may keep no statistics
        parts = {
            label: [max(0.0, row["stages"].get(field) or 0.0) for row in staged]
            for field, (label, _) in _SERVED_STAGES.items()
        }
        names = tuple(row["model"] for row in staged)
        boxes = stack_bars(names, parts, "ms", [color for _, color in _SERVED_STAGES.values()])
        charts.append(_bars("Mean latency by stage", names, "latency in ms", boxes))
    return charts


def comparison_figures(rows: Sequence[Row], subject: str, noun: str) -> tuple[Chart, ...]:
    """Return devices, cost and unused capacity by policy or kind of GPU; rows without a map are left out.

    ``rows``: output of ``compare --json``; ``subject``: key of the compared policies or GPUs; ``noun``: their name.
    """
    shown = [row for row in rows if row["gpus"] is not None]
    names = tuple(str(row[subject]) for row in shown)
    columns: list[tuple[str, Axis, dict[str, str], float]] = [
        ("Devices", Axis("devices", low=0.0, is_count=True),
         {"devices": "gpus", "at lower ends": "gpus_at_lower_ends", "at upper ends": "gpus_at_upper_ends"}, 1.0),
        ("Cost", Axis("US dollars per hour", low=0.0), {"cost": "cost_per_hour"}, 1.0),
        ("Goodput", Axis("requests/s", low=0.0), {"goodput": "goodput_rps"}, 1.0),
        ("Unused", Axis("% of the devices", low=0.0, high=100.0),
         {"within shares": "internal_slack", "in no share": "external_fragmentation"}, 100.0),
    ]  # fmt: skip
    charts = []
    for title, axis, keys, factor in columns:
        parts = {
            name: [None if row.get(key) is None else factor * row[key] for row in shown] for name, key in keys.items()
        }
        parts = {name: values for name, values in parts.items() if any(value is not None for value in values)}
        if parts:
            boxes = group_bars(names, parts, axis.label)
            charts.append(Chart(f"{title} by {noun}", Axis(noun, names=names), axis, boxes=boxes))
    return tuple(charts)


def _bars(title: str, names: tuple[str, ...], unit: str, boxes: tuple[Box, ...]) -> Chart:
    return Chart(title, Axis("model", names=names), Axis(unit, low=0.0), boxes=boxes)


_GAP = 0.15  # percent of a device between neighbours


def map_figure(deployment: DeploymentMap) -> Chart:
    """Return the map as a picture: a bar for each GPU, its partitions and replicas as wide as their shares.

    A MIG instance stands at its memory slices. Where the slices of a device are unknown, a note says so and all its
    instances have the same width.
    """
    colors = list(deployment.models)
    has_instances = any(partition.mig is not None for _, _, partition, _ in deployment.places())
    gpus = [(f"{node.name}/{gpu.index}", gpu) for node in deployment.nodes for gpu in node.gpus]
    by_name = catalogued()
    boxes = [
        box for row, (name, gpu) in enumerate(gpus[:_MOST_BARS]) for box in _draw_gpu(row, name, gpu, by_name, colors)
    ]
    return Chart(
        f"Deployment map of {deployment.policy}",
        Axis("% of the device (MIG: of its memory slices)", low=0.0, high=100.0),
        Axis("GPU", names=tuple(f"{name} {gpu.device}" for name, gpu in gpus[:_MOST_BARS]), is_downwards=True),
        boxes=tuple(boxes),
        note=" ".join(_describe(gpus, by_name)),
        height=max(3 * LINE, LINE * (3 if has_instances else 2) * min(len(gpus), _MOST_BARS)),
    )


def _describe(gpus: Sequence[tuple[str, Gpu]], devices: Mapping[str, Device]) -> Iterator[str]:
    if len(gpus) > _MOST_BARS:
        yield f"The first {_MOST_BARS} of {len(gpus)} GPUs."
    unknown = {gpu.device for _, gpu in gpus for partition in gpu.partitions if _slots(partition, gpu, devices) is None}
    if unknown:
        yield f"The MIG slices of {', '.join(sorted(unknown))} are not known: instances are drawn equally wide."


def _draw_gpu(row: int, name: str, gpu: Gpu, devices: Mapping[str, Device], models: Sequence[str]) -> Iterator[Box]:
    low, high = row - 0.4, row + 0.4
    yield Box("", 0.0, 100.0, low, high, f"{name} ({gpu.device})", 0, has_frame=True)
    for index, partition in enumerate(gpu.partitions):
        slots = _slots(partition, gpu, devices)
        at, width = slots or (100.0 * index / len(gpu.partitions), 100.0 / len(gpu.partitions))
        instance = "" if partition.mig is None else f" in {partition.mig.profile} at {partition.mig.start}"
        top = low
        if partition.mig is not None:
            label = "" if partition.replicas else partition.mig.profile
            tip = f"{name} ({gpu.device}){instance}"
            yield Box("", at, at + width, low, high, tip, 0, label, has_frame=True)
            if partition.replicas:
                top = low + 0.3
                yield Box("", at + _GAP, at + width - _GAP, low, top, tip, 0, partition.mig.profile, strip=True)
        for replica in partition.replicas:
            mates = sum(bool(replica.turns) and r.turns == replica.turns for r in partition.replicas)
            share_width = width * replica.sm_share_pct / 100.0 / max(1, mates)
            part = width / len(partition.replicas) if partition.unshared else share_width
            share = "no share" if partition.unshared else f"{replica.sm_share_pct:g}% share"
            share += f" of worker {replica.turns}" if replica.turns else ""
            color = models.index(replica.model) if replica.model in models else len(models)
            label = f"{replica.model} b{replica.batch}" + (f"×{replica.processes}" if replica.processes > 1 else "")
            tip = (
                f"{name} ({gpu.device}): {replica.model}{instance}, {share}, "
                f"batch {replica.batch}, {count_of(replica.processes, 'process')}, "
                f"{show_number(replica.rate_rps)} requests/s, "
                f"batch times {replica.predicted.source or 'of unknown source'}"
            )
            yield Box(replica.model, at + _GAP, at + part - _GAP, top, high, tip, color, label, shade_of(color))
            at += part


def _slots(partition: Partition, gpu: Gpu, devices: Mapping[str, Device]) -> tuple[float, float] | None:
    """Return the start and the width of a partition, in percent; None where the device's slices are unknown."""
    if partition.mig is None:
        return 0.0, 100.0
    device = devices.get(gpu.device)
    if device is None or not device.mig_slices:
        return None
    slices = device.mig_profile(partition.mig.profile).memory_slices
    return 100.0 * partition.mig.start / device.mig_slices, 100.0 * slices / device.mig_slices


_OTHER = COLORS - 2  # the grey of all op types but the longest, which have a colour each
_REST = "other"
_ABOVE = 1.02  # times the roof: smaller excesses are within measurement errors
#: Maximum series of a figure, each with its own colour and dash; with more, further figures follow.
MOST_SERIES = COLORS * len(DASHES)


def roofline_figure(title: str, ops: Sequence[OpRow], device: DeviceRow | None) -> Chart | None:
    """Return arithmetic intensity and rate of each op, below the device's roofline; None when no op has both.

    ``device``: the device of the roofline.
    """
    colors = _type_colors([(op.op_type, op.duration_p50_ns) for op in ops if op.duration_p50_ns])  # as in the timeline
    groups: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for op in ops:
        moved_bytes = (op.bytes_read or 0) + (op.bytes_written or 0)
        if op.flops and moved_bytes and op.duration_p50_ns:
            intensity, gflops = op.flops / moved_bytes, op.flops / op.duration_p50_ns
            tip = (
                f"{op.name} ({op.op_type}): {show_number(gflops)} GFLOP/s, {intensity:.4g} FLOP/byte, "
                f"{show_number(op.duration_p50_ns / 1e3)} µs"
            )
            groups[op.op_type if op.op_type in colors else _REST].append((intensity, gflops, tip))
    if not groups:
        return None
    points = []
    for name, members in groups.items():
        x, y, tips = zip(*members, strict=True)
        points.append(Points(name, x, y, tips, colors.get(name, _OTHER)))
    axes = Axis("FLOP per byte", log=True), Axis("GFLOP/s", log=True)
    if device is None or not device.float32_flops_per_s or not device.dram_bytes_per_s:
        return Chart(title, *axes, points=tuple(points), height=340)
    peak, bandwidth = device.float32_flops_per_s / 1e9, device.dram_bytes_per_s / 1e9
    placed = [(x, y) for group in points for x, y in zip(group.x, group.y, strict=True)]
    low, high = min(x for x, _ in placed) / 2, max(x for x, _ in placed) * 2
    roof = tuple(sorted({low, min(max(peak / bandwidth, low), high), high}))
    line = Line("roof of the device, float32", roof, tuple(min(peak, bandwidth * x) for x in roof), 7)
    above, note = sum(y > _ABOVE * min(peak, bandwidth * x) for x, y in placed), ""
    if above:
        note = (
            f"{count_of(above, 'op')} of {len(placed):,} above the roof: their data came from caches and not from "
            "memory, or the runtime did fewer operations than the graph says, or in lower precision."
        )
    return Chart(title, *axes, (line,), tuple(points), note=note, height=340)


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
    """Yield the chart of all series with several points, divided into several charts if there are too many series."""
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
