"""Looks at what this machine can do, and for each thing missing what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpuprof.machine.finding import Finding, MachineView
from gpuprof.machine.gpu_findings import gpu_findings, profiler_findings
from gpuprof.machine.host_findings import host_findings, runtime_findings, storage_findings
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.devices import database_path
from gpuprof.pipeline.result import Result


def examine_machine(machine: MachineView, database: Path) -> tuple[Finding, ...]:
    """Return what this machine can do, and what it lacks with what to do about it.

    ``database``: directory of the kernel database, which need not exist.
    """
    return (
        *gpu_findings(machine),
        *profiler_findings(machine),
        *runtime_findings(machine),
        *host_findings(machine),
        *storage_findings(database),
    )


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
