"""Runs that failed on a device, which count as knowledge just as measurements do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from gpuprof.domain.estimate import Workload


@dataclass(frozen=True, slots=True, order=True)
class FailedRun:
    """A workload that was run and gave no measurement: out of memory, wrong outputs, or the runtime refused it."""

    device: str
    workload: Workload
    reason: str  #: As the database has it.
    beside: tuple[Workload, ...] = ()  #: What ran on the device at the same time: it failed together with these.

    def rename(self, names_of: Callable[[str], Sequence[str]]) -> Iterator[FailedRun]:
        """Yield the run for each choice among the names of every model; none where a model has no name."""
        for own, *beside in rename_workloads((self.workload, *self.beside), names_of):
            yield replace(self, workload=own, beside=tuple(beside))

    @property
    def is_memory(self) -> bool:
        """Whether it ran out of memory, so that no other share of the compute units would have helped."""
        return "memory" in self.reason.lower()

    def __str__(self) -> str:
        one = self.workload
        processes = "" if one.processes == 1 else f" with {one.processes} processes"
        beside = "".join(f" beside {other.model} at batch {other.batch} under {other.share}" for other in self.beside)
        ran = f"{one.model} at batch {one.batch}{processes} under {one.share}{beside}"
        return f"{ran} failed on {self.device}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TriedRuns:
    """What a database says of what can run at all."""

    failed: tuple[FailedRun, ...] = ()
    #: Device and workload of what ran: a failure elsewhere does not refute it.
    measured: frozenset[tuple[str, Workload]] = frozenset()
    #: Device and workloads, sorted, of what ran at once.
    together: frozenset[tuple[str, tuple[Workload, ...]]] = frozenset()


def rename_workloads(
    workloads: Sequence[Workload], names_of: Callable[[str], Sequence[str]]
) -> Iterator[tuple[Workload, ...]]:
    """Yield the workloads for each choice among the names of every model."""
    named = [[replace(one, model=name) for name in names_of(one.model)] for one in workloads]
    yield from product(*named)


#: Nothing is known to have failed.
NOTHING_TRIED = TriedRuns()
