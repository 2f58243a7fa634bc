"""Options of ``gpuprof calibrate``, in groups: what is fitted, and how what it lacks is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class FitOptions:
    """What is fitted, and where it is kept."""

    profile: Annotated[
        Path | None, typer.Option(help="Profile by iGniter's own tools (config.jsonl), instead of the database.")
    ] = None
    device: Annotated[str | None, typer.Option(help="Device of the catalogue or the database.")] = None
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write iGniter's coefficients here, too.")] = (
        None
    )
    db: Annotated[Path | None, typer.Option(help="Kernel database.")] = None


@dataclass(frozen=True)
class MeasuringOptions:
    """How MODELs are measured."""

    collector: Annotated[str, typer.Option(help="What measures; auto takes the first that works here.")] = "auto"
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for the timing of one row at most.")] = 5.0
    keep_unstable: Annotated[
        bool, typer.Option("--keep-unstable", help="Leave rows that are there and unstable as they are.")
    ] = False
