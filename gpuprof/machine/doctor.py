"""Everything that gpuprof wants to know of a machine before it works there."""

from __future__ import annotations

from pathlib import Path

from gpuprof.machine.finding import Finding, MachineView
from gpuprof.machine.gpu_findings import gpu_findings, profiler_findings
from gpuprof.machine.host_findings import host_findings, runtime_findings, storage_findings


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
