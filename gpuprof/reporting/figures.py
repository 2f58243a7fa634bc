"""Figures of simulations, traces and load tests, from the commands' documents."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from gpuprof.reporting.chart import Axis, Box, Chart, Line, Points, group_bars, stack_bars
from gpuprof.reporting.number import show_number
from gpuprof.reporting.palette import shade_of

Row = Mapping[str, Any]
_STAGE_COLORS = {"router": 6, "network": 5, "batching": 4, "queue": 1, "service": 0}
_MISS_COLORS = {**_STAGE_COLORS, "refused": 3, "full": 7, "failed": 2}
_MOST_BARS = 40
_NO_MODEL = 7  #: Black on white, white on black.
_PERCENTILES, _PREDICTED = ("p50", "p95", "p99"), " predicted"
_PREDICTED_SHADE = 0.45
_MANY_BARS, _BROAD = 72, 1160  # from this many bars on a figure is this many pixels wide


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
    return Line(f"SLO of {len(models)} models: {show_number(slo_ms)} ms", *ends, _NO_MODEL, True)


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
    boxes = stack_bars(names, parts, "ms", tuple(_STAGE_COLORS.values()))
    return _bars("Mean latency by stage", names, "latency in ms", boxes)


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


def devices_over_time_figure(epochs: Sequence[Row]) -> Chart | None:
    """Return how many devices the maps held over time; None when the map did not change."""
    if len(epochs) < 2:
        return None
    steps = [(time, epoch["gpus"]) for epoch in epochs for time in (epoch["begin_s"], epoch["end_s"])]
    line = Line("devices", tuple(float(time) for time, _ in steps), tuple(float(gpus) for _, gpus in steps), 0)
    y = Axis("devices", low=0.0, marks=_whole_marks(max(line.y)))
    return Chart("Devices over time", Axis("time in s"), y, lines=(line,))


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
    models = list(dict.fromkeys(replica["model"] for replica in replicas))
    boxes = tuple(
        Box(
            "",  # no key: the axis has its name
            0.0,
            100.0 * replica["utilization"],
            i - 0.4,
            i + 0.4,
            f"{replica['place']} {replica['model']}: busy {100 * replica['utilization']:.1f}%",
            models.index(replica["model"]),
            shade=shade_of(models.index(replica["model"])),
        )
        for i, replica in enumerate(shown)
    )
    note = "" if len(shown) == len(replicas) else f"The first {len(shown)} of {len(replicas)} replicas."
    return Chart(
        "How busy the replicas were",
        Axis("time in %", low=0.0, high=100.0),
        Axis("replica", names=tuple(f"{replica['place']} {replica['model']}" for replica in shown), is_downwards=True),
        boxes=boxes,
        note=note,
        height=max(120, 16 * len(shown)),
    )


def prediction_figure(title: str, unit: str, pairs: Sequence[tuple[str, str, float, float]]) -> Chart | None:
    """Return predicted against measured figures; ``pairs`` that are not above 0 are left out."""
    kept = [pair for pair in pairs if pair[2] > 0 and pair[3] > 0]
    if not kept:
        return None
    names = list(dict.fromkeys(name for name, *_ in kept))
    points = []
    for i, series in enumerate(names):
        of_series = [pair for pair in kept if pair[0] == series]
        tips = tuple(
            f"{what}: measured {show_number(m)}, predicted {show_number(p)} {unit} ({100 * (p / m - 1):+.1f}%)"
            for _, what, m, p in of_series
        )
        points.append(Points(series, tuple(p[2] for p in of_series), tuple(p[3] for p in of_series), tips, i))
    low, high = min(min(p[2:]) for p in kept), max(max(p[2:]) for p in kept)
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
    latency: dict[str, Sequence[float | None]] = {
        f"{name}{said}": [row.get(f"{key}{name}_ms") for row in rows]
        for name in _PERCENTILES
        for key, said in (("", ""), ("predicted_", _PREDICTED))
        if any(row.get(f"{key}{name}_ms") is not None for row in rows)
    }
    pairs = [
        (name, f"{row['model']} {name}", row[f"{name}_ms"], row[f"predicted_{name}_ms"])
        for name in _PERCENTILES
        for row in rows
        if row.get(f"{name}_ms") is not None and row.get(f"predicted_{name}_ms") is not None
    ]
    charts = [
        goodput_figure(rows),
        _bars("Latency", names, "latency in ms", tuple(map(_color_percentile, group_bars(names, latency, "ms")))),
        prediction_figure("Latency, predicted against measured", "ms", pairs),
    ]
    return [chart for chart in charts if chart is not None]


def _color_percentile(box: Box) -> Box:
    """Return a bar in the colour of its percentile, paler for predicted figures."""
    color = _PERCENTILES.index(box.name.removesuffix(_PREDICTED))
    return replace(box, color=color, shade=_PREDICTED_SHADE if box.name.endswith(_PREDICTED) else 1.0)


def evaluation_figure(rows: Sequence[Row]) -> Chart:
    """Return the median error of estimates, by left-out part and predicted quantity."""
    groups = tuple(dict.fromkeys(f"{row['setting']}: {row['quantity']}" for row in rows))
    predictors = list(dict.fromkeys(row["predictor"] for row in rows))
    errors = {(f"{row['setting']}: {row['quantity']}", row["predictor"]): row["median_pct"] for row in rows}
    parts: dict[str, Sequence[float | None]] = {p: [errors.get((group, p)) for group in groups] for p in predictors}
    upright = group_bars(groups, parts, "%")
    boxes = tuple(replace(b, x0=b.y0, x1=b.y1, y0=b.x0, y1=b.x1) for b in upright)
    return Chart(
        "Median error of estimates, by what was left out",
        Axis("error in %", low=0.0),
        Axis("", names=groups, is_downwards=True),
        boxes=boxes,
        height=max(140, 14 * len(predictors) * len(groups)),
    )


def comparison_figures(rows: Sequence[Row], subject: str, noun: str) -> tuple[Chart, ...]:
    """Return devices, cost and unused capacity by policy or kind of GPU; rows without a map are left out.

    ``rows``: output of ``compare --json``; ``subject``: key of the compared policies or GPUs; ``noun``: their name.
    """
    placed = [row for row in rows if row["gpus"] is not None]
    names = tuple(str(row[subject]) for row in placed)
    columns: list[tuple[str, str, dict[str, str]]] = [
        ("Devices", "devices", {"devices": "gpus", "at lower ends": "gpus_at_lower_ends",
                                "at upper ends": "gpus_at_upper_ends"}),
        ("Cost", "US dollars per hour", {"cost": "cost_per_hour"}),
        ("Goodput", "requests/s", {"goodput": "goodput_rps"}),
    ]  # fmt: skip
    charts = []
    for title, unit, keys in columns:
        parts = {name: [row.get(key) for row in placed] for name, key in keys.items()}
        parts = {name: values for name, values in parts.items() if any(value is not None for value in values)}
        if parts:
            boxes = group_bars(names, parts, unit)
            counted = [value for values in parts.values() for value in values if value is not None]
            marks = _whole_marks(max(counted)) if title == "Devices" else ()
            y = Axis(unit, low=0.0, marks=marks)
            charts.append(Chart(f"{title} by {noun}", Axis(noun, names=names), y, boxes=boxes))
    unused = {"within shares": "internal_slack", "in no share": "external_fragmentation"}
    if placed and all(row.get(key) is not None for row in placed for key in unused.values()):
        shares = {name: [100.0 * row[key] for row in placed] for name, key in unused.items()}
        boxes = group_bars(names, shares, "%")
        charts.append(
            Chart(f"Unused by {noun}", Axis(noun, names=names), Axis("unused in %", low=0.0, high=100.0), boxes=boxes)
        )
    return tuple(charts)


def _whole_marks(most: float) -> tuple[float, ...]:
    """Return the integer tick labels of an axis of counts."""
    power = 10 ** max(0, math.floor(math.log10(max(most, 1.0) / 5.0)))
    step = next(factor * power for factor in (1, 2, 5, 10, 20, 50) if factor * power >= most / 5.0)
    return tuple(float(value) for value in range(0, math.floor(most) + 1, step))


def _bars(title: str, names: tuple[str, ...], unit: str, boxes: tuple[Box, ...]) -> Chart:
    across = len({(box.x0, box.x1) for box in boxes})
    chart = Chart(title, Axis("model", names=names), Axis(unit, low=0.0), boxes=boxes)
    return replace(chart, width=_BROAD) if across > _MANY_BARS else chart
