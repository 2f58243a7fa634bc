"""Figures of simulations, traces and load tests, from the commands' documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from gpuprof.reporting.chart import Axis, Box, Chart, Line, Points, group_bars, stack_bars
from gpuprof.reporting.number import show_number
from gpuprof.reporting.palette import COLORS

Row = Mapping[str, Any]
_STAGE_COLORS = {"router": 6, "network": 5, "batching": 4, "queue": 1, "service": 0}
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
_MOST_BARS = 40


def rate_figure(times_s: Sequence[float], rates: Mapping[str, Sequence[float]]) -> Chart:
    """Return the rate of each model over time."""
    lines = tuple(Line(model, tuple(times_s), tuple(values), i) for i, (model, values) in enumerate(rates.items()))
    return Chart("Requests over time", Axis("time in s"), Axis("requests/s", low=0.0), lines=lines)


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
    """Return where the time of a mean request went, by model."""
    names = tuple(model["model"] for model in models)
    parts = {stage: [model["stage_mean_ms"].get(stage) or 0.0 for model in models] for stage in _STAGE_COLORS}
    return _bars(
        "Mean latency by stage", names, "latency in ms", stack_bars(names, parts, "ms", _STAGE_COLORS.values())
    )


def stages_over_time_figure(row: Row, times_s: Sequence[float]) -> Chart:
    """Return where the time of a mean request went, by the time of its arrival."""
    boxes = []
    below = [0.0] * len(times_s)
    for stage, color in _STAGE_COLORS.items():
        for i, (begin, end) in enumerate(pairwise(times_s)):
            ms = row["stage_mean_ms"][stage][i] or 0.0
            if ms > 0:
                tip = f"{begin:.4g}–{end:.4g} s, {stage}: {show_number(ms)} ms"
                boxes.append(Box(stage, begin, end, below[i], below[i] + ms, tip, color))
                below[i] += ms
    return Chart(
        f"{row['model']}: mean latency by stage over time",
        Axis("time in s", low=times_s[0], high=times_s[-1]),
        Axis("latency in ms", low=0.0),
        boxes=tuple(boxes),
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
    """Return how many devices the maps of each policy held over time; None when no map changed."""
    if all(len(maps) < 2 for maps in epochs.values()):
        return None
    lines = []
    for color, (name, maps) in enumerate(epochs.items()):
        steps = [(float(time), float(epoch["gpus"])) for epoch in maps for time in (epoch["begin_s"], epoch["end_s"])]
        lines.append(Line(name, tuple(time for time, _ in steps), tuple(gpus for _, gpus in steps), color))
    y = Axis("devices", low=0.0, is_count=True)
    return Chart("Devices over time", Axis("time in s"), y, lines=tuple(lines))


def in_time_over_time_figure(runs: Mapping[str, Row]) -> Chart:
    """Return the part of all requests within their SLO over time, for each policy's simulation."""
    lines = []
    for color, (name, run) in enumerate(runs.items()):
        windows = list(zip(*(model["in_time"] for model in run["series"]), strict=True))
        arrived = list(zip(*(model["arrived"] for model in run["series"]), strict=True))
        points = [
            ((begin + end) / 2, 100.0 * sum(counts) / sum(requests))
            for (begin, end), counts, requests in zip(pairwise(run["times_s"]), windows, arrived, strict=True)
            if sum(requests)
        ]
        lines.append(Line(name, tuple(time for time, _ in points), tuple(pct for _, pct in points), color))
    y = Axis("requests in %", low=0.0, high=100.0)
    return Chart("Requests within their SLO over time", Axis("time in s"), y, lines=tuple(lines))


def misses_figure(models: Sequence[Row]) -> Chart | None:
    """Return why requests missed their SLO; None when none did."""
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
    """Return how busy each replica was; the first of them when there are many."""
    shown = replicas[:_MOST_BARS]
    names = tuple(f"{replica['place']} {replica['model']}" for replica in shown)
    boxes = group_bars(names, {"busy": [100.0 * replica["utilization"] for replica in shown]}, "%")
    note = "" if len(shown) == len(replicas) else f"The first {len(shown)} of {len(replicas)} replicas."
    y = Axis("time in %", low=0.0, high=100.0)
    return Chart("How busy the replicas were", Axis("replica", names=names), y, boxes=boxes, note=note)


