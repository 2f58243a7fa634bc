"""Times jobs, alone or as neighbours, each held to its share of the device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError, InputError
from gpuprof.machine.cgroup import remove_group
from gpuprof.machine.cpu_share import own_cores
from gpuprof.profiling.child.children import Child
from gpuprof.profiling.child.job import DEFAULT_LIMITS, Job, TimingLimits
from gpuprof.profiling.child.statistics import LatencyStats, summarize
from gpuprof.profiling.child.task import LatencyTask
from gpuprof.rules.cpu_slices import CpuSlice, plan_slices
from gpuprof.runtime.providers import ORT_CPU

#: Time for a model of gigabytes from a cold disk; after it the child is considered dead.
_LOAD_S = 600.0
GPU_WARM_UP_S = 1.0  # clocks and power rise for about that long


@dataclass(frozen=True, slots=True)
class Timing:
    """Measurements of a job."""

    stats: LatencyStats  #: Statistics over the batches of all processes of the job.
    throughput_rps: float  #: Requests per second of all its processes together.
    #: ``memory_peak_bytes``, ``memory_held_bytes``: Memory of the largest process, above an idle process.
    memory_peak_bytes: int
    memory_held_bytes: int
    cpu_utilization_pct: float  #: CPU time, percent of the share.
    #: ``paused_ms``, ``paused_std_ms``: Mean time, and its standard deviation, of a batch after a pause, with fresh
    #: inputs; None: not measured with neighbours.
    paused_ms: float | None
    paused_std_ms: float | None
    part: CpuSlice  #: The share as cores.
    sms: int | None = None  #: SMs granted to the processes; None: on a CPU, or unknown.


@dataclass(frozen=True, slots=True)
class _Sample:
    starts_ns: list[int]
    latencies_ns: list[int]
    cpu_s: float
    memory_peak_bytes: int
    memory_held_bytes: int
    paused_ns: list[int]

    @property
    def end_ns(self) -> int:
        """When the last batch ended."""
        return self.starts_ns[-1] + self.latencies_ns[-1]


@dataclass(frozen=True, slots=True)
class ShareBinding:
    """Binding of a job to a share of a device other than the CPU."""

    provider: str  #: Execution provider.
    environment: Mapping[str, str]  #: Variables that bind the job's processes to their share, set before their start.


def measure(
    job: Job,
    beside: Sequence[Job] = (),
    limits: TimingLimits = DEFAULT_LIMITS,
    bindings: Sequence[ShareBinding] = (),
    begin: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
) -> tuple[Timing, ...]:
    """Run ``job`` back to back until its median is precise enough, with ``beside`` running all the time.

    Raises `InputError` when the shares do not fit, or ONNX Runtime refuses a model; `UnavailableError` when a share
    cannot be enforced here, or a process dies or hangs; all others are ended then.

    Parameters
    ----------
    beside : sequence of Job
        Neighbours; their shares and the job's must fit the device together.
    bindings : sequence of ShareBinding
        A binding per job, for a device other than the CPU; all jobs may then use all cores. Empty: shares of the CPU.
    begin : function
        Called after loading and warm-up of all jobs, before the timing.
    end : function
        Called after the timing of ``job``, before its batches after pauses.

    Returns
    -------
    tuple of Timing
        Timing of the job, then of ``beside``, each over the time in which all were running.
    """
    jobs = (job, *beside)
    parts = slices_of([Share()]) * len(jobs) if bindings else slices_of([member.share for member in jobs])
    bound: Sequence[ShareBinding | None] = bindings or [None for _ in jobs]
    alone = sum(member.processes for member in jobs) == 1
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as directory, ExitStack() as stack:
        children_of_jobs = [
            _start(stack, member, part, binding, Path(directory) / str(index), limits, alone)
            for index, (member, part, binding) in enumerate(zip(jobs, parts, bound, strict=True))
        ]
        samples, sms = _run(children_of_jobs, limits, begin, end)
    window = _common_window(samples)
    return tuple(
        replace(_timing(member, part, group, window, limits), sms=given)
        for member, part, group, given in zip(jobs, parts, samples, sms, strict=True)
    )


@contextmanager
def keep_running(
    jobs: Sequence[Job], bindings: Sequence[ShareBinding], limits: TimingLimits = DEFAULT_LIMITS
) -> Iterator[None]:
    """Keep ``jobs`` running back to back on their bindings until exit; they are not timed.

    Raises `InputError` or `UnavailableError` as `measure` does.
    """
    part = slices_of([Share()])[0]
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as name, ExitStack() as stack:
        children_of_jobs = [
            _start(stack, job, part, binding, Path(name) / str(index), limits, False)
            for index, (job, binding) in enumerate(zip(jobs, bindings, strict=True), 1)
        ]
        children = [child for children in children_of_jobs for child in children]
        for child in children:
            child.expect("ready", _LOAD_S)
        for child in children:
            child.tell("go")
        try:
            yield
        finally:
            # A client of MPS killed while working on the GPU can take down the other clients of its server.
            for child in children:
                child.tell("stop")
            for child in children:
                with suppress(GpuprofError):
                    child.expect("done", limits.hang_s)


def slices_of(shares: Sequence[Share]) -> tuple[CpuSlice, ...]:
    """Return the cores of each share of this machine's CPU.

    Raises `InputError` when a share is of a MIG instance, which a CPU has not, or all together are more than the CPU.
    """
    for share in shares:
        if share.mig is not None:
            raise InputError(f"a CPU has no MIG instance {share.mig}", "write the share as a percentage or cores")
    return plan_slices([share.sm_pct for share in shares], own_cores())


@contextmanager
def shared_group(name: str) -> Iterator[str]:
    """Yield a unique name for a control group, and remove the group on exit."""
    unique = f"{os.getpid()}-{name}"
    try:
        yield unique
    finally:
        remove_group(unique)


def save_inputs(job: Job, path: Path) -> None:
    """Write the inputs of ``job`` to ``path``: its data's or random ones, the same for the same model and batch."""
    save_arrays(job.inputs(), path)


