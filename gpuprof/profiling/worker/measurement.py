"""Times jobs, alone or as neighbours, in resident workers that are each held to their share of the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Self

from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError, InputError
from gpuprof.machine.cgroup import own_cores, remove_group
from gpuprof.machine.cores import MachineLoad
from gpuprof.profiling.worker.job import DEFAULT_LIMITS, Job, LatencyStats, TimingLimits, summarize
from gpuprof.profiling.worker.process import Worker
from gpuprof.profiling.worker.tasks import Loaded, Resident, Sample, WorkerSetup
from gpuprof.rules.cpu_slices import CpuSlice, plan_slices
from gpuprof.runtime.child_process import PATIENCE_S


@dataclass(frozen=True, slots=True)
class Timing:
    """Measurements of a job."""

    stats: LatencyStats  #: Statistics over the batches of all processes of the job.
    throughput_rps: float  #: Requests per second of all its processes together.
    #: ``memory_peak_bytes``, ``memory_held_bytes``: Memory of the largest process, above an idle process.
    memory_peak_bytes: int
    memory_held_bytes: int
    cpu_utilization_pct: float  #: CPU time, percent of the share.
    #: Time that threads waited for a core, percent of the share; None: not counted here, or also counts their quota.
    cpu_wait_pct: float | None
    #: ``paused_ms``, ``paused_std_ms``: Mean time, and its standard deviation, of a batch after a pause, with fresh
    #: inputs; None: not measured with neighbours.
    paused_ms: float | None
    paused_std_ms: float | None
    part: CpuSlice  #: The share as cores.
    loaded: Loaded = field(default_factory=Loaded)  #: SMs and options of the session on a GPU.
    disturbance: str | None = None  #: Other use of the machine meanwhile, which makes the figures unstable.


@dataclass(frozen=True, slots=True)
class ShareBinding:
    """Binding of a job to a share of a device other than the CPU."""

    provider: str  #: Execution provider.
    environment: Mapping[str, str]  #: Variables that bind the job's processes to their share, set before their start.


class Crew:
    """Workers of a job and its neighbours, a process for each copy, which stay up for all batch sizes.

    ``jobs``: a job and its neighbours; their shares must fit the device together. ``bindings``: a binding per job, for
    a device other than the CPU; all jobs may then use all cores. Empty: shares of the CPU. Raises `InputError` when the
    shares do not fit.
    """

    def __init__(self, jobs: Sequence[Job], bindings: Sequence[ShareBinding] = ()) -> None:
        self.parts = slices_of([Share()]) * len(jobs) if bindings else slices_of([job.share for job in jobs])
        self._groups = [f"{os.getpid()}-job{number}" for number in range(len(jobs))]
        self._setups = [
            WorkerSetup(threads=part.threads, part=part, group=group)
            if not bindings
            else WorkerSetup(provider=bindings[number].provider, threads=part.threads)
            for number, (part, group) in enumerate(zip(self.parts, self._groups, strict=True))
        ]
        self._environments = [binding.environment for binding in bindings] or [{} for _ in jobs]
        self._is_on_cpu = not bindings
        self._workers = [[self._start(number, job) for _ in range(job.processes)] for number, job in enumerate(jobs)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._everybody():
            worker.end()
        for group in self._groups:
            remove_group(group)

    @property
    def leader(self) -> Worker:
        """The job's first process, whose timing ends the measurement."""
        return self._workers[0][0]

    def measure(
        self,
        jobs: Sequence[Job],
        limits: TimingLimits = DEFAULT_LIMITS,
        begin: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> tuple[Timing, ...]:
        """Run the first job back to back until its median is precise enough, with the others running all the time.

        The timing of each job is over the time in which all were running.

        Raises `InputError` when ONNX Runtime refuses a model; `UnavailableError` when a share cannot be enforced here,
        or a process dies or hangs.

        ``jobs``: the jobs of the crew, at any batch size; ``begin``, ``end``: called after loading and warm-up of all
        jobs, before the timing, and after it, before batches after pauses.
        """
        feeds, loaded = self._load(jobs, limits)
        warm_up_s = limits.warm_up_s if len(self._everybody()) > 1 else 0.0
        load = MachineLoad({core for part in self.parts for core in part.cores})
        begin()
        # The leader decides when to end; the others run until their stop message.
        neighbours = [worker for worker in self._everybody() if worker is not self.leader]
        self.leader.send(Resident.time, limits, warm_up_s)
        for worker in neighbours:
            worker.send(Resident.time, None, warm_up_s)
        try:
            first: Sample = self.leader.receive(PATIENCE_S + limits.max_time_s)
            end()
        finally:
            for worker in neighbours:
                worker.stop()
            rest = _receive_all(neighbours)
        samples = [
            [first if worker is self.leader else rest[worker] for worker in workers] for workers in self._workers
        ]
        own_cores = sum(sample.busy_cores for group in samples for sample in group) if self._is_on_cpu else None
        disturbance = load.describe_disturbance(own_cores, 2.0 * limits.precision)
        paused: list[int] = []
        if not neighbours:  # the device must not be sampled meanwhile
            usual_ns = fmean(first.latencies_ns)
            paused = self.leader.call(Resident.time_pauses, feeds[0], usual_ns, limits)
        # In which all processes were running; outside of it contention was lower.
        everyone = [sample for group in samples for sample in group]
        window = max(sample.starts_ns[0] for sample in everyone), min(sample.end_ns for sample in everyone)
        return tuple(
            _timing(job, self.parts[number], samples[number], window, limits, loaded[number], paused, disturbance)
            for number, job in enumerate(jobs)
        )

    @contextmanager
    def keep_running(self, jobs: Sequence[Job], limits: TimingLimits = DEFAULT_LIMITS) -> Iterator[None]:
        """Keep the jobs running back to back until exit; they are not timed. Errors as for `measure`."""
        self._load(jobs, limits)
        for worker in self._everybody():
            worker.send(Resident.time, None)
        try:
            yield
        finally:
            # A client of MPS killed while working on the GPU can take down the other clients of its server.
            for worker in self._everybody():
                worker.stop()
            with suppress(GpuprofError):
                _receive_all(self._everybody())

    def _load(self, jobs: Sequence[Job], limits: TimingLimits) -> tuple[list[dict[str, Any]], list[Loaded]]:
        """Load all models before timing any; return each job's inputs, and how it was loaded."""
        feeds = [job.inputs() for job in jobs]
        for number, (job, workers) in enumerate(zip(jobs, self._workers, strict=True)):
            for place, worker in enumerate(workers):
                if not worker.is_alive:  # a larger batch may have ended it
                    worker.end()
                    workers[place] = worker = self._start(number, job)
                worker.what = f"profiling {job.title}"
                warm_up_s = limits.warm_up_s if self._is_on_cpu else limits.min_time_s
                worker.send(Resident.load, job.path, feeds[number], warm_up_s)
        loaded = _receive_all(self._everybody())
        return feeds, [loaded[workers[0]] for workers in self._workers]

    def _start(self, number: int, job: Job) -> Worker:
        return Worker(self._setups[number], job.title, self._environments[number])

    def _everybody(self) -> list[Worker]:
        return [worker for workers in self._workers for worker in workers]


def _receive_all(workers: Sequence[Worker]) -> dict[Worker, Any]:
    """Return the result of each worker; an error is raised after all have answered, so that none keeps running."""
    results: dict[Worker, Any] = {}
    errors: list[GpuprofError] = []
    for worker in workers:
        try:
            results[worker] = worker.receive()
        except GpuprofError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def slices_of(shares: Sequence[Share]) -> tuple[CpuSlice, ...]:
    """Return the cores of each share of this machine's CPU.

    Raises `InputError` when a share is of a MIG instance, which a CPU has not, or all together are more than the CPU.
    """
    for share in shares:
        if share.mig is not None:
            raise InputError(f"a CPU has no MIG instance {share.mig}", "write the share as a percentage or cores")
    return plan_slices([share.sm_pct for share in shares], own_cores())


@contextmanager
def share_worker(share: Share, what: str) -> Iterator[Worker]:
    """Yield a worker held to a share of this machine's CPU. Raises `InputError` as `slices_of`."""
    (part,) = slices_of([share])
    group = f"{os.getpid()}-{what.replace(' ', '-')}"
    try:
        with Worker(WorkerSetup(threads=part.threads, part=part, group=group), what) as worker:
            yield worker
    finally:
        remove_group(group)


def _timing(
    job: Job,
    part: CpuSlice,
    samples: Sequence[Sample],
    window: tuple[int, int],
    limits: TimingLimits,
    loaded: Loaded,
    paused: Sequence[int],
    disturbance: str | None,
) -> Timing:
    begin, end = window
    spans: list[tuple[int, int]] = []
    throughput = 0.0
    for sample in samples:
        pairs = list(zip(sample.starts_ns, sample.latencies_ns, strict=True))
        # A batch longer than the window is still a measurement of a batch.
        inside = [(s, d) for s, d in pairs if s >= begin and s + d <= end] or pairs
        spans += inside
        throughput += job.graph.batch * len(inside) / ((inside[-1][0] + inside[-1][1] - inside[0][0]) / 1e9)
    wall_s = max(sample.end_ns - sample.starts_ns[0] for sample in samples) / 1e9
    cpu_s = sum(sample.cpu_s for sample in samples)
    waits_s = [sample.waited_s for sample in samples if sample.waited_s is not None]
    return Timing(
        stats=summarize([duration / 1e6 for _, duration in sorted(spans)], limits.precision, disturbance is None),
        throughput_rps=throughput,
        memory_peak_bytes=max(sample.memory_peak_bytes for sample in samples),
        memory_held_bytes=max(sample.memory_held_bytes for sample in samples),
        cpu_utilization_pct=100.0 * cpu_s / (wall_s * part.amount_cores),
        cpu_wait_pct=(
            100.0 * sum(waits_s) / (wall_s * part.amount_cores)
            if len(waits_s) == len(samples) and part.quota_cores is None
            else None
        ),
        paused_ms=fmean(paused) / 1e6 if paused else None,
        paused_std_ms=stdev(paused) / 1e6 if paused else None,
        part=part,
        loaded=loaded,
        disturbance=disturbance,
    )
