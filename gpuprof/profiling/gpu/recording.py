"""Records a model under a profiler: the program that a profiler runs, and the timelines read from its recordings.

The program runs a model a few times, each time in a range, to separate the runs from the warm-up; then again in a
session profiled by ONNX Runtime itself, which adds some microseconds a node and ties kernels to nodes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.graph.executed_graph import ExecutedNode, read_executed
from gpuprof.profiling.gpu.gpu_rows import Recording
from gpuprof.profiling.gpu.node_join import join_nodes
from gpuprof.profiling.nsight.ncu import Counters
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.timeline import RUN_RANGE, Timeline, join_kernels
from gpuprof.profiling.worker.job import WARM_UP_RUNS
from gpuprof.profiling.worker.tasks import Feeds, Resident, Run, session_run
from gpuprof.runtime.gpu_session import GpuOptions

_REPEATS = 5
#: Files of a recorded model: torch.profiler's trace of the plain runs, and of the runs with ONNX Runtime's profile; the
#: graph executed by ONNX Runtime.
KINETO, KINETO_NODES, EXECUTED = "kineto.json", "kineto_nodes.json", "executed.onnx"
#: JSON with ``profile``, ONNX Runtime's, and ``epoch_ns``, Unix time at its clock's zero; or ``error``.
INDEX = "nodes.json"
_NO_NVTX = "nvtx, which marks the runs, is not installed: pip install nvtx"


@dataclass(frozen=True, slots=True)
class Timelines:
    """Recordings of a program without the runtime's own profiler and, if possible, with it."""

    plain: Timeline
    nodes: Timeline
    executed: tuple[ExecutedNode, ...] = ()


def read_kineto(directory: Path) -> Timelines:
    """Return the timelines of `record_with_kineto`. Raises `UnreadError` when these cannot be read."""
    with describe_recording_errors():
        plain = read_json_trace(directory / KINETO).select_runs()
        return join_node_profile(directory, plain, lambda: read_json_trace(directory / KINETO_NODES).select_runs())


def join_node_profile(directory: Path, plain: Timeline, record: Callable[[], Timeline]) -> Timelines:
    """Return the plain timeline and the timeline of ``record`` with kernels tied to nodes.

    If that fails, the plain timeline replaces the second, with a note.
    """
    try:
        recorded = record()
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        if "error" in index:
            raise UnavailableError(index["error"])
        profile = replace(read_json_trace(Path(index["profile"])), epoch_ns=index["epoch_ns"])
        return Timelines(plain, join_nodes(recorded, profile), read_executed(directory / EXECUTED))
    except (GpuprofError, OSError, ValueError) as error:
        return Timelines(plain, replace(plain, notes=(*plain.notes, f"kernels are not tied to nodes: {error}")))


def run_for_recording(
    resident: Resident, model: Path, feeds: Feeds, gpu: GpuOptions | None, repeats: int = _REPEATS
) -> None:
    """Run a model some times in ranges, for another program that records; ``gpu``: options of its session."""
    run = resident.run_of(model, feeds, gpu)
    _run_marked(run, WARM_UP_RUNS, lambda name: nullcontext())
    _run_marked(run, repeats, _nvtx())


def run_nodes_for_recording(
    resident: Resident, model: Path, feeds: Feeds, directory: Path, gpu: GpuOptions | None
) -> None:
    """Run a model repeatedly, each run in a range, profiled by ONNX Runtime while an external profiler records."""
    _record_nodes(resident, model, feeds, gpu, directory, lambda: nullcontext(_nvtx()))


def record_with_kineto(resident: Resident, model: Path, feeds: Feeds, directory: Path, gpu: GpuOptions | None) -> None:
    """Record a model with torch.profiler, without and with ONNX Runtime's own profile."""
    run = resident.run_of(model, feeds, gpu)
    _run_marked(run, WARM_UP_RUNS, lambda name: nullcontext())
    with _kineto(directory / KINETO) as mark:
        _run_marked(run, _REPEATS, mark)
    del run  # release its memory before another session takes as much
    try:
        _record_nodes(resident, model, feeds, gpu, directory, lambda: _kineto(directory / KINETO_NODES))
    except GpuprofError as error:  # the plain recording remains valid
        (directory / INDEX).write_text(json.dumps({"error": str(error)}), encoding="utf-8")


