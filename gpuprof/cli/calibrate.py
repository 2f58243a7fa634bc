"""``gpuprof calibrate``: fit the interference on a device, including iGniter's coefficients of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import typer

from gpuprof.cli.completion import complete_models
from gpuprof.cli.options import with_groups
from gpuprof.cli.output import Column, CsvOption, Format, JsonOption, chosen_format, print_rows, say_note, show_progress
from gpuprof.domain.number_format import number_formatter
from gpuprof.domain.validation import Positive
from gpuprof.pipeline.profile_settings import ProfileSettings
from gpuprof.pipeline.settings import Settings, option


class FitOptions(Settings):
    """Device, and where coefficients are read and written."""

    title: ClassVar[str] = "Fit and files"

    profile: Path | None = option(None, "Profile by iGniter's own tools (config.jsonl), in place of the database.")
    device: str | None = option(None, "Device of the catalogue or the database.", values="devices")
    output: Path | None = option(None, "File to write iGniter's coefficients to, too.", "-o", "--output", output=True)
    db: Path | None = option(None, "Kernel database.")


class MeasuringOptions(Settings):
    """Measurement of MODELs."""

    title: ClassVar[str] = "Measurement"

    collector: str = option("auto", "Collector that measures; auto takes the first that works here.")
    time_limit_s: Positive = option(5.0, "Longest time to measure one row.", "--time-limit", unit="s")
    keep_unstable: bool = option(False, "Keep unstable rows as they are instead of measuring them again.")


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

    chosen = chosen_format(as_json, as_csv)
    with show_progress() as show:
        result = fit(
            models or (),
            device=fitting.device,
            igniter_profile=fitting.profile,
            output=fitting.output,
            db=fitting.db,
            settings=ProfileSettings(**measuring.model_dump()),
            progress=show,
        )
    say_note(*result.notes)
    if result.igniter:
        print_rows(result.rows(), _COLUMNS, chosen)
    if result.igniter is None or (result.ranking and chosen is Format.TABLE):
        print_rows(result.ranking_rows(), _RANKED, chosen)
