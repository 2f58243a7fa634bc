"""A report: one self-contained HTML page, made from output files of the commands, whose kind is detected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from gpuprof.domain.deployment import DeploymentMap, parse_map
from gpuprof.domain.file_access import read_input
from gpuprof.domain.map_sources import describe_basis, describe_sources, is_observed
from gpuprof.domain.plural import count_of
from gpuprof.domain.table import make_columns, show_column
from gpuprof.errors import InputError
from gpuprof.reporting.chart import Chart, inline
from gpuprof.reporting.figures import (
    cdf_figure,
    comparison_figures,
    devices_over_time_figure,
    goodput_figure,
    goodput_over_time_figure,
    in_time_over_time_figure,
    load_figures,
    map_figure,
    misses_figure,
    stage_figure,
    stages_over_time_figure,
    utilization_figure,
)

_TAKEN = "give a database, a map, or the --json output of compare, simulate or load; for lab: lab run -o PAGE.html"
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


def sections_of(content: Any, where: str) -> list[Section]:
    """Return the sections for the output of a command.

    Raises `InputError` for other files, or a missing part.
    """
    try:
        if isinstance(content, dict) and str(content.get("schema", "")).startswith("gpuprof.deployment/"):
            return [_make_map_section(parse_map(content, where), where)]
        if isinstance(content, dict) and str(content.get("schema", "")).startswith("gpuprof.simulation/"):
            return _make_simulation_sections(content, where)
        if _is_policies(content):
            return _make_policy_sections(content, where)
        if _is_rows(content, ("goodput_rps", "lag_p99_ms")) or _is_rows(content, ("goodput_rps", "p99_ms")):
            return [_make_load_section(content, where)]
        if _is_rows(content, ("policy", "gpus", "goodput_rps", "seconds")):
            return [_make_comparison_section(content, where, "policy")]
        if _is_rows(content, ("device", "gpus", "utilization_pct", "seconds")):
            return [_make_comparison_section(content, where, "device")]
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
            "goodput_rps": None if model.predicted is None else model.predicted.goodput_rps,
            "p99_ms": None if model.predicted is None else model.predicted.p99_ms,
            "sources": "; ".join(sorted(sources_by_model.get(name, ()))) or None,
        }
        for name, model in deployment.models.items()
    ]
    source = "predicted from measurements" if is_observed(deployment) else "predicted"
    return Section(
        f"Map of {deployment.policy}",
        text,
        (map_figure(deployment),),
        make_table(
            rows,
            "model rate_rps slo_ms goodput_rps:predicted_goodput/s p99_ms:predicted_p99_ms sources:batch_times_from",
        ),
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
    table = make_table(models, "model rate_rps goodput_rps in_time_pct slo_ms p50_ms p95_ms p99_ms")
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
    keys = (
        "policy mean_gpus:devices_in_the_mean most_gpus:devices_at_most cost:$ maps started:replicas_started "
        "goodput_rps in_time_pct worst_p99_ms"
    )
    devices = devices_over_time_figure({policy: run["epochs"] for policy, run in runs.items()})
    charts = (*([] if devices is None else [devices]), in_time_over_time_figure(runs))
    sections = [
        Section("Policies over time", f"{where}: the same requests.", charts, make_table(rows, keys), "simulated")
    ]
    for policy, run in runs.items():
        sections += [
            replace(section, title=f"{section.title}: {policy}", is_folded=True)
            for section in _make_simulation_sections(run, where)
        ]
    return sections


def _make_load_section(rows: Sequence[Mapping[str, Any]], where: str) -> Section:
    _require_names(rows, "model")
    table = make_table(rows, "model rate_rps goodput_rps slo_ms p50_ms p95_ms p99_ms")
    text = f"{where}: what clients measured."
    is_predicted = any(row.get("predicted_goodput_rps") is not None for row in rows)
    if is_predicted:
        text += " Predictions come from the same requests, replayed through the simulator on the map."
    source = "measured, and predicted" if is_predicted else "measured"
    return Section("Load test", text, tuple(load_figures(rows)), table, source)


def _make_comparison_section(rows: Sequence[Mapping[str, Any]], where: str, subject: str) -> Section:
    """Return the section of a comparison: policies on one fleet, or kinds of GPUs under one policy."""
    _require_names(rows, subject)
    words = "gpus:devices cost_per_hour goodput_rps missing_rps lower_bound_gpus:devices_at_least seconds "
    words += "sources:batch_times_from"
    columns = [word for word in words.split() if any(row.get(word.partition(":")[0]) is not None for row in rows)]
    noun = "policy" if subject == "policy" else "kind of GPU"
    text = f"{where}: what the same demands take by {noun}."
    remarks = [f"{row[subject]}: {row['remark']}" for row in rows if row.get("remark")]
    text += "".join(f" {remark.rstrip('.')}." for remark in remarks)
    title = f"Comparison of {'policies' if subject == 'policy' else 'kinds of GPUs'}"
    return Section(
        title,
        text,
        comparison_figures(rows, subject, noun),
        make_table(rows, " ".join([subject, *columns])),
        "predicted",
    )


def make_table(rows: Sequence[Mapping[str, Any]], columns: str) -> Table:
    """Return a table; ``columns``: as `gpuprof.domain.table.make_columns` takes them."""
    shown = [show_column(rows, column) for column in make_columns(columns)]
    headings = tuple(cells.column.heading for cells in shown)
    return Table(headings, tuple(zip(*(cells.texts for cells in shown), strict=True)))


#: Reports are mailed and opened from a disk: no content, whatever a model's name, may send data.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_HINT = (
    "<p>Click a key of a legend to hide its series or show it again; with Shift, to show it alone. "
    "Point at a mark for its figures.</p>"
)


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page, light or dark by the reader's system until the button is used."""
    links = "".join(f'<a href="#s{i}">{escape(section.title)}</a>' for i, section in enumerate(sections))
    anchors = {section.title: f"s{i}" for i, section in enumerate(sections)}
    body = "".join(_render_section(i, section, anchors) for i, section in enumerate(sections))
    hint = _HINT if any(len(chart.legend()) > 1 for section in sections for chart in section.charts) else ""
    # The page is complete without its script. Tooltips are <title> elements; the script removes them, so that the
    # browser's own tooltips do not appear twice.
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<style>{_read_part('page.css')}</style></head><body><main>"
        f'<header><h1>{escape(title)}</h1><button id="theme" type="button">light / dark</button></header>'
        f"<nav>{links}</nav>{hint}"
        f'{body}</main><div id="tip" role="status"></div><script>\n{_read_part("page.js")}</script></body></html>\n'
    )


