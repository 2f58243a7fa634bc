"""Tasks of a worker process: a model is loaded, timed back to back and after pauses, and profiled node by node."""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from gpuprof.errors import runtime_errors
from gpuprof.graph.element_types import elem_type
from gpuprof.machine.gpu import visible_sms
from gpuprof.profiling.worker.job import WARM_UP_RUNS, TimingLimits, is_median_known
from gpuprof.rules.cpu_slices import CpuSlice
from gpuprof.runtime.batch_items import find_mixed_output
from gpuprof.runtime.gpu_session import GpuOptions, GpuSession, PinnedMemory, is_bindable, open_on_gpu, rows_of
from gpuprof.runtime.outputs import outputs_differ
from gpuprof.runtime.providers import ORT_CPU, ORT_CUDA
from gpuprof.runtime.session import BITS, needs_bits, open_session, run_by_bits, translate_error

#: Function that runs a batch and returns the outputs by name, on the host.
Run = Callable[[], Mapping[str, Any]]

Feeds = Mapping[str, Any]

#: Mean pause, in batch times: the pause of a process busy a third of its time. At higher loads fewer batches find an
#: idle process.
_MEAN_PAUSE = 3.0
_LONGEST_PAUSE_S = 0.25  # by then the caches are as cold as they get
_POOL_BYTES = 2**26  # well beyond the caches of a core


def session_run(session: Any, feeds: Mapping[str, Any], path: Path) -> Run:
    """Return a function that runs an open session once with the matching ``feeds``.

    Inputs of types missing from NumPy (bfloat16 and the eight-bit floats) are passed as their bits, and such outputs
    are returned as float32. The function raises `InputError` when the runtime refuses the inputs.
    """
    inputs_by_name = {node.name: feeds[node.name] for node in session.get_inputs() if node.name in feeds}
    kinds = {node.name: node.type for node in session.get_outputs()}
    names, errors = list(kinds), runtime_errors()
    by_bits = hasattr(session, "run_with_ort_values") and needs_bits(session)

    def run() -> Mapping[str, Any]:
        try:
            if not by_bits:
                return dict(zip(names, session.run(names, inputs_by_name), strict=True))
            results = zip(kinds.items(), run_by_bits(session, names, inputs_by_name), strict=True)
            return {name: _to_floats(value, kind) if kind in BITS else value for (name, kind), value in results}
        except errors as error:
            raise translate_error(error, path) from error

    return run


