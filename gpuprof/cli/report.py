"""``gpuprof report``: one HTML page, or pictures, of what was measured, predicted, placed, simulated and served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuprof.cli.output import say
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuprof.report.document import Section

_MOST_WORKLOADS = 8


def report(
    sources: Annotated[
        list[Path], typer.Argument(help="A database, maps, and the --json output of simulate, load and evaluate.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Of the page.")] = "gpuprof report",
    figures: Annotated[Path | None, typer.Option(help="Also write each figure into this directory.")] = None,
    picture_format: Annotated[str, typer.Option("--format", help="Of these figures: svg or png.")] = "svg",
) -> None:
    """Write one self-contained HTML page that opens from disk: plots to point at, in light and dark."""
    from gpuprof.report.page import page

    if picture_format not in ("svg", "png"):
        raise InputError(f"--format must be svg or png but got {picture_format}")
    sections = _sections(sources)
    try:
        output.write_text(page(title, sections), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}") from None
    charts = sum(len(section.charts) for section in sections)
    say(f"wrote {output}: {charts} figure(s) from {len(sources)} source(s)")
    if figures is not None:
        _write_figures(sections, figures, picture_format)


def _sections(sources: Sequence[Path]) -> list[Section]:
    from gpuprof.report.document import Section, read_result, sections_of
    from gpuprof.report.map_figures import cost_figure

    found, maps = [], {}
    for source in sources:
        if source.is_dir():
            found += _database(source)
            continue
        sections, deployment = sections_of(read_result(source), source.name)
        found += sections
        if deployment is not None:
            maps[source.stem if deployment.policy in maps else deployment.policy] = deployment
    if len(maps) > 1:
        found.append(Section("Cost", "What each map costs.", (cost_figure(maps),)))
    return found


def _database(path: Path) -> list[Section]:
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.report.document import Section
    from gpuprof.report.profile_figures import over_figures, roofline_figure, timeline_figure

    database = KernelDb(path)
    models = [row for row in database.read("models").to_pylist() if not row["error"]]
    devices: dict[str, dict[str, Any]] = {}
    for row in database.read("devices").to_pylist():  # a later run may know less of the device
        known = {name: value for name, value in row.items() if value is not None}
        devices[row["device"]] = devices.get(row["device"], {}) | known
    sections = [Section("Profiles", f"{path.name}: {len(models)} measured workloads.", tuple(over_figures(models)))]
    for model in list(dict.fromkeys(row["model"] for row in models))[:_MOST_WORKLOADS]:
        last = max((row for row in models if row["model"] == model), key=lambda row: (row["batch"], row["run_id"]))
        ops = database.read("ops", where={"run_id": last["run_id"], "model": model}).to_pylist()
        ops.sort(key=lambda op: op["position"])
        kernels = database.read("kernels", where={"run_id": last["run_id"], "model": model}).to_pylist()
        name = f"{model}, batch {last['batch']}"
        charts = (
            roofline_figure(f"{name}: roofline", ops, devices.get(last["device"])),
            timeline_figure(f"{name}: timeline", ops, kernels),
        )
        if shown := tuple(chart for chart in charts if chart is not None):
            sections.append(Section(model, f"{len(ops)} ops on {last['device']}, batch {last['batch']}.", shown))
    return sections


def _write_figures(sections: Sequence[Section], directory: Path, picture_format: str) -> None:
    from gpuprof.report.picture import write_picture

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {directory}: {error.strerror or error}") from None
    charts = [chart for section in sections for chart in section.charts]
    for number, chart in enumerate(charts, start=1):
        name = re.sub(r"[^a-z0-9]+", "-", chart.title.lower()).strip("-")[:60]
        write_picture(chart, directory / f"{number:02d}-{name}.{picture_format}")
    say(f"wrote {len(charts)} {picture_format} figure(s) into {directory}")