def _record_nodes(
    resident: Resident, model: Path, feeds: Feeds, gpu: GpuOptions | None, directory: Path, recorder: Any
) -> None:
    """Record with ONNX Runtime's profile of its nodes, and write the profile and the executed graph.

    Without CUDA graphs, which launch the kernels of all nodes at once.
    """
    session = resident.open(model, gpu, profile_prefix=str(directory / "nodes"), optimized_path=directory / EXECUTED)
    run = session_run(session, feeds, model)
    _run_marked(run, WARM_UP_RUNS, lambda name: nullcontext())
    with recorder() as mark:
        _run_marked(run, _REPEATS, mark)
    began = session.get_profiling_start_time_ns()
    unix, monotonic = time.time_ns(), time.monotonic_ns()
    # The profile's clock differs by platform: Unix time, or time since the start of the machine.
    if abs(began - monotonic) < abs(began - unix):
        began += unix - monotonic
    (directory / INDEX).write_text(
        json.dumps({"profile": session.end_profiling(), "epoch_ns": began}), encoding="utf-8"
    )


def _run_marked(run: Run, repeats: int, mark: Callable[[str], Any]) -> None:
    for _ in range(repeats):
        with mark(RUN_RANGE):
            run()


@contextmanager
def _kineto(trace: Path) -> Iterator[Any]:
    """Record with torch.profiler into ``trace``; yield a function that marks a run."""
    try:
        import torch
        from torch import profiler
    except ImportError:
        raise UnavailableError("torch is not installed", "it brings the profiler: pip install torch") from None
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
    with profiler.profile(activities=activities) as recording:
        yield profiler.record_function
    recording.export_chrome_trace(str(trace))


def _nvtx() -> Any:
    """Return a function that opens an NVTX range by its name; without a recording tool, a function without effect."""
    try:
        import nvtx
    except ImportError:
        # A profiler waits for ranges: without them its report would hold nothing of the run.
        if "NVTX_INJECTION64_PATH" in os.environ or "NSYS_PROFILING_SESSION_ID" in os.environ:
            raise UnavailableError(_NO_NVTX) from None
        return lambda name: nullcontext()

    return nvtx.annotate


def nvtx_unavailable_reason() -> str | None:
    """Return None when runs can be marked for NVIDIA's profilers, else the reason."""
    return None if importlib.util.find_spec("nvtx") is not None else _NO_NVTX


class UnreadError(UnavailableError):
    """A profiler ran, but its output is incomplete."""


@contextmanager
def describe_recording_errors() -> Iterator[None]:
    """Turn errors in reading a local recording into errors that do not blame the model or the command line."""
    try:
        yield
    except InputError as error:
        raise UnreadError(f"cannot read what was recorded: {error.message}", error.fix) from error


def join_recording(
    timelines: Timelines | None,
    counters: Counters | None,
    tools: Mapping[str, str],
    notes: tuple[str, ...],
    lost: tuple[str, ...] = (),
) -> Recording:
    """Return the recording of a program from timelines and counters; either may be missing."""
    notes = (*notes, *lost)
    if timelines is None:
        kernels = pd.DataFrame({"name": [], "repeat": []}) if counters is None else counters.kernels.assign(repeat=0)
        return Recording(kernels, (), tools, notes, lost=lost)
    nodes, plain = timelines.nodes, timelines.plain
    kernels, unmatched = nodes.kernels, tuple[str, ...]()
    if counters is not None:
        kernels, unmatched = join_kernels(kernels, counters.kernels, counters.distinct)
        plain = replace(plain, kernels=join_kernels(plain.kernels, counters.kernels, counters.distinct)[0])
    return Recording(
        kernels,
        tuple(nodes.gpus.values()),
        tools,
        (*nodes.notes, *notes, *unmatched),
        nodes,
        plain,
        executed=timelines.executed,
        lost=lost,
    )
