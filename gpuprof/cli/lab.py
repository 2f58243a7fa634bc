"""``gpuprof lab``: scheduling experiments and the papers' figures, by any policy and estimator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.options import Verbs, duration_option, output_option
from gpuprof.cli.output import Column, Format, make_columns, print_rows, print_text, say_note, show_progress
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.plural import count_of
from gpuprof.errors import PluginError

if TYPE_CHECKING:
    from gpuprof.lab.laboratory import DrawnFigure

app = Verbs(help="Run scheduling experiments: papers' scenarios and figures, any policy.")

_COLUMNS = make_columns(
    "suite scenario rate:rate_× slo:SLO_× gpus_varied:devices policy estimator seed gpus cost_per_hour "
    "planned_rps goodput_rps:simulated/s in_time_pct late_count:late broken_rules milliseconds:ms"
)
_NUMBERS = make_columns("number where printed here verdict")

PoliciesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Policies separated by commas: names, name+option=value, or module:Class. May be repeated.",
        show_default=False,
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        envvar="GPUPROF_LAB_DATA",
        help="Folder of the papers' measurements, fetched unless they are there; default: lab/published.",
    ),
]
JobsOption = Annotated[int, typer.Option(min=1, help="Processes that run at once.")]
LimitOption = Annotated[
    float | None, duration_option("--time-limit", "Longest search of a policy; default: the scenario's, mostly 5s.")
]
PageOption = Annotated[Path | None, output_option("HTML page to write, with tables and charts.", show_default=False)]


def _split(texts: Sequence[str] | None) -> list[str]:
    return [name.strip() for text in texts or () for name in text.split(",") if name.strip()]


@app.command("run")
def run_suites(
    suites: Annotated[
        list[str],
        typer.Argument(
            metavar="SUITE...",
            help="Suites parvagpu, parvagpux10, igniter, thesis, usher; a scenario as thesis/vision; or a folder.",
        ),
    ],
    policy: PoliciesOption = None,
    estimator: Annotated[
        list[str] | None,
        typer.Option("--estimator", help="Estimators to plan with, by name or module:Class; default: the scenario's."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", help="Sweep rate, slo or gpus: rate=0.5..2, slo=0.8,1,1.2, gpus=1..6. May be repeated."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of policies and simulated requests.")] = 1,
    output: PageOption = None,
    data: DataOption = None,
    jobs: JobsOption = 2,
    time_limit: LimitOption = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Place each scenario of SUITEs by each policy, simulate the maps, and compare."""
    from gpuprof.lab.laboratory import LabSettings, run, write_page
    from gpuprof.placement.policies import DEFAULT

    with show_progress() as show:
        result = run(
            suites,
            _split(policy) or [DEFAULT],
            estimators=_split(estimator),
            vary=vary or (),
            seeds=seeds,
            settings=LabSettings(data=data, jobs=jobs, time_limit_s=time_limit),
            progress=show,
        )
    rows = result.rows()
    print_rows(rows, _COLUMNS, chosen)
    if chosen is Format.TABLE:
        reasons = (
            f"{row['policy']}, {row['suite']}/{row['scenario']}: {row['reason']}" for row in rows if row["reason"]
        )
        say_note(*dict.fromkeys(reasons))
    if output is not None:
        say_note(f"wrote {write_page(output, result)}")
    if failed := sum(bool(record.get("has_failed")) for record in result.records):
        raise PluginError(f"a policy or estimator failed in {failed} of {count_of(len(rows), 'cell')}")


@app.command("figure")
def draw_figures(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Figures from gpuprof lab list, or a paper for all its own.")
    ],
    policy: PoliciesOption = None,
    output: PageOption = None,
    data: DataOption = None,
    jobs: JobsOption = 2,
    time_limit: LimitOption = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Reproduce the papers' figures, also with further policies; compare each published number with ours."""
    from gpuprof.lab.laboratory import LabSettings, draw, write_page

    settings = LabSettings(data=data, jobs=jobs, time_limit_s=time_limit)
    with show_progress() as show:
        result = draw(names, _split(policy), settings=settings, progress=show)
    if chosen is Format.TABLE:
        for figure in result.figures:
            _print_figure(figure)
    else:
        print_rows(result.rows(), _NUMBERS, chosen)
    if output is not None:
        say_note(f"wrote {write_page(output, result)}")


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
    from gpuprof.lab.laboratory import figure_titles
    from gpuprof.lab.scenarios import suite_names

    rows = [{"name": name, "kind": "suite", "title": ", ".join(names)} for name, names in suite_names().items()]
    rows += [{"name": name, "kind": "figure", "title": title} for name, title in figure_titles().items()]
    print_rows(rows, make_columns("name kind title"), chosen)
