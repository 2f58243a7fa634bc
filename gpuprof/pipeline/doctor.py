"""Looks at what this machine can do, and for each thing missing what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from gpuprof.machine.doctor import examine_machine
from gpuprof.machine.finding import Finding, MachineView
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.devices import database_path
from gpuprof.pipeline.result import Result


@dataclass(frozen=True, kw_only=True)
class DoctorResult(Result):
    """What was found on this machine."""

    findings: tuple[Finding, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each finding."""
        return [asdict(finding) for finding in self.findings]


def doctor(db: PathArgument | None = None) -> DoctorResult:
    """Find out what this machine can do: GPUs, profilers, runtime, cores, disk; nothing is changed.

    Parameters
    ----------
    db : path, optional
        Kernel database, whose disk is looked at; by default ``GPUPROF_DB``, else ``./gpuprof-db``.

    Examples
    --------
    >>> import gpuprof
    >>> {"name", "status", "detail", "fix"} <= set(gpuprof.doctor().to_frame().columns)
    True
    """
    return DoctorResult(findings=examine_machine(MachineView(), database_path(db)))