def _read_part(name: str) -> str:
    return (files("gpuprof") / "reporting" / name).read_text(encoding="utf-8")


def _render_section(number: int, section: Section, anchors: Mapping[str, str]) -> str:
    figures = "".join(map(_render_figure, section.charts))
    table = "" if section.table is None else _render_table(section.table, anchors)
    tag = f'<span class="tag">{escape(section.source)}</span>' if section.source else ""
    text = f'<p>{escape(section.text)}</p>{table}<div class="charts">{figures}</div>'
    if section.is_folded:
        return f'<details id="s{number}"><summary>{escape(section.title)}{tag}</summary>{text}</details>'
    return f'<section id="s{number}"><h2>{escape(section.title)}{tag}</h2>{text}</section>'


def _render_figure(chart: Chart) -> str:
    note = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
    return f'<figure><div class="drawing">{inline(chart)}</div>{note}</figure>'


def _render_table(table: Table, anchors: Mapping[str, str]) -> str:
    """Return a table whose first cells link to the sections of the same name.

    Each cell carries its heading: a narrow window shows each row as a block, with its cells below one another.
    """
    sides = ["" if _has_numbers(cells) else ' class="text"' for cells in zip(*table.rows, strict=True)]
    sides = sides or [""] * len(table.headings)
    head = "".join(f"<th{side}>{escape(heading)}</th>" for side, heading in zip(sides, table.headings, strict=True))
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td{side} data-heading="{escape(heading)}">{_render_cell(cell, {} if place else anchors)}</td>'
            for place, (side, heading, cell) in enumerate(zip(sides, table.headings, row, strict=True))
        )
        + "</tr>"
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _has_numbers(cells: Sequence[str]) -> bool:
    """Return whether a column holds numbers, which are aligned at their last digit."""
    return all(cell == "–" or (cell.lstrip("-–")[:1].isdigit() and " " not in cell) for cell in cells)


def _render_cell(text: str, anchors: Mapping[str, str]) -> str:
    return f'<a href="#{anchors[text]}">{escape(text)}</a>' if text in anchors else escape(text)
