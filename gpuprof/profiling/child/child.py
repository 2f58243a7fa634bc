"""Process that runs a model for a measurement: ``python -m gpuprof.profiling.child.child``.

The protocol is JSON, an object per line. Stdin carries the task, then ``go``, then, unless the process leads, ``stop``;
stdout carries ``ready``, then ``done`` with the figures, or ``error``. A separate process contains crashes, hangs and
memory exhaustion of a model, and allows a comparison of its memory with an idle process.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from gpuprof.errors import GpuprofError
from gpuprof.machine.cpu_share import confine_to_share, own_cores
from gpuprof.machine.visible_sms import visible_sms
from gpuprof.profiling.child.job import TimingLimits
from gpuprof.profiling.child.pauses import time_after_pauses
from gpuprof.profiling.child.runner import outputs_differ, session_run
from gpuprof.profiling.child.statistics import is_median_known
from gpuprof.profiling.child.task import (
    CheckTask,
    ChildTask,
    Effort,
    KernelsTask,
    LatencyTask,
    NodesTask,
    OpFiles,
    OpsTask,
    PeakTask,
    read_task,
)
from gpuprof.runtime.batch_items import find_mixed_output
from gpuprof.runtime.providers import ORT_CUDA
from gpuprof.runtime.session import open_session

_WARM_UP_RUNS = 3
_MAX_WARM_UP_S = 3.0
_CHECK_EVERY_S = 0.25
_PR_SET_PDEATHSIG = 1
#: Unbuffered: select would not see a line already read into a buffer.
_STDIN = io.FileIO(0, closefd=False)


def main() -> int:
    """Run the task given on stdin; exit code 1 after an error, reported on stdout."""
    die_with_parent()
    speech = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output printed by libraries must not mix with the protocol
    task = receive_task()
    try:
        alone = _outputs_alone(task) if isinstance(task, NodesTask) and task.compare else None
        with confine_to_share(task.part, task.group) if task.part else nullcontext():
            _run_task(task, alone, speech)
    except GpuprofError as error:
        send_message(speech, "error", kind=type(error).__name__, message=error.message, fix=error.fix)
        return 1
    except MemoryError:
        send_message(speech, "error", kind="UnavailableError", message="out of memory", fix="try a smaller batch")
        return 1
    return 0


def _run_task(task: ChildTask, alone: Mapping[str, Any] | None, speech: TextIO) -> None:
    match task:
        case CheckTask():
            _run_check_task(task, speech)
        case LatencyTask():
            _run_latency_task(task, speech)
        case NodesTask():
            _run_nodes_task(task, alone, speech)
        case OpsTask():
            _run_ops_task(task, speech)
        case KernelsTask():
            _run_kernels_task(task, speech)
        case PeakTask():
            _run_peak_task(task, speech)
        case _:
            raise ValueError(f"no task of this process: {task}")


def _run_latency_task(task: LatencyTask, speech: TextIO) -> None:
    import numpy as np

    load_runtime()  # before the baseline, as in an idle server
    time_model(task, dict(np.load(task.inputs)), speech)


def time_model(task: LatencyTask, feeds: dict[str, Any], speech: TextIO) -> None:
    """Open the task's model, send ``ready``, and after ``go`` time the model and send ``timed``, then ``done``."""
    # Baseline with the runtime loaded, but not the model: the difference is the model's memory.
    baseline = _resident_bytes(reset_peak=True)
    session = open_session(task.model, threads=task.threads, provider=task.provider)
    run = session_run(session, feeds, task.model)
    _warm_up(run, task.warm_up_s)
    send_message(speech, "ready", sms=visible_sms() if task.provider == ORT_CUDA else None)
    wait_for("go")
    starts, latencies, cpu_s = _measure_runs(run, task)
    if task.leads:  # pauses follow, during which the device must not be sampled
        send_message(speech, "timed")
    # Before the runs after pauses: their copies of the inputs do not belong to the model's memory.
    peak, held = max(0, _status_bytes("VmHWM") - baseline), max(0, _status_bytes("VmRSS") - baseline)
    alone = task.leads and not task.beside_others
    usual = int(median(latencies))
    send_message(
        speech,
        "done",
        starts_ns=starts,
        latencies_ns=latencies,
        cpu_s=cpu_s,
        memory_peak_bytes=peak,
        memory_held_bytes=held,
        paused_ns=time_after_pauses(lambda fresh: session_run(session, dict(fresh), task.model)(), feeds, usual)
        if alone
        else [],
    )


