"""Failed runs, which limit plans just as measurements do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from gpuprof.domain.estimate import Workload


@dataclass(frozen=True, slots=True, order=True)
class FailedRun:
    """A run without a measurement: out of memory, wrong outputs, or refused by the runtime."""

    device: str
    workload: Workload
    reason: str  #: Reason recorded in the database.
    beside: tuple[Workload, ...] = ()  #: Neighbours during the failed run.

    def rename(self, names_of: Callable[[str], Sequence[str]]) -> Iterator[FailedRun]:
        """Yield the run under each combination of names of its models; nothing where a model has no name."""
        for workload, *beside in rename_workloads((self.workload, *self.beside), names_of):
            yield replace(self, workload=workload, beside=tuple(beside))

    @property
    def is_memory(self) -> bool:
        """Whether the run ran out of memory, so that a larger share of the compute units would not help."""
        return "memory" in self.reason.lower()

    def __str__(self) -> str:
        workload = self.workload
        processes = "" if workload.processes == 1 else f" with {workload.processes} processes"
        neighbours = "".join(f" beside {w.model} at batch {w.batch} under {w.share}" for w in self.beside)
        run = f"{workload.model} at batch {workload.batch}{processes} under {workload.share}{neighbours}"
        return f"{run} failed on {self.device}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TriedRuns:
    """Failed and successful runs in a database."""

    failed: tuple[FailedRun, ...] = ()
    #: Device and workload of successful runs, which failures elsewhere do not refute.
    measured: frozenset[tuple[str, Workload]] = frozenset()
    #: Device and workloads (sorted) of successful co-located runs.
    together: frozenset[tuple[str, tuple[Workload, ...]]] = frozenset()


def rename_workloads(
    workloads: Sequence[Workload], names_of: Callable[[str], Sequence[str]]
) -> Iterator[tuple[Workload, ...]]:
    """Yield the workloads under each combination of names of their models."""
    renamings = [[replace(workload, model=name) for name in names_of(workload.model)] for workload in workloads]
    yield from product(*renamings)


#: No failures known.
NOTHING_TRIED = TriedRuns()
