"""Options of ``gpuprof estimate``, in groups: what runs, and where its figures come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import say_note
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.domain.device import Device
    from gpuprof.domain.estimate import Estimator, Workload
    from gpuprof.domain.share import Share
    from gpuprof.kernel_db.store import KernelDb

_LARGEST_BATCH = 1_000_000
_NEIGHBOUR = re.compile(r"(?P<model>.+?)(?:[@:](?P<batch>\d+)(?::(?P<share>.+))?)?")


@dataclass(frozen=True)
class ScenarioOptions:
    """What runs, on which part of which device."""

    batch: Annotated[str, typer.Option(help="Batch sizes, 1,8,32.")] = "1"
    device: Annotated[str | None, typer.Option(help="Device of the catalogue or the database, or cpu.")] = None
    share: Annotated[str, typer.Option(help="Part of the device: 50, 50%, 1core, 3g.40gb or 3g.40gb:50.")] = "100"
    processes: Annotated[int, typer.Option(help="Copies in the share.")] = 1
    beside: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL[@BATCH[:SHARE]]", help="With this running on the device, too; repeatable."),
    ] = None

    def sizes(self) -> list[int]:
        """Return the batch sizes.

        Raises
        ------
        InputError
            When one is none.
        """
        sizes = []
        for word in self.batch.split(","):
            if not word.strip().isdigit() or not 1 <= int(word) <= _LARGEST_BATCH:
                raise InputError(
                    f"--batch must be whole numbers from 1 to {_LARGEST_BATCH:,} but got {self.batch!r}",
                    "write it as 1,8,32",
                )
            sizes.append(int(word))
        return sizes

    def part(self, device: Device) -> Share:
        """Return the part of ``device`` that each model has.

        Raises
        ------
        InputError
            When it cannot be read, or the device has no such part.
        """
        from gpuprof.domain.share import parse_share

        part = parse_share(self.share, device.compute_units)
        device.fraction(part)
        return part

    def neighbours(self, device: Device, share: Share) -> tuple[Workload, ...]:
        """Return what runs beside ``share``: batch 1 where none is said, and an equal part of what is left over.

        Raises
        ------
        InputError
            When one cannot be read, or there is no room for it.
        """
        from gpuprof.domain.estimate import Workload
        from gpuprof.domain.share import Share, parse_share

        read = []
        for text in self.beside or ():
            match = _NEIGHBOUR.fullmatch(text)
            if match is None:
                raise InputError(f"cannot read the neighbour {text!r}", "write MODEL, MODEL@batch or MODEL@batch:share")
            given = parse_share(match["share"], device.compute_units) if match["share"] else None
            read.append((match["model"], int(match["batch"] or 1), given))
        taken = share.sm_pct + sum(given.sm_pct for _, _, given in read if given)
        open_parts = sum(given is None for _, _, given in read)
        if share.mig is None and (taken > 100.0 + 1e-6 or (open_parts and taken >= 100.0)):
            raise InputError(
                f"shares of {taken:g}% leave no room beside them", "give smaller shares, --share and @batch:share"
            )
        left = (100.0 - taken) / max(open_parts, 1)
        return tuple(Workload(model, batch, given or Share(left)) for model, batch, given in read)


@dataclass(frozen=True)
class SourceOptions:
    """Where the figures come from."""

    estimator: Annotated[str, typer.Option(help="database, gk, one that was installed, or package.module:Class.")] = (
        "database"
    )
    strict: Annotated[bool, typer.Option(help="Refuse models with ops that nothing is known of.")] = False
    db: Annotated[Path | None, typer.Option(help="Kernel database.")] = None

    def made(self, database: KernelDb | None) -> Estimator:
        """Return the estimator.

        Raises
        ------
        InputError
            When there is none of this name.
        """
        from gpuprof.estimators.builtin import make_estimator
        from gpuprof.pipeline.devices import make_database_estimator

        if self.estimator == "database":
            return make_database_estimator(database, note=say_note)
        return make_estimator(self.estimator, database)