def load_runtime() -> None:
    """Import the runtime that executes the models; takes seconds."""
    importlib.import_module("onnxruntime")


def _run_nodes_task(task: NodesTask, alone: Mapping[str, Any] | None, speech: TextIO) -> None:
    """Run under the runtime's own profiler, which slows the model down: never in the process of the latencies."""
    import numpy as np

    feeds = dict(np.load(task.inputs))
    session = open_session(
        task.model,
        threads=task.threads,
        provider=task.provider,
        profile_prefix=task.profile_prefix,
        optimized_path=task.optimized,
    )
    run = session_run(session, feeds, task.model)
    send_message(speech, "ready")
    wait_for("go")
    repeats = _run_repeatedly(run, task.effort)
    differs = outputs_differ(alone, run()) if alone else None
    send_message(speech, "done", profile=session.end_profiling(), repeats=repeats, differs=differs)


def _outputs_alone(task: NodesTask) -> dict[str, Any] | None:
    """Return the model's outputs without a share; None for outputs that differ between runs."""
    import numpy as np

    session = open_session(task.model, threads=len(own_cores()), provider=task.provider)
    run = session_run(session, dict(np.load(task.inputs)), task.model)
    first, second = run(), run()
    return None if outputs_differ(first, second) else dict(first)


def _run_ops_task(task: OpsTask, speech: TextIO) -> None:
    """Run small models from stdin, one after another, under the runtime's own profiler."""
    import numpy as np

    send_message(speech, "ready")
    for line in _STDIN:
        asked: OpFiles = read_task(line)
        try:
            session = open_session(
                asked.model,
                threads=task.threads,
                provider=task.provider,
                profile_prefix=str(asked.model.with_suffix("")),
            )
            repeats = _run_repeatedly(session_run(session, dict(np.load(asked.inputs)), asked.model), task.effort)
            send_message(speech, "op", profile=session.end_profiling(), repeats=repeats)
        except GpuprofError as error:
            send_message(speech, "op", error=str(error))


def _run_kernels_task(task: KernelsTask, speech: TextIO) -> None:
    """Run small models from stdin, one after another, under torch.profiler, with each run in a range."""
    import numpy as np
    from torch import profiler

    kinds = profiler.supported_activities()
    send_message(speech, "ready")
    for line in _STDIN:
        asked: OpFiles = read_task(line)
        try:
            session = open_session(asked.model, threads=task.threads, provider=task.provider)
            run = session_run(session, dict(np.load(asked.inputs)), asked.model)
            # Warm-up outside of the recording: the first runs allocate and choose algorithms.
            _run_repeatedly(run, Effort(time_s=0.0, min_repeats=_WARM_UP_RUNS))

            def run_marked(run: Callable[[], object] = run) -> None:
                with profiler.record_function(task.range):
                    run()

            with profiler.profile(activities=kinds) as recording:
                repeats = _run_repeatedly(run_marked, task.effort)
            trace = asked.model.with_suffix(".trace.json")
            recording.export_chrome_trace(str(trace))
            send_message(speech, "op", trace=str(trace), repeats=repeats)
        except GpuprofError as error:
            send_message(speech, "op", error=str(error))


def _run_check_task(task: CheckTask, speech: TextIO) -> None:
    open_session(task.model, threads=1, provider=task.provider)
    send_message(speech, "done", mixed=find_mixed_output(task.model) if task.batches else None)