def save_arrays(arrays: Mapping[str, Any], path: Path) -> None:
    """Write arrays to ``path`` for a child to read; texts go as fixed-width ones, since nothing is pickled."""
    import numpy as np

    plain = {name: array.astype(str) if array.dtype == object else array for name, array in arrays.items()}
    np.savez(path, allow_pickle=False, **plain)


def label(job: Job) -> str:
    """Return ``"resnet50 at batch 8 on 50%"``."""
    return f"{job.graph.sized_name} at batch {job.graph.batch} on {job.share}"


def _start(
    stack: ExitStack,
    job: Job,
    part: CpuSlice,
    binding: ShareBinding | None,
    directory: Path,
    limits: TimingLimits,
    alone: bool,
) -> list[Child]:
    directory.mkdir()
    inputs = directory / "inputs.npz"
    save_inputs(job, inputs)
    group = stack.enter_context(shared_group(f"job{directory.name}"))
    task = LatencyTask(
        provider=binding.provider if binding else ORT_CPU,
        threads=part.threads,
        part=None if binding else part,
        group=group,
        model=job.path,
        inputs=inputs,
        limits=limits,
        leads=False,
        beside_others=not alone,
        **({"warm_up_s": GPU_WARM_UP_S} if binding else {}),
    )
    children = []
    for process in range(job.processes):
        own = replace(task, leads=directory.name == "0" and process == 0)
        children.append(
            stack.enter_context(Child(own, label(job), environment=binding.environment if binding else None))
        )
    return children


def _run(
    children_of_jobs: Sequence[Sequence[Child]],
    limits: TimingLimits,
    begin: Callable[[], None],
    end: Callable[[], None],
) -> tuple[list[list[_Sample]], list[int | None]]:
    """Return each process's measurements, and the SMs granted to each job's processes."""
    everybody = [child for children in children_of_jobs for child in children]
    sms = {child: child.expect("ready", _LOAD_S).get("sms") for child in everybody}
    # All have loaded: no job is timed while a neighbour still reads its file.
    begin()
    for child in everybody:
        child.tell("go")
    # The first process of the job decides when to end; the others run until their stop message.
    leader, *others = everybody
    patience = limits.max_time_s + limits.hang_s
    leader.expect("timed", patience)
    end()
    for child in others:
        child.tell("stop")
    told = {child: child.expect("done", limits.hang_s) for child in everybody}
    return (
        [[_sample(told[child]) for child in children] for children in children_of_jobs],
        [sms[children[0]] for children in children_of_jobs],
    )


def _sample(message: dict[str, object]) -> _Sample:
    return _Sample(**{name: message[name] for name in _Sample.__slots__})  # type: ignore[arg-type]


def timing_of(job: Job, message: dict[str, object], limits: TimingLimits, sms: int | None = None) -> Timing:
    """Return the figures of a process with a device to itself, from its final message."""
    (part,) = slices_of([Share()])
    samples = [_sample(message)]
    return replace(_timing(job, part, samples, _common_window([samples]), limits), sms=sms)


def _common_window(samples: Sequence[Sequence[_Sample]]) -> tuple[int, int]:
    """Return the interval in which all processes were running; outside this interval contention was lower."""
    everyone = [sample for group in samples for sample in group]
    return max(sample.starts_ns[0] for sample in everyone), min(sample.end_ns for sample in everyone)


def _timing(
    job: Job, part: CpuSlice, samples: Sequence[_Sample], window: tuple[int, int], limits: TimingLimits
) -> Timing:
    begin, end = window
    kept: list[tuple[int, int]] = []
    throughput = 0.0
    for sample in samples:
        pairs = list(zip(sample.starts_ns, sample.latencies_ns, strict=True))
        # A batch longer than the window is still a measurement of a batch.
        inside = [(s, d) for s, d in pairs if s >= begin and s + d <= end] or pairs
        kept += inside
        throughput += job.graph.batch * len(inside) / ((inside[-1][0] + inside[-1][1] - inside[0][0]) / 1e9)
    wall_s = max(sample.end_ns - sample.starts_ns[0] for sample in samples) / 1e9
    cpu_s = sum(sample.cpu_s for sample in samples)
    paused = samples[0].paused_ns
    return Timing(
        stats=summarize([duration / 1e6 for _, duration in sorted(kept)], limits.precision),
        throughput_rps=throughput,
        memory_peak_bytes=max(sample.memory_peak_bytes for sample in samples),
        memory_held_bytes=max(sample.memory_held_bytes for sample in samples),
        cpu_utilization_pct=100.0 * cpu_s / (wall_s * part.amount_cores),
        paused_ms=fmean(paused) / 1e6 if paused else None,
        paused_std_ms=stdev(paused) / 1e6 if paused else None,
        part=part,
    )
