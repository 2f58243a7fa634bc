"""Examination of this machine: its capabilities, and a remedy for each missing part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from gpuprof.domain.plural import count_of
from gpuprof.machine.doctor import Finding, MachineView, Status, examine_machine
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.devices import database_path
from gpuprof.pipeline.result import Result


@dataclass(frozen=True, kw_only=True)
class DoctorResult(Result):
    """The findings on this machine."""

    findings: tuple[Finding, ...]

    def verdict(self) -> str:
        """Return a sentence on the verbs that work on this machine, and their devices."""
        works = {finding.name for finding in self.findings if finding.status is Status.OK}
        gpus = sum(finding.name.startswith("GPU ") for finding in self.findings if finding.status is Status.OK)
        runs_gpu, runs_cpu = gpus > 0 and "extra gpu" in works, "ONNX Runtime" in works
        serves = "extra serve" in works
        verbs = [*(["profile"] if runs_gpu or runs_cpu else []), "estimate", "place", *(["serve"] if serves else [])]
        devices = [count_of(gpus, "GPU")] if runs_gpu else []
        devices += ["the CPU"] if runs_cpu else []
        where = f" on {' and '.join(devices)}" if devices else ""
        missing = [
            text
            for text, is_missing in (
                ("no ONNX Runtime, which profile and estimates of GPUs need", not (runs_cpu or runs_gpu)),
                ("no server: the extra serve is missing", not serves),
                ("no NVIDIA driver", not gpus),
                ("GPUs need the extra gpu", gpus > 0 and not runs_gpu),
            )
            if is_missing
        ]
        return f"{', '.join(verbs[:-1])} and {verbs[-1]}{where}{''.join(f'; {text}' for text in missing)}."

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each finding."""
        return [asdict(finding) for finding in self.findings]


def doctor(db: PathArgument | None = None) -> DoctorResult:
    """Examine this machine without changing it: GPUs, profilers, runtime, cores, disk.

    Parameters
    ----------
    db : path, optional
        Kernel database, whose disk is examined; by default ``GPUPROF_DB``, else ``./gpuprof-db``.

    Examples
    --------
    >>> import gpuprof
    >>> {"name", "status", "detail", "fix"} <= set(gpuprof.doctor().to_frame().columns)
    True
    """
    return DoctorResult(findings=examine_machine(MachineView(), database_path(db)))
