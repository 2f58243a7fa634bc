"""What was tried on a device and failed: as much knowledge as what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprof.domain.estimate import Workload


@dataclass(frozen=True, slots=True, order=True)
class FailedRun:
    """A workload that was run and gave no measurement: out of memory, wrong outputs, or the runtime refused it."""

    device: str
    workload: Workload
    reason: str  #: As the database has it.

    @property
    def is_memory(self) -> bool:
        """Whether memory was short: then no other part of the compute units would have helped."""
        return "memory" in self.reason.lower()

    def __str__(self) -> str:
        one = self.workload
        processes = "" if one.processes == 1 else f" with {one.processes} processes"
        return f"{one.model} at batch {one.batch}{processes} under {one.share} failed on {self.device}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TriedRuns:
    """What a database says of what can run at all."""

    failed: tuple[FailedRun, ...] = ()
    #: Device and workload of what ran: a failure elsewhere does not refute it.
    measured: frozenset[tuple[str, Workload]] = frozenset()


#: Nothing is known to have failed.
NOTHING_TRIED = TriedRuns()