def _to_floats(bits: Any, kind: str) -> Any:
    from onnx.helper import tensor_dtype_to_np_dtype

    dtype = tensor_dtype_to_np_dtype(elem_type(kind.removeprefix("tensor(").rstrip(")")))
    return bits.view(dtype).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Execution provider of a worker, and its share of the device."""

    provider: str = ORT_CPU
    threads: int = 1  #: Intra-op threads of its sessions.
    part: CpuSlice | None = None  #: Share enforced on the process; None: bound by other means, or unlimited.
    group: str = ""  #: Control group of all processes of that share.


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long a run is repeated: ``time_s`` seconds, within limits on the number of runs."""

    time_s: float
    min_repeats: int
    max_repeats: int | None = None

    def repeat(self, run: Callable[[], object]) -> list[int]:
        """Repeat ``run`` as specified; return the durations in nanoseconds."""
        end = time.monotonic() + self.time_s
        most = math.inf if self.max_repeats is None else self.max_repeats
        durations: list[int] = []
        while len(durations) < self.min_repeats or (time.monotonic() < end and len(durations) < most):
            start = time.perf_counter_ns()
            run()
            durations.append(time.perf_counter_ns() - start)
        return durations


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model: the SMs granted to the process and the options of the session, on a GPU."""

    sms: int | None = None
    gpu: GpuOptions | None = None
    remarks: tuple[str, ...] = ()  #: Reasons against refused options.


@dataclass(frozen=True, slots=True)
class Sample:
    """Batches of a process: starts and durations, CPU time in between, and memory above an idle process."""

    starts_ns: list[int]
    latencies_ns: list[int]
    cpu_s: float
    waited_s: (
        float | None
    )  #: Time that its threads waited for a core, ready to run; None where the kernel does not count.
    memory_peak_bytes: int
    memory_held_bytes: int

    @property
    def end_ns(self) -> int:
        """When the last batch ended."""
        return self.starts_ns[-1] + self.latencies_ns[-1]

    @property
    def busy_cores(self) -> float:
        """Mean number of cores that the process kept busy."""
        return self.cpu_s / ((self.end_ns - self.starts_ns[0]) / 1e9)


class Resident:
    """State of a worker process, and its tasks: methods, and functions with the state as their first argument."""

    def __init__(self, setup: WorkerSetup, connection: Connection | None = None) -> None:
        self.setup = setup
        self._connection = connection
        self._run: Run | None = None
        self._run_on: Callable[[Feeds], object] | None = None
        self._idle_bytes: int | None = None
        self._baseline_bytes = 0

    def open(self, model: Path, gpu: GpuOptions | None = None, **options: Any) -> Any:
        """Return a session with the worker's provider and threads, and the options ``gpu`` except graphs."""
        if gpu is not None:
            gpu = gpu.without_graphs()
            options |= {"provider": gpu.provider, "provider_options": gpu.provider_options()}
        return open_session(model, **{"threads": self.setup.threads, "provider": self.setup.provider, **options})

    def run_of(self, model: Path, feeds: Feeds, gpu: GpuOptions | None = None) -> Run:
        """Return a function that runs a model as it is served; on a GPU with the options ``gpu``."""
        if gpu is None:
            return session_run(self.open(model), feeds, model)
        memory = PinnedMemory() if gpu.pinned else None
        session = GpuSession(model, gpu, rows_of(feeds), threads=self.setup.threads, memory=memory)
        return partial(session.run, feeds)

    def load(self, model: Path, feeds: Feeds, warm_up_s: float) -> Loaded:
        """Load a model, choose its options on a GPU, and run batches of ``feeds`` for a while."""
        self.unload()
        # As at the start of a process: memory of this size returns to the system when a model is closed.
        _set_mmap_threshold(2**17)
        resident_bytes, held_bytes = _reset_peak(), sum(array.nbytes for array in feeds.values())
        if self._idle_bytes is None:  # what the runtime allocates for the first model belongs to every model
            self._idle_bytes = resident_bytes - held_bytes
        self._baseline_bytes = self._idle_bytes + held_bytes
        session = self.open(model)
        _set_mmap_threshold(2**25)
        is_on_gpu, gpu = self.setup.provider == ORT_CUDA, None
        if is_on_gpu and is_bindable(session):
            session = None  # its memory is the trial's
            gpu = open_on_gpu(model, feeds, rows_of(feeds), threads=self.setup.threads)
            self._run, self._run_on = partial(gpu.run, feeds), gpu.run
        else:
            self._run = session_run(session, feeds, model)
            self._run_on = lambda fresh: session_run(session, fresh, model)()
        Effort(time_s=warm_up_s, min_repeats=WARM_UP_RUNS).repeat(self._run)
        return Loaded(visible_sms() if is_on_gpu else None, gpu.options if gpu else None, gpu.remarks if gpu else ())

    def unload(self) -> None:
        """Release the loaded model and its memory, so that the next model's memory is measured alone."""
        self._run = self._run_on = None
        gc.collect()  # objects in reference cycles would keep a session's memory until some later collection
        with suppress(AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)

    def time(self, limits: TimingLimits | None, warm_up_s: float = 0.0) -> Sample:
        """Time batches until ``limits`` are met, or without limits until a stop message.

        ``warm_up_s``: duration of batches before the first one timed, until all neighbours are at full speed.
        """
        assert self._run is not None
        Effort(time_s=warm_up_s, min_repeats=0).repeat(self._run)
        starts: list[int] = []
        latencies: list[int] = []
        over = self._is_stop_requested if limits is None else _make_stopping_rule(latencies, limits)
        begin, cpu, waited = time.monotonic(), time.process_time(), _waited_s()
        while not starts or not over(time.monotonic() - begin):
            start = time.perf_counter_ns()
            self._run()
            latencies.append(time.perf_counter_ns() - start)
            starts.append(start)
        cpu_s, waited_s = time.process_time() - cpu, _waited_s()
        if waited is not None and waited_s is not None:
            waited_s -= waited
        peak, resident_bytes = (max(0, _status_bytes(key) - self._baseline_bytes) for key in ("VmHWM", "VmRSS"))
        return Sample(starts, latencies, cpu_s, waited_s, peak, resident_bytes)

    def _is_stop_requested(self, elapsed_s: float) -> bool:
        assert self._connection is not None
        if not self._connection.poll():
            return False
        self._connection.recv()
        return True

    def time_pauses(self, feeds: Feeds, usual_ns: float, limits: TimingLimits) -> list[int]:
        """Return the durations in nanoseconds of batches as in an idle server: after a pause, with uncached inputs.

        The longer the pause, the colder the caches, so pauses vary like those between randomly arriving requests. They
        end when the mean is as precise as ``limits`` require, or after their ``min_time_s``. ``usual_ns``: time of a
        batch without a pause.
        """
        assert self._run_on is not None
        size = max(1, sum(array.nbytes for array in feeds.values()))
        pool = [{name: array.copy() for name, array in feeds.items()} for _ in range(min(64, 2 + _POOL_BYTES // size))]
        durations: list[int] = []
        begin = time.monotonic()
        while not _is_mean_known(durations, limits, time.monotonic() - begin):
            time.sleep(min(_LONGEST_PAUSE_S, pause_in_batches(len(durations)) * usual_ns / 1e9))
            # Other inputs each time: the previous inputs may still be cached after the pause.
            fresh = pool[len(durations) % len(pool)]
            start = time.perf_counter_ns()
            self._run_on(fresh)
            durations.append(time.perf_counter_ns() - start)
        return durations


def profile_nodes(resident: Resident, model: Path, feeds: Feeds, directory: Path, effort: Effort) -> Path:
    """Run under the runtime's own profiler, and return the profile; the executed graph is ``optimized.onnx`` beside it.

    The profiler slows a batch down: latencies are those of `Resident.time`.
    """
    resident.unload()
    session = resident.open(
        model, profile_prefix=str(directory / "profile"), optimized_path=directory / "optimized.onnx"
    )
    effort.repeat(session_run(session, feeds, model))
    return Path(session.end_profiling())


def compare_outputs(resident: Resident, model: Path, converted: Path, feeds: Feeds, tolerance: float) -> str | None:
    """Return how the outputs of a converted model differ from the original's, if they do."""
    answers = [session_run(resident.open(file), feeds, file)() for file in (model, converted)]
    return outputs_differ(answers[0], answers[1], "in the converted model", tolerance)


def check_model(resident: Resident, model: Path, batches: bool) -> str | None:
    """Load a model; with ``batches``, return the output, if any, that prevents requests from sharing a batch."""
    resident.open(model)
    return find_mixed_output(model) if batches else None


def time_shapes(
    resident: Resident, model: Path, cases: Sequence[Sequence[tuple[int, ...]]], effort: Effort
) -> list[float]:
    """Return the least time of a float32 model in seconds for each case's input shapes; the first is also the output's.

    Inputs and outputs are bound once: the time is of the device, not of the runtime's copies.
    """
    import onnxruntime as ort

    session = resident.open(model)
    least = []
    for shapes in cases:
        binding = session.io_binding()
        for tensor, shape in zip(session.get_inputs(), shapes, strict=True):
            binding.bind_cpu_input(tensor.name, np.full(shape, 0.5, np.float32))
        value = ort.OrtValue.ortvalue_from_numpy(np.zeros(shapes[0], np.float32))
        binding.bind_ortvalue_output(session.get_outputs()[0].name, value)
        least.append(min(effort.repeat(partial(session.run_with_iobinding, binding))) / 1e9)
    return least


def pause_in_batches(number: int) -> float:
    """Return pause ``number`` in batch times: quantiles of the exponential distribution in van der Corput's order.

    So any number of first pauses follows the distribution.

    >>> [round(pause_in_batches(number), 2) for number in range(4)]
    [2.08, 0.86, 4.16, 0.4]
    """
    digits = f"{number + 1:b}"
    part = int(digits[::-1], 2) / 2 ** len(digits)
    return -_MEAN_PAUSE * math.log1p(-part)


def _is_mean_known(durations: Sequence[int], limits: TimingLimits, elapsed_s: float) -> bool:
    if len(durations) < WARM_UP_RUNS:
        return False
    error = stdev(durations) / math.sqrt(len(durations))
    return elapsed_s >= limits.min_time_s or (
        len(durations) >= limits.min_repeats and error <= limits.precision * fmean(durations)
    )


def _make_stopping_rule(latencies: list[int], limits: TimingLimits) -> Callable[[float], bool]:
    checks = _growing_counts()
    next_check = next(checks)

    def over(elapsed_s: float) -> bool:
        nonlocal next_check
        if elapsed_s >= limits.max_time_s:
            return len(latencies) >= limits.min_repeats
        few = len(latencies) < limits.want_repeats and elapsed_s < limits.want_time_s
        if few or len(latencies) < max(limits.min_repeats, next_check) or elapsed_s < limits.min_time_s:
            return False
        # Not after every batch: sorting all latencies for the interval is not cheap.
        while next_check <= len(latencies):
            next_check = next(checks)
        return is_median_known(sorted(latencies), limits.precision)

    return over


def _growing_counts() -> Iterator[int]:
    """Yield ever larger numbers of batches, each a tenth larger than the one before."""
    count = 1
    while True:
        yield count
        count += 1 + count // 10


def _waited_s() -> float | None:
    """Return how long this process's threads have waited for a core; None where the kernel does not count it."""
    try:
        # Time on a core, time ready but not on one, in nanoseconds (Documentation/scheduler/sched-stats.rst).
        threads = [(task / "schedstat").read_text().split() for task in Path("/proc/self/task").iterdir()]
    except OSError:
        return None
    return sum(int(counters[1]) for counters in threads) / 1e9


def _set_mmap_threshold(size: int) -> None:
    """Set the size from which glibc takes memory from the system and returns it on release (mallopt(3))."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(-3, size)  # M_MMAP_THRESHOLD


def _reset_peak() -> int:
    """Restart the count of peak memory; return the resident bytes of this process."""
    with suppress(OSError):  # unsupported by some kernels; the peak then includes the imports
        # Reset VmHWM, the peak, to the current resident size (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