def _run_peak_task(task: PeakTask, speech: TextIO) -> None:
    """Time a model for each case's shapes, with inputs and outputs bound once."""
    import numpy as np
    import onnxruntime as ort

    session = open_session(task.model, threads=task.threads, provider=task.provider)
    send_message(speech, "ready")
    wait_for("go")
    best = []
    for shapes in task.cases:
        binding = session.io_binding()
        for tensor, shape in zip(session.get_inputs(), shapes, strict=True):
            binding.bind_cpu_input(tensor.name, np.full(shape, 0.5, np.float32))
        output = session.get_outputs()[0]
        held = ort.OrtValue.ortvalue_from_numpy(np.zeros(shapes[0], np.float32))
        binding.bind_ortvalue_output(output.name, held)
        best.append(_least_ns(partial(session.run_with_iobinding, binding), task.effort))
    send_message(speech, "done", least_ns=best)


def _least_ns(run: Callable[[], object], effort: Effort) -> int:
    times: list[int] = []
    end = time.monotonic() + effort.time_s
    while len(times) < effort.min_repeats or time.monotonic() < end:
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
    return min(times)


def _run_repeatedly(run: Callable[[], object], effort: Effort) -> int:
    """Run as often as given by ``effort``; return the number of runs."""
    end = time.monotonic() + effort.time_s
    most = math.inf if effort.max_repeats is None else effort.max_repeats
    repeats = 0
    while repeats < effort.min_repeats or (time.monotonic() < end and repeats < most):
        run()
        repeats += 1
    return repeats


def _warm_up(run: Callable[[], object], seconds: float) -> None:
    """Run until caches are warm and clocks have risen."""
    start = time.monotonic()
    runs = 0
    while runs < _WARM_UP_RUNS or time.monotonic() - start < seconds:
        run()
        runs += 1
        if time.monotonic() - start > _MAX_WARM_UP_S:
            return


def _measure_runs(run: Callable[[], object], task: LatencyTask) -> tuple[list[int], list[int], float]:
    """Return starts and durations in nanoseconds, and the CPU seconds used in between."""
    starts: list[int] = []
    latencies: list[int] = []
    over = _make_stopping_rule(latencies, task.limits) if task.leads else _is_stop_requested
    if task.beside_others:  # until all others are at full speed
        _warm_up(run, task.warm_up_s)
    begin = time.monotonic()
    check = begin + _CHECK_EVERY_S
    cpu = time.process_time()
    while True:
        start = time.perf_counter_ns()
        run()
        end = time.perf_counter_ns()
        starts.append(start)
        latencies.append(end - start)
        now = time.monotonic()
        # Not after every batch: asking the clock is cheap, sorting all latencies for the interval is not.
        if now >= check:
            if over(now - begin):
                break
            check = now + _CHECK_EVERY_S
    return starts, latencies, time.process_time() - cpu


def _make_stopping_rule(latencies: list[int], limits: TimingLimits) -> Callable[[float], bool]:
    def over(elapsed_s: float) -> bool:
        if len(latencies) < limits.min_repeats or elapsed_s < limits.min_time_s:
            return False
        if elapsed_s >= limits.max_time_s:
            return True
        if len(latencies) < limits.want_repeats and elapsed_s < limits.want_time_s:
            return False
        return is_median_known(sorted(latencies), limits.precision)

    return over


def _is_stop_requested(elapsed_s: float) -> bool:
    return bool(select.select([_STDIN], [], [], 0)[0])


def receive_task() -> Any:
    """Return the task in the first line on stdin."""
    return read_task(_STDIN.readline())


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    with suppress(OSError, AttributeError):  # Linux only; elsewhere a closed stdin ends us, later
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for(word: str) -> None:
    """Wait for a line on stdin, which must be ``word``; otherwise end the process."""
    line = _STDIN.readline().decode()
    if line.strip() != word:  # the parent is gone
        raise SystemExit(1)


def send_message(speech: TextIO, event: str, **content: object) -> None:
    """Send a message."""
    speech.write(json.dumps({"event": event, **content}) + "\n")
    speech.flush()


def _resident_bytes(reset_peak: bool) -> int:
    if reset_peak:
        with suppress(OSError):  # unsupported by some kernels; the peak then includes the imports
            # Reset VmHWM, the peak, to the current resident size (proc(5)).
            Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main())
