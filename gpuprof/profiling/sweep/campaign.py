"""Measures many cells, a run each, into a database, skipping cells measured before."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import gpuprof
from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import describe_sizes
from gpuprof.errors import InputError, UnavailableError
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, compact_if_due, new_run_id
from gpuprof.profiling.collector import Collected, Collector, record_dims, record_variants
from gpuprof.profiling.cpu.ort import SOURCE, measure_ceilings
from gpuprof.profiling.worker.job import DEFAULT_LIMITS, Job, Request, TimingLimits
from gpuprof.profiling.worker.process import Worker
from gpuprof.profiling.worker.tasks import WorkerSetup, check_model
from gpuprof.runtime.batch_items import BatchVerdicts
from gpuprof.runtime.gpu_session import GPU_CHOICE, read_choice
from gpuprof.runtime.optimizer import arithmetic_precision

#: Key in a run's settings.
DATA_SHA256 = "input_data_sha256"
MeasuredRow = ModelRow | ColocationRow
#: Largest batch that has two runs on a GPU by default. The host decides the time of small batches, and differs between
#: processes: a batch of one of ResNet-50 took 1.6 ms on an H200, and 2.3 in another process. The four default batches
#: are enough cells for a common variance (`pool_variances`).
SMALL_BATCH = 8


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


class Campaign:
    """Measures cells on a device with a collector into a database.

    ``force``: repeat earlier measurements; ``keep_unstable``: accept earlier unstable rows, to save time; ``repeats``:
    runs of each cell, in processes of their own, one after all cells have had theirs (None: two of a small batch on a
    GPU, else one); ``every_s``: least time between the beginnings of two runs. On a GPU the last run is recorded by
    profilers, the others only timed.

    Attributes
    ----------
    verdicts : BatchVerdicts
        Results of the test for mixed batch items, for models measured at batches above 1.
    """

    def __init__(
        self,
        database: KernelDb,
        device: Device,
        collector: Collector,
        force: bool = False,
        limits: TimingLimits = DEFAULT_LIMITS,
        keep_unstable: bool = False,
        repeats: int | None = None,
        every_s: float = 0.0,
    ) -> None:
        self.database = database
        self.device = device
        self.collector = collector
        self.force = force
        self.limits = limits
        self.keep_unstable = keep_unstable
        self.repeats = repeats
        self.every_s = every_s
        self.verdicts = BatchVerdicts(database.path)

    def run(
        self, cells: Iterable[Cell], begin: Callable[[Cell], None] = lambda cell: None
    ) -> Generator[CellResult, None, None]:
        """Measure ``cells`` and yield each result once it is on the disk.

        Cells with the same models and shares come together, at all their batch sizes. A cell is skipped if it has as
        many runs as wanted with the same versions of collector and runtime that were neither unstable nor failed.
        ``begin``: called with each cell before its measurement. Raises `InputError` when the runtime refuses a model or
        a share does not exist; before all measurements, if detectable.
        """
        groups: dict[object, list[Cell]] = {}
        for cell in cells:
            jobs = (cell.job, *cell.beside)
            key = tuple((job.graph.sized_name, job.path, job.share, job.processes) for job in jobs)
            groups.setdefault(key, []).append(cell)
        ordered = [cell for group in groups.values() for cell in group]
        earlier = {} if self.force else self._read_known(ordered)
        self._check_models(
            [cell for cell in ordered if len(earlier.get(CellKey.of_cell(cell), ())) < self.count_runs(cell)]
        )
        rounds = max(map(self.count_runs, ordered), default=0)
        alone = {key: runs[-1][0].latency_mean_ms for key, runs in earlier.items()}
        for turn in range(1 - rounds, 1):  # cells with fewer runs have theirs in the last rounds
            started = time.monotonic()
            for group in groups.values():
                missing = []
                for cell in group:
                    number = turn + self.count_runs(cell) - 1
                    runs = earlier.get(CellKey.of_cell(cell), [])[-self.count_runs(cell) :]
                    if 0 <= number < len(runs):
                        begin(cell)
                        yield CellResult(cell, runs[number][0], tuple(runs[number][1:]), measured_now=False)
                    elif number >= 0:
                        missing.append(cell)
                for result in self._measure(missing, alone, begin, records=turn == 0):
                    alone[CellKey.of_cell(result.cell)] = result.row.latency_mean_ms
                    yield result
            if turn < 0:
                time.sleep(max(0.0, self.every_s - (time.monotonic() - started)))

    def count_runs(self, cell: Cell) -> int:
        """Return the number of runs of a cell."""
        is_small = self.device.kind == "gpu" and not cell.beside and cell.job.graph.batch <= SMALL_BATCH
        return self.repeats or 1 + is_small

    def _measure(
        self,
        cells: Sequence[Cell],
        alone: Mapping[CellKey, float | None],
        begin: Callable[[Cell], None],
        records: bool,
    ) -> Iterator[CellResult]:
        """Measure cells with the same models and shares, and yield each result once it is on the disk."""
        waiting = []
        for cell in cells:
            started = datetime.now(UTC)
            request = Request(new_run_id(started), started, self.device, cell.job, cell.beside, self.limits, records)
            waiting.append((cell, request))
        clock = time.monotonic()
        try:
            for _, measured in zip(
                cells, self._collect([request for _, request in waiting], cells, begin), strict=True
            ):
                cell, request = waiting.pop(0)
                if isinstance(measured, UnavailableError):
                    measured = _failed_attempt(request, cell, str(measured))
                solo = [alone.get(CellKey.of_cell(Cell(job))) for job in request.jobs]
                rows = zip(measured.colocations, solo, strict=False)
                measured = replace(
                    measured, colocations=tuple(replace(row, solo_latency_mean_ms=ms) for row, ms in rows)
                )
                yield self._store(request, cell, measured, time.monotonic() - clock)
                clock = time.monotonic()
        except UnavailableError as error:  # of the share: all remaining cells would fail alike
            for cell, request in waiting:
                yield self._store(request, cell, _failed_attempt(request, cell, str(error)), time.monotonic() - clock)
        except InputError as error:
            if error.fix or any(job.data is not None for cell in cells for job in (cell.job, *cell.beside)):
                raise
            raise InputError(error.message, "its inputs were random; give real ones: --input-data FILE") from error

    def _collect(
        self, requests: Sequence[Request], cells: Sequence[Cell], begin: Callable[[Cell], None]
    ) -> Iterator[Collected | UnavailableError]:
        """Yield the results of a collector in order, together if it can keep processes for several batch sizes."""
        together = getattr(self.collector, "collect_batches", None)
        results = (
            together(requests) if together and requests else (self._collect_alone(request) for request in requests)
        )
        with closing(results):
            for cell in cells:
                begin(cell)
                yield next(results)

    def _collect_alone(self, request: Request) -> Collected | UnavailableError:
        try:
            return self.collector.collect(request)
        except UnavailableError as error:
            return error

    def measure_ceilings(self, shares: Iterable[Share]) -> None:
        """Measure the device's ceilings under each share, if not yet known; CPUs only."""
        if self.device.kind != "cpu":
            return
        rows = read_records(self.database, DeviceRow, {"device": self.device.name, "measured": True})
        shares_pct = {round(row.sm_share_pct, 6) for row in rows if row.source == SOURCE}
        for share in dict.fromkeys(shares):
            if self.force or round(share.sm_pct, 6) not in shares_pct:
                started = datetime.now(UTC)
                run_id = new_run_id(started)
                row = measure_ceilings(self.device, share, run_id, self.limits)
                runtime, version = self.collector.runtime()
                run = RunRow(run_id, started, self.device.name, "ceilings", "", sm_share_pct=share.sm_pct)
                run = replace(run, runtime=runtime, runtime_version=version, **machine_columns())
                self.database.append(Run(run, devices=[row]))
                compact_if_due(self.database)

    def _store(self, request: Request, cell: Cell, collected: Collected, duration_s: float) -> CellResult:
        jobs = request.jobs
        collected = record_dims(record_variants(collected, jobs, self.device), jobs)
        self.database.append(self._run(request, cell, collected, duration_s))
        self.verdicts.save()
        compact_if_due(self.database)
        rows: Sequence[MeasuredRow] = collected.colocations if cell.beside else collected.models
        return CellResult(cell, rows[0], tuple(rows[1:]), lost=collected.lost)

    def _run(self, request: Request, cell: Cell, collected: Collected, duration_s: float) -> Run:
        graph = cell.job.graph
        runtime, runtime_version = self.collector.runtime()
        run = RunRow(
            **request.columns(),
            started_at=request.started_at,
            collector=self.collector.name,
            model_sha256=graph.sha256,
            model_path=graph.path,
            dims=describe_sizes(graph.sizes) or None,
            processes=cell.job.processes,
            beside=cell.describe_neighbours() or None,
            duration_s=duration_s,
            runtime=runtime,
            runtime_version=runtime_version,
            provider=str(collected.settings.get("provider", "")) or None,
            precision=arithmetic_precision(graph, self.device),
            collector_version=self.collector.version(),
            settings=json.dumps({**collected.settings, **_describe_data(cell.job)}, sort_keys=True),
            notes="; ".join(collected.notes) or None,
            clocks_policy=str(collected.settings.get("clock_control") or "") or None,
            **machine_columns(),
        )
        run = replace(run, driver=str(collected.settings.get("nvidia_driver") or run.driver))
        parts = (collected.devices, collected.models, collected.ops, collected.kernels, collected.colocations)
        return Run(run, *parts)

    def _read_known(self, cells: Sequence[Cell]) -> dict[CellKey, list[list[MeasuredRow]]]:
        """Return for each cell the rows of all runs that need not be repeated, oldest first.

        A run without recorded sizes is taken to have the assumed sizes.
        """
        graphs = (job.graph for cell in cells for job in (cell.job, *cell.beside))
        assumed = {
            graph.sha256: describe_sizes(graph.sizes)
            for graph in graphs
            if graph.sizes and {name for name, _ in graph.sizes} == set(graph.assumed)
        }
        runtime, runtime_version = self.collector.runtime()
        where = {
            "device": self.device.name,
            "collector": self.collector.name,
            "collector_version": self.collector.version(),
            "runtime": runtime,
            "runtime_version": runtime_version,
        }
        choice = read_choice()
        runs = [run for run in read_records(self.database, RunRow, where) if _choice_of(run) in (None, choice)]
        by_run: dict[str, list[MeasuredRow]] = {}
        here = {"device": self.device.name}
        rows: list[MeasuredRow] = [*read_records(self.database, ModelRow, here)]
        rows += read_records(self.database, ColocationRow, here)
        for row in rows:
            by_run.setdefault(row.run_id, []).append(row)
        rows_by_cell: dict[CellKey, list[list[MeasuredRow]]] = {}
        for run in sorted(runs, key=lambda run: run.run_id):
            rows_of_run = by_run.get(run.run_id, [])
            if rows_of_run and all(
                row.error is None and (self.keep_unstable or row.stable is not False) for row in rows_of_run
            ):
                rows_by_cell.setdefault(CellKey.of_run(run, assumed), []).append(rows_of_run)
        return rows_by_cell

    def _check_models(self, cells: Sequence[Cell]) -> None:
        """Load each model once in the runtime, so that a broken model is detected before an hour of measuring."""
        jobs = [job for cell in cells for job in (cell.job, *cell.beside)]
        if not jobs:
            return
        batched = {job.path for job in jobs if job.graph.batch > 1}
        with Worker(WorkerSetup(), "models") as worker:
            for path, job in {job.path: job for job in jobs}.items():
                worker.what = f"profiling {job.graph.name}"
                mixed = worker.call(check_model, path, path in batched)
                if path in batched:
                    self.verdicts.keep(job.graph.sha256, mixed)


def _choice_of(run: RunRow) -> str | None:
    """Return the choice of GPU options of a run, None if not recorded."""
    choice: str | None = json.loads(run.settings or "{}").get(GPU_CHOICE)
    return choice


def _describe_data(job: Job) -> dict[str, object]:
    """Return the settings that describe the inputs in a run; empty for random inputs."""
    if job.data is None:
        return {}
    return {"input_data": str(job.data.path), DATA_SHA256: job.data.sha256, "input_samples": len(job.samples)}


def _failed_attempt(request: Request, cell: Cell, error: str) -> Collected:
    """Return rows that record a failed attempt, without figures."""
    job = cell.job
    common = request.columns() | {"processes": job.processes, "model_sha256": job.graph.sha256, "error": error}
    if cell.beside:
        return Collected(colocations=(ColocationRow(**common, group=0, member=0, beside=cell.describe_neighbours()),))
    return Collected(models=(ModelRow(**common, model_path=job.graph.path),))


def machine_columns() -> dict[str, Any]:
    """Return the columns of a run that describe the machine and the software."""
    return {
        "host": platform.node(),
        "driver": f"{platform.system()} {platform.release()}",
        "gpuprof_version": gpuprof.__version__,
        "command": shlex.join(sys.argv),
    }
