"""A configuration to measure, its result, and its key among the runs of a database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from gpuprof.domain.sizes import describe_sizes
from gpuprof.kernel_db.schema import ColocationRow, ModelRow, RunRow
from gpuprof.profiling.worker.job import Job

#: Key in a run's settings.
DATA_SHA256 = "input_data_sha256"
MeasuredRow = ModelRow | ColocationRow


@dataclass(frozen=True, slots=True)
class Cell:
    """A job to measure, with its neighbours."""

    job: Job
    beside: tuple[Job, ...] = ()

    def __str__(self) -> str:
        return f"{self.job.label} beside {self.describe_neighbours()}" if self.beside else self.job.label

    def describe_neighbours(self) -> str:
        """Return the job's neighbours in the format of the ``beside`` column; empty without neighbours."""
        return " + ".join(job.label for job in self.beside)


@dataclass(frozen=True, slots=True)
class CellResult:
    """Rows of a cell in the database."""

    cell: Cell
    row: MeasuredRow  #: Row of the cell in ``models``, or in ``colocations`` for a cell with neighbours.
    others: tuple[MeasuredRow, ...] = ()  #: Rows of the neighbours.
    measured_now: bool = True  #: False: measured earlier.
    lost: tuple[str, ...] = ()  #: Reasons for missing requested counters.


@dataclass(frozen=True, slots=True)
class CellKey:
    """Identity of a measurement, common to a cell and its runs in the database."""

    model: str | None
    sha256: str | None
    batch: int | None
    dims: str
    data_sha256: str | None
    sm_share_pct: float | None
    mig_profile: str | None
    processes: int | None
    beside: str | None

    @classmethod
    def of_cell(cls, cell: Cell) -> CellKey:
        """Return the key of a cell."""
        job = cell.job
        return cls(
            model=job.graph.name,
            sha256=job.graph.sha256,
            batch=job.graph.batch,
            dims=describe_sizes(job.graph.sizes),
            data_sha256=None if job.data is None else job.data.sha256,
            sm_share_pct=round(job.share.sm_pct, 6),
            mig_profile=job.share.mig,
            processes=job.processes,
            beside=cell.describe_neighbours() or None,
        )

    @classmethod
    def of_run(cls, run: RunRow, assumed: Mapping[str, str]) -> CellKey:
        """Return the key of a run; a run without sizes has the sizes ``assumed`` for the file's hash."""
        return cls(
            model=run.model,
            sha256=run.model_sha256,
            batch=run.batch,
            dims=assumed.get(run.model_sha256 or "", "") if run.dims is None else run.dims,
            data_sha256=json.loads(run.settings or "{}").get(DATA_SHA256),
            sm_share_pct=None if run.sm_share_pct is None else round(run.sm_share_pct, 6),
            mig_profile=run.mig_profile,
            processes=run.processes,
            beside=run.beside,
        )
