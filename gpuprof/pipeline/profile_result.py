"""Progress and results of profiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpuprof.domain.share import Share
from gpuprof.errors import UnavailableError, UnstableError
from gpuprof.pipeline.result import Progress, Result
from gpuprof.profiling.per_op.per_op import OpOutcome


@dataclass(frozen=True, slots=True)
class ProfileProgress(Progress):
    """The progress of profiling, with the rows just stored in the database.

    Attributes
    ----------
    rows : tuple of mapping
        As `ProfileResult.rows` has them.
    """

    rows: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProfileResult(Result):
    """The database's rows for each requested workload.

    Attributes
    ----------
    device : str
        Empty for measurements on several devices of a cluster.
    measured : tuple of mapping
        Rows of the tables ``models`` and ``colocations``, with ``share`` as text and whether it was ``measured_now``.
    cells : int
        Number of requested workloads; a workload with neighbours has a row for each of them.
    failures : tuple of str
        Reasons for failed measurements, one for each workload.
    unstable : tuple of str
        Workloads whose times vary too much to be trusted.
    database : Path
    lost : tuple of str
        Reasons for missing kernel counters that were requested, each reason once.
    """

    device: str
    measured: tuple[Mapping[str, object], ...]
    cells: int
    failures: tuple[str, ...]
    unstable: tuple[str, ...]
    database: Path
    lost: tuple[str, ...] = ()

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each workload and for each of its neighbours."""
        return self.measured

    def require_trusted(self) -> None:
        """Refuse a result of which something failed or is unstable; its rows are in the database all the same.

        Raises
        ------
        UnavailableError
            When something could not be measured.
        UnstableError
            When the machine is too noisy.
        """
        if self.failures:
            raise UnavailableError(f"{len(self.failures)} of {self.cells} could not be measured: {self.failures[0]}")
        if self.unstable:
            first = self.unstable[0]
            verb = "is" if len(self.unstable) == 1 else "are"
            raise UnstableError(
                f"{len(self.unstable)} of {self.cells} {verb} unstable, first {first}: the machine is too noisy",
                f"they are kept and marked in {self.database}; the same command measures them again",
            )


@dataclass(frozen=True, kw_only=True)
class OpProfileResult(Result):
    """The database's rows for each distinct op, by share."""

    outcomes: Mapping[Share, tuple[OpOutcome, ...]]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each op under each share."""
        found = (one for outcomes in self.outcomes.values() for one in outcomes)
        return [{**asdict(one.row), "measured_now": one.measured_now} for one in found]

    def type_rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each type of op under each share, the longest first."""
        return [row for share, outcomes in self.outcomes.items() for row in _sum_by_type(outcomes, str(share))]


def _sum_by_type(outcomes: Sequence[OpOutcome], share: str) -> list[dict[str, object]]:
    types: dict[str, list[OpOutcome]] = {}
    for outcome in outcomes:
        types.setdefault(outcome.row.op_type, []).append(outcome)
    rows: list[dict[str, object]] = [
        {
            "op_type": op_type,
            "share": share,
            "ops": len(ops),
            "new": sum(one.measured_now for one in ops),
            "untimed": sum(one.row.duration_p50_ns is None for one in ops),
            "sum_ms": sum((one.row.duration_p50_ns or 0) for one in ops) / 1e6,
        }
        for op_type, ops in types.items()
    ]
    return sorted(rows, key=lambda row: -float(str(row["sum_ms"])))
