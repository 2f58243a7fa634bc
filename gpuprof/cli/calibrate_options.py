"""Options of ``gpuprof calibrate``, in groups: what is fitted, and how what it lacks is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import say

if TYPE_CHECKING:
    from gpuprof.estimators.igniter.fit import HardwareProfile, WorkloadProfile
    from gpuprof.estimators.igniter.igniter import HardwareCoefficients, WorkloadCoefficients
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.profiling.child.job import TimingLimits

    Profile = tuple[HardwareProfile, dict[str, WorkloadProfile]]


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

    def igniter(
        self, database: KernelDb, name: str, profile: Profile
    ) -> tuple[HardwareCoefficients, dict[str, WorkloadCoefficients]]:
        """Fit iGniter's coefficients to what was measured on the device ``name``, and keep them.

        Raises
        ------
        InputError
            When too little was measured, or a file cannot be written.
        """
        from gpuprof.estimators.igniter.fit import fit_all
        from gpuprof.estimators.igniter.profile import coefficients_path, write_coefficients

        hardware, workloads = fit_all(*profile)
        kept = coefficients_path(database.path, name)
        for path in (kept, *([self.output] if self.output else [])):
            write_coefficients(path, name, hardware, workloads)
            say(f"gpuprof: wrote {path}")
        return hardware, workloads


@dataclass(frozen=True)
class MeasuringOptions:
    """How MODELs are measured."""

    collector: Annotated[str, typer.Option(help="What measures; auto takes the first that works here.")] = "auto"
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for the timing of one row at most.")] = 5.0

    def limits(self) -> TimingLimits:
        """Return when a measurement ends."""
        from gpuprof.profiling.child.job import limits_within

        return limits_within(self.time_limit)
