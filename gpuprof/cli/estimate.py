"""``gpuprof estimate``: what a model needs at any batch, share and device, and how that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.completion import complete_devices, complete_models
from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import Column, CsvOption, JsonOption, chosen_format, mebibytes, print_rows, say_note
from gpuprof.cli.shared_options import DeviceFileOption, OptionalDbOption, PrecisionOption, RuntimeOption, StrictOption
from gpuprof.cli.table import ColumnRole
from gpuprof.domain.number_format import number_formatter
from gpuprof.domain.sizes import parse_dims
from gpuprof.errors import InputError


def _short(model: object) -> str:
    return Path(str(model)).stem if str(model).endswith(".onnx") else str(model)


_COLUMNS = (
    Column("model", "model", _short, right=False, role=ColumnRole.SUBJECT),
    Column("dims", "dims", right=False, role=ColumnRole.KEY),
    Column("device", "device", right=False, role=ColumnRole.KEY),
    Column("share", "share", right=False, role=ColumnRole.KEY),
    Column("batch", "batch", role=ColumnRole.SUBJECT),
    Column("beside", "beside", right=False, role=ColumnRole.KEY),
    Column("latency_ms", "latency ms", number_formatter(4)),
    Column("latency_interval", "90% interval", joined=True),
    Column("latency_source", "from", right=False, joined=True),
    Column("throughput_rps", "requests/s", number_formatter(4), role=ColumnRole.DERIVED),
    Column("memory_bytes", "memory MiB", mebibytes),
    Column("memory_source", "from", right=False, joined=True),
)


_LARGEST_BATCH = 1_000_000


@dataclass(frozen=True)
class ScenarioOptions:
    """What runs, on which part of which device."""

    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1"
    device: Annotated[
        str | None,
        typer.Option(autocompletion=complete_devices, help="Device of the catalogue or the database, or cpu."),
    ] = None
    device_file: DeviceFileOption = None
    share: Annotated[str, typer.Option(help="Part of the device: 50, 50%, 1core, 3g.40gb or 3g.40gb:50.")] = "100"
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE[,SIZE...]", help="Sizes of a free dimension; may be repeated."),
    ] = None
    processes: Annotated[int, typer.Option(help="Processes in the share.")] = 1
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL[@BATCH[:SHARE]]", help="Model that runs on the device at the same time; may be repeated."
        ),
    ] = None

    def dims(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of each free dimension that is named. Raises `InputError` when one cannot be read."""
        return parse_dims(self.dim or ())

    def batches(self) -> list[int]:
        """Return the batch sizes. Raises `InputError` when one is none."""
        sizes = []
        for word in self.batch.split(","):
            if not word.strip().isdigit() or not 1 <= int(word) <= _LARGEST_BATCH:
                raise InputError(
                    f"--batch must be whole numbers from 1 to {_LARGEST_BATCH:,} but got {self.batch!r}",
                    "write it as 1,8,32",
                )
            sizes.append(int(word))
        return sizes


@dataclass(frozen=True)
class SourceOptions:
    """Where the figures come from."""

    estimator: Annotated[
        str, typer.Option(help="Estimator: database, gk, an installed one, or package.module:Class.")
    ] = "database"
    precision: PrecisionOption = None
    runtime: RuntimeOption = None
    strict: StrictOption = False
    db: OptionalDbOption = None


@with_groups
def estimate(
    running: ScenarioOptions,
    knowledge: SourceOptions,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            autocompletion=complete_models,
            help="Models by name in the database, or ONNX files; default: all of the database.",
        ),
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Predict latency, throughput and memory: measured where measured, interpolated between, else predicted."""
    from gpuprof.pipeline.estimate import estimate as predict

    chosen = chosen_format(as_json, as_csv)
    result = predict(
        models or (),
        batches=running.batches(),
        device=running.device,
        device_file=running.device_file,
        share=running.share,
        processes=running.processes,
        beside=running.beside or (),
        estimator=knowledge.estimator,
        db=knowledge.db,
        precision=knowledge.precision,
        runtime=knowledge.runtime,
        dims=running.dims(),
    )
    if knowledge.strict:
        result.require_sure()
    say_note(*result.notes)
    rows = [{**row, "latency_interval": _interval(row)} for row in result.rows()]
    told = {"beside": bool(result.beside), "dims": any(row["dims"] for row in rows)}
    print_rows(rows, [column for column in _COLUMNS if told.get(column.key, True)], chosen)


def _interval(row: Mapping[str, object]) -> str | None:
    low, high = row["latency_low_ms"], row["latency_high_ms"]
    show = number_formatter(3)
    return None if low is None or high is None else f"{show(low)} … {show(high)}"
