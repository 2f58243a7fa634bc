"""Options of ``gpuprof estimate``, in groups: what runs, and where its figures come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from gpuprof.cli.completion import complete_devices
from gpuprof.cli.shared_options import DeviceFileOption, OptionalDbOption, PrecisionOption, RuntimeOption, StrictOption
from gpuprof.domain.sizes import parse_dims
from gpuprof.errors import InputError

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
