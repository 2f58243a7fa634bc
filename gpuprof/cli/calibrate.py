"""``gpuprof calibrate``: fit how workloads slow each other down, iGniter's coefficients of a GPU among it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.completion import complete_devices, complete_models
from gpuprof.cli.duration_option import duration_option
from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import Column, CsvOption, Format, JsonOption, chosen_format, print_rows, say_note, show_progress
from gpuprof.cli.output_path import output_option
from gpuprof.cli.shared_options import CollectorOption, KeepUnstableOption, OptionalDbOption
from gpuprof.domain.number_format import number_formatter


@dataclass(frozen=True)
class FitOptions:
    """What is fitted, and where it is kept."""

    profile: Annotated[
        Path | None, typer.Option(help="Profile by iGniter's own tools (config.jsonl), in place of the database.")
    ] = None
    device: Annotated[
        str | None, typer.Option(autocompletion=complete_devices, help="Device of the catalogue or the database.")
    ] = None
    output: Annotated[Path | None, output_option("File to write iGniter's coefficients to, too.")] = None
    db: OptionalDbOption = None


@dataclass(frozen=True)
class MeasuringOptions:
    """How MODELs are measured."""

    collector: CollectorOption = "auto"
    time_limit: Annotated[float, duration_option("--time-limit", "Longest time to measure one row.", least_s=0.1)] = 5.0
    keep_unstable: KeepUnstableOption = False


_COLUMNS = (
    Column("of", "of", right=False),
    Column("coefficient", "coefficient", right=False),
    Column("value", "value", number_formatter(4)),
    Column("unit", "unit", right=False),
)
_RANKED = (
    Column("interference", "interference", right=False),
    Column("left_out", "left out", lambda value: f"each {value}", right=False),
    Column("rows", "latencies"),
    Column("mean_pct", "mean error %", number_formatter(3)),
    Column("p95_pct", "95th percentile %", number_formatter(3)),
    Column("interval", "measured / predicted, 90%"),
    Column("coefficients", "coefficients", right=False),
)


@with_groups
def calibrate(
    fitting: FitOptions,
    measuring: MeasuringOptions,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            autocompletion=complete_models,
            metavar="MODEL...",
            help="ONNX files, or NAME=FILE, to measure here first.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Fit how workloads slow each other down on a device, for estimates beside others.

    Of MODELs it first measures what is missing: on a GPU iGniter's eleven configurations and copies at once, on a
    CPU two to four models beside one another. On a GPU iGniter's coefficients are fitted and kept in the database; on
    any device the interference models are fitted to what was co-located, and judged by leaving out each victim.
    """
    from gpuprof.pipeline.calibrate import calibrate as fit
    from gpuprof.pipeline.profile_result import ProfileSettings

    chosen = chosen_format(as_json, as_csv)
    with show_progress() as show:
        result = fit(
            models or (),
            device=fitting.device,
            igniter_profile=fitting.profile,
            output=fitting.output,
            db=fitting.db,
            settings=ProfileSettings(
                collector=measuring.collector, time_limit_s=measuring.time_limit, keep_unstable=measuring.keep_unstable
            ),
            progress=show,
        )
    say_note(*result.notes)
    if result.igniter:
        print_rows(result.rows(), _COLUMNS, chosen)
    if result.igniter is None or (result.ranking and chosen is Format.TABLE):
        print_rows(result.ranking_rows(), _RANKED, chosen)
