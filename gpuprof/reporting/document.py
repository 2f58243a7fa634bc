"""Input of a report: output files of the commands, whose kind is detected from their content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.file_access import read_input
from gpuprof.domain.map_file import parse_map
from gpuprof.domain.map_sources import describe_basis, describe_sources, is_observed
from gpuprof.domain.number_format import number_formatter
from gpuprof.domain.plural import count_of
from gpuprof.errors import InputError
from gpuprof.reporting.chart import Chart
from gpuprof.reporting.figures import (
    cdf_figure,
    comparison_figures,
    devices_over_time_figure,
    evaluation_figure,
    goodput_figure,
    goodput_over_time_figure,
    in_time_over_time_figure,
    load_figures,
    misses_figure,
    stage_figure,
    stages_over_time_figure,
    utilization_figure,
)
from gpuprof.reporting.map_figures import map_figure
from gpuprof.reporting.number import show_number

_TAKEN = "give a database, a map, or the --json output of compare, simulate, load or evaluate"
#: Parts for single models are folded where there are more.
_UNFOLDED = 6


@dataclass(frozen=True, slots=True)
class Table:
    """A table below the pictures: headings, and rows of equal length."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report."""

    #: ``title``, ``text``: Heading, and a sentence on the content.
    title: str
    text: str
    charts: tuple[Chart, ...]
    table: Table | None = None
    source: str = ""  #: Source of its figures: ``"measured"``, ``"predicted"``, ``"simulated"`` …
    is_folded: bool = False  #: Whether a page shows only its heading at first.


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises `InputError` when the file cannot be read, is no JSON or is larger than any result.
    """
    content = read_input(path, _TAKEN)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", _TAKEN) from None


def sections_of(content: Any, where: str) -> tuple[list[Section], DeploymentMap | None]:
    """Return the sections for the output of a command; and the map, if the output is a map.

    Raises `InputError` for other files, or a missing part.
    """
    try:
        if isinstance(content, dict) and str(content.get("schema", "")).startswith("gpuprof.deployment/"):
            deployment = parse_map(content, where)
            return [_make_map_section(deployment, where)], deployment
        if isinstance(content, dict) and str(content.get("schema", "")).startswith("gpuprof.simulation/"):
            return _make_simulation_sections(content, where), None
        if _is_policies(content):
            return _make_policy_sections(content, where), None
        if _is_rows(content, ("goodput_rps", "lag_p99_ms")) or _is_rows(content, ("goodput_rps", "p99_ms")):
            return [_make_load_section(content, where)], None
        if _is_rows(content, ("policy", "gpus", "goodput_rps", "seconds")):
            return [_make_comparison_section(content, where, "policy")], None
        if _is_rows(content, ("device", "gpus", "utilization_pct", "seconds")):
            return [_make_comparison_section(content, where, "device")], None
        if _is_rows(content, ("setting", "quantity", "predictor", "median_pct")):
            return [_make_evaluation_section(content, where)], None
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        message = f"{where} is damaged, or of another version: {reason}"
        raise InputError(message, "write it again with --json") from None
    raise InputError(f"{where} is not something that a report can be made from", _TAKEN)


def _is_rows(content: Any, keys: Sequence[str]) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(row, dict) and all(key in row for key in keys) for row in content)
    )


def _is_policies(content: Any) -> bool:
    """Return whether the content is the output of ``simulate`` for several policies."""
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(run, dict) and "rescheduling" in run for run in content.values())
    )


def _require_names(rows: Sequence[Mapping[str, Any]], *keys: str) -> None:
    for row in rows:
        for key in keys:
            if not isinstance(row[key], str):
                raise ValueError(f"{key} must be a name but is {row[key]!r}")


def _make_map_section(deployment: DeploymentMap, where: str) -> Section:
    predicted = deployment.predicted
    cost = "" if predicted.cost_per_hour is None else f", {predicted.cost_per_hour:.4g} dollars an hour"
    replicas = sum(1 for _ in deployment.places())
    size_text = f"{count_of(replicas, 'replica')} on {count_of(predicted.gpus, 'device')}"
    text = f"{where}: {size_text}{cost}, by the policy {deployment.policy}."
    if sources := describe_sources(deployment):
        text += f" Times: {sources}."
    if basis := describe_basis(deployment):
        text += f" What it rests on: {basis}."
    sources_by_model: dict[str, set[str]] = {}
    for *_, replica in deployment.places():
        sources_by_model.setdefault(replica.model, set()).add(replica.predicted.source)
    rows = [
        {
            "model": name,
            "rate_rps": model.rate_rps,
            "slo_ms": model.slo_ms,
            "predicted goodput/s": None if model.predicted is None else model.predicted.goodput_rps,
            "predicted p99 ms": None if model.predicted is None else model.predicted.p99_ms,
            "sources": "; ".join(sorted(sources_by_model.get(name, ()))) or None,
        }
        for name, model in deployment.models.items()
    ]
    source = "predicted from measurements" if is_observed(deployment) else "predicted"
    return Section(
        f"Map of {deployment.policy}",
        text,
        (map_figure(deployment),),
        _make_table(rows, tuple(rows[0]) if rows else ()),
        source,
    )


def _make_simulation_sections(content: Mapping[str, Any], where: str) -> list[Section]:
    models = list(content["models"]) + list(content.get("chains", ()))
    series, times = content["series"], content["times_s"]
    _require_names(models, "model")
    _require_names(series, "model")
    slos = {model["model"]: float(model["slo_ms"]) for model in models}
    charts: list[Chart | None] = [
        goodput_figure(models),
        cdf_figure(series, slos),
        stage_figure(models),
        misses_figure(models),
    ]
    charts.append(devices_over_time_figure({"devices": content.get("epochs", ())}))
    charts.append(utilization_figure(content["replicas"]))
    text = f"{where}: {content['requests']:,} requests in {content['duration_s']:g} s, seed {content['seed']}."
    if basis := (content.get("basis") or {}).get("text"):
        text += f" Batch times: {basis}."
    table = _make_table(
        models, ("model", "rate_rps", "goodput_rps", "in_time_pct", "slo_ms", "p50_ms", "p95_ms", "p99_ms")
    )
    return [
        Section("Simulation", text, tuple(chart for chart in charts if chart is not None), table, "simulated"),
        *(
            Section(
                f"{model_series['model']} over time",
                f"{where}: the simulation, by the time of arrival.",
                (goodput_over_time_figure(model_series, times), stages_over_time_figure(model_series, times)),
                source="simulated",
                is_folded=len(series) > _UNFOLDED,
            )
            for model_series in series
        ),
    ]


def _make_policy_sections(runs: Mapping[str, Mapping[str, Any]], where: str) -> list[Section]:
    """Return a section that compares how policies followed the same load, and the folded sections of each."""
    rows = [run["rescheduling"] for run in runs.values()]
    keys = ("policy", "mean_gpus", "most_gpus", "cost", "maps", "started", "goodput_rps", "in_time_pct", "worst_p99_ms")
    devices = devices_over_time_figure({policy: run["epochs"] for policy, run in runs.items()})
    charts = (*([] if devices is None else [devices]), in_time_over_time_figure(runs))
    sections = [
        Section("Policies over time", f"{where}: the same requests.", charts, _make_table(rows, keys), "simulated")
    ]
    for policy, run in runs.items():
        sections += [
            replace(section, title=f"{section.title}: {policy}", is_folded=True)
            for section in _make_simulation_sections(run, where)
        ]
    return sections


def _make_load_section(rows: Sequence[Mapping[str, Any]], where: str) -> Section:
    _require_names(rows, "model")
    table = _make_table(rows, ("model", "rate_rps", "goodput_rps", "slo_ms", "p50_ms", "p95_ms", "p99_ms"))
    text = f"{where}: what clients measured."
    is_predicted = any(row.get("predicted_goodput_rps") is not None for row in rows)
    if is_predicted:
        text += " Predictions come from the same requests, replayed through the simulator on the map."
    source = "measured, and predicted" if is_predicted else "measured"
    return Section("Load test", text, tuple(load_figures(rows)), table, source)


def _make_evaluation_section(rows: Sequence[Mapping[str, Any]], where: str) -> Section:
    _require_names(rows, "setting", "quantity", "predictor")
    keys = ("setting", "quantity", "predictor", "count", "mean_pct", "median_pct", "p95_pct", "coverage_pct")
    text = f"{where}: how far off estimates are on what was measured and left out."
    table = _make_table(rows, keys)
    return Section("Evaluation of the estimators", text, (evaluation_figure(rows),), table, "predicted and measured")


def _make_comparison_section(rows: Sequence[Mapping[str, Any]], where: str, subject: str) -> Section:
    """Return the section of a comparison: policies on one fleet, or kinds of GPUs under one policy."""
    _require_names(rows, subject)
    keys = [subject, "gpus", "cost_per_hour", "goodput_rps", "missing_rps", "lower_bound_gpus", "seconds", "sources"]
    columns = [key for key in keys if any(row.get(key) is not None for row in rows)]
    noun = "policy" if subject == "policy" else "kind of GPU"
    text = f"{where}: what the same demands take by {noun}."
    remarks = [f"{row[subject]}: {row['remark']}" for row in rows if row.get("remark")]
    text += "".join(f" {remark.rstrip('.')}." for remark in remarks)
    title = f"Comparison of {'policies' if subject == 'policy' else 'kinds of GPUs'}"
    return Section(title, text, comparison_figures(rows, subject, noun), _make_table(rows, columns), "predicted")


_HEADINGS = {
    "gpus": "devices",
    "cost_per_hour": "dollars an hour",
    "missing_rps": "missing/s",
    "lower_bound_gpus": "devices at least",
    "sources": "batch times from",
    "rate_rps": "requests/s",
    "goodput_rps": "goodput/s",
    "in_time_pct": "in time %",
    "slo_ms": "SLO ms",
    "setting": "left out",
    "mean_pct": "mean error %",
    "median_pct": "median error %",
    "p95_pct": "p95 error %",
    "coverage_pct": "inside 90% interval, %",
    "count": "figures",
    "mean_gpus": "devices in the mean",
    "most_gpus": "devices at most",
    "cost": "dollars",
    "started": "replicas started",
    "worst_p99_ms": "worst p99 ms",
}


def _make_table(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Table:
    headings = tuple(_HEADINGS.get(key, key.replace("_", " ")) for key in keys)
    columns = [_format_column(key, [row.get(key) for row in rows]) for key in keys]
    return Table(headings, tuple(zip(*columns, strict=True)))


def _format_column(key: str, values: Sequence[object]) -> list[str]:
    """Return numbers with equal decimals in all rows, percentages with one decimal, and other values unchanged."""
    if key.endswith("_pct"):
        return [f"{value:,.1f}" if isinstance(value, int | float) else "–" for value in values]
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        return number_formatter(4).show_column(values)
    return [_format_number(value) for value in values]


def _format_number(value: object) -> str:
    if value is None:
        return "–"
    return show_number(value) if isinstance(value, float) else str(value)
