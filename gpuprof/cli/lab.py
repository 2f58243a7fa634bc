"""``gpuprof lab``: scheduling experiments and the papers' figures, by any policy and estimator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.options import Verbs
from gpuprof.cli.output import Format, print_rows, print_text, say_note, show_progress
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.plural import count_of
from gpuprof.domain.table import Column, make_columns
from gpuprof.domain.validation import Count
from gpuprof.errors import PluginError
from gpuprof.lab.laboratory import DrawnFigure, LabSettings, draw, figure_titles, run, write_page
from gpuprof.lab.scenarios import suite_names
from gpuprof.pipeline.settings import Settings, option
from gpuprof.placement.policies import DEFAULT

app = Verbs(help="Run scheduling experiments: papers' scenarios and figures, any policy.")

_COLUMNS = make_columns(
    "suite scenario rate:rate_× slo:SLO_× gpus_varied:devices policy estimator seed gpus cost_per_hour "
    "planned_rps goodput_rps:simulated/s in_time_pct late_count:late broken_rules milliseconds:ms"
)
_NUMBERS = make_columns("number where printed here verdict")


class LabPolicyOptions(Settings):
    """Policies, and the page of results."""

    policies: tuple[str, ...] = option(
        (),
        "Policies separated by commas: names, name+option=value, or module:Class. May be repeated.",
        "--policy",
        repeated=True,
    )
    output: Path | None = option(None, "HTML page to write, with tables and charts.", "-o", "--output", output="file")


class SweepOptions(Settings):
    """Estimators, and variations of each scenario."""

    estimators: tuple[str, ...] = option(
        (), "Estimators to plan with, by name or module:Class; default: the scenario's.", "--estimator", repeated=True
    )
    vary: tuple[str, ...] = option(
        (), "Sweep rate, slo or gpus: rate=0.5..2, slo=0.8,1,1.2, gpus=1..6. May be repeated.", repeated=True
    )
    seeds: Count = option(1, "Seeds of policies and simulated requests.")


def _split(texts: Sequence[str]) -> list[str]:
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


@app.command("run")
def run_suites(
    policies: LabPolicyOptions,
    sweep: SweepOptions,
    settings: LabSettings,
    suites: Annotated[
        list[str],
        typer.Argument(
            metavar="SUITE...",
            help="Suites parvagpu, parvagpux10, igniter, thesis, usher; a scenario as thesis/vision; or a folder.",
        ),
    ],
    chosen: Format = Format.TABLE,
) -> None:
    """Place each scenario of SUITEs by each policy, simulate the maps, and compare."""
    with show_progress() as show:
        result = run(
            suites,
            _split(policies.policies) or [DEFAULT],
            estimators=_split(sweep.estimators),
            vary=sweep.vary,
            seeds=sweep.seeds,
            settings=settings,
            progress=show,
        )
    rows = result.rows()
    print_rows(rows, _COLUMNS, chosen)
    if chosen is Format.TABLE:
        reasons = (
            f"{row['policy']}, {row['suite']}/{row['scenario']}: {row['reason']}" for row in rows if row["reason"]
        )
        say_note(*dict.fromkeys(reasons))
    if policies.output is not None:
        say_note(f"wrote {write_page(policies.output, result)}")
    if failed := sum(bool(record.get("has_failed")) for record in result.records):
        raise PluginError(f"a policy or estimator failed in {failed} of {count_of(len(rows), 'cell')}")


@app.command("figure")
def draw_figures(
    policies: LabPolicyOptions,
    settings: LabSettings,
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Figures from gpuprof lab list, or a paper for all its figures."),
    ],
    chosen: Format = Format.TABLE,
) -> None:
    """Reproduce the papers' figures, also with further policies; compare each published number with ours."""
    with show_progress() as show:
        result = draw(names, _split(policies.policies), settings=settings, progress=show)
    if chosen is Format.TABLE:
        for figure in result.figures:
            _print_figure(figure)
    else:
        print_rows(result.rows(), _NUMBERS, chosen)
    if policies.output is not None:
        say_note(f"wrote {write_page(policies.output, result)}")


def _print_figure(figure: DrawnFigure) -> None:
    keys = [str(number) for number in range(len(figure.header))]
    columns = [Column(key, heading, NumberFormat(4)) for key, heading in zip(keys, figure.header, strict=True)]
    print_rows([dict(zip(keys, row, strict=True)) for row in figure.rows], columns, Format.TABLE, figure.title)
    if figure.numbers:
        print_rows([number.row() for number in figure.numbers], _NUMBERS, Format.TABLE)
    for reason in figure.reasons:
        print_text(f"* {reason}")
    say_note(*figure.remarks)


@app.command("list")
def list_all(chosen: Format = Format.TABLE) -> None:
    """List the papers' figures and the suites."""
    rows = [{"name": name, "kind": "suite", "title": ", ".join(names)} for name, names in suite_names().items()]
    rows += [{"name": name, "kind": "figure", "title": title} for name, title in figure_titles().items()]
    print_rows(rows, make_columns("name kind title"), chosen)