def prediction_figure(title: str, unit: str, pairs: Sequence[tuple[str, str, float, float]]) -> Chart | None:
    """Return predicted against measured figures; ``pairs`` that are not above 0 are left out."""
    positive = [pair for pair in pairs if pair[2] > 0 and pair[3] > 0]
    if not positive:
        return None
    names = list(dict.fromkeys(name for name, *_ in positive))
    points = []
    for i, series in enumerate(names):
        series_pairs = [pair for pair in positive if pair[0] == series]
        tips = tuple(
            f"{label}: measured {show_number(m)}, predicted {show_number(p)} {unit} ({100 * (p / m - 1):+.1f}%)"
            for _, label, m, p in series_pairs
        )
        points.append(Points(series, tuple(p[2] for p in series_pairs), tuple(p[3] for p in series_pairs), tips, i))
    low, high = min(min(p[2:]) for p in positive), max(max(p[2:]) for p in positive)
    lines = tuple(
        Line(name, (low, high), (low * factor, high * factor), 6, is_dashed=name != "equal")
        for name, factor in (("equal", 1.0), ("10% off", 1.1), ("10% off", 1 / 1.1))
    )
    return Chart(
        title,
        Axis(f"measured in {unit}", log=True, low=low / 1.3, high=high * 1.3),
        Axis(f"predicted in {unit}", log=True, low=low / 1.3, high=high * 1.3),
        lines=lines,
        points=tuple(points),
        height=320,
    )


def load_figures(rows: Sequence[Row]) -> list[Chart]:
    """Return the figures of a load test: goodput and latency, measured and predicted."""
    names = tuple(row["model"] for row in rows)
    keys = {name: f"{name}_ms" for name in _PERCENTILES}
    keys |= {f"{name} predicted": f"predicted_{name}_ms" for name in _PERCENTILES}
    latency = {name: [row.get(key) for row in rows] for name, key in keys.items()}
    latency = {name: values for name, values in latency.items() if any(value is not None for value in values)}
    pairs = [
        (name, f"{row['model']} {name}", row[f"{name}_ms"], row[f"predicted_{name}_ms"])
        for name in _PERCENTILES
        for row in rows
        if row.get(f"{name}_ms") is not None and row.get(f"predicted_{name}_ms") is not None
    ]
    charts = [
        goodput_figure(rows),
        _bars("Latency", names, "latency in ms", group_bars(names, latency, "ms")),
        prediction_figure("Latency, predicted against measured", "ms", pairs),
        _served_stage_figure([row for row in rows if (row.get("stages") or {}).get("infer_ms") is not None]),
        _batch_figure(rows),
    ]
    return [chart for chart in charts if chart is not None]


def _served_stage_figure(rows: Sequence[Row]) -> Chart | None:
    """Return the mean time of requests by stage and model; None where the server kept no statistics."""
    if not rows:
        return None
    names = tuple(row["model"] for row in rows)
    parts = {
        label: [max(0.0, row["stages"].get(field) or 0.0) for row in rows]
        for field, (label, _) in _SERVED_STAGES.items()
    }
    boxes = stack_bars(names, parts, "ms", [color for _, color in _SERVED_STAGES.values()])
    return _bars("Mean latency by stage", names, "latency in ms", boxes)


def _batch_figure(rows: Sequence[Row]) -> Chart | None:
    """Return the distribution of batch sizes, by model; None where the server kept no statistics."""
    sizes_by_model = {row["model"]: _parse_sizes(row) for row in rows if (row.get("stages") or {}).get("batches")}
    sizes_by_model = {model: sizes for model, sizes in sizes_by_model.items() if sum(sizes.values())}
    sizes = sorted({size for counts in sizes_by_model.values() for size in counts})
    if not sizes:
        return None
    stacks = {
        f"batch of {size}": [100.0 * counts.get(size, 0) / sum(counts.values()) for counts in sizes_by_model.values()]
        for size in sizes
    }
    names = tuple(sizes_by_model)
    return _bars("Batches by size", names, "batches in %", stack_bars(names, stacks, "%", range(len(sizes))))


def _parse_sizes(row: Row) -> dict[int, int]:
    sizes = {int(size): int(count) for size, count in row["stages"]["batches"].items()}
    if min(*sizes, *sizes.values()) < 0:
        raise ValueError("a batch size or a count of batches is negative")
    return sizes


def evaluation_figure(rows: Sequence[Row]) -> Chart:
    """Return the median error of estimates, by left-out part and predicted quantity."""
    groups = tuple(dict.fromkeys(f"{row['setting']}: {row['quantity']}" for row in rows))
    predictors = list(dict.fromkeys(row["predictor"] for row in rows))
    errors = {(f"{row['setting']}: {row['quantity']}", row["predictor"]): row["median_pct"] for row in rows}
    parts: dict[str, Sequence[float | None]] = {p: [errors.get((group, p)) for group in groups] for p in predictors}
    title = "Median error of estimates, by what was left out"
    boxes = group_bars(groups, parts, "%")
    return Chart(title, Axis("left out", names=groups), Axis("error in %", low=0.0), boxes=boxes)


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
