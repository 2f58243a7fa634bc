"""Program recorded by a profiler: ``python -m gpuprof.profiling.gpu.recorded_run TASK.json``.

The program runs a model a few times, each time in a range, to separate the runs from the warm-up. With ``kineto`` in
its task it records itself with torch.profiler. With ``nodes`` it repeats the runs in a session profiled by ONNX Runtime
itself, which adds some microseconds a node and ties kernels to nodes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.profiling.child.runner import Run, nvtx_unavailable_reason, open_run, outputs_differ, session_run
from gpuprof.profiling.child.task import RecordedTask, read_task
from gpuprof.profiling.gpu.timelines import NodeFiles
from gpuprof.profiling.timeline.timeline import RUN_RANGE
from gpuprof.runtime.session import open_session


def main(arguments: list[str]) -> int:
    """Run the task in the file; an error is printed on stderr as a line."""
    try:
        record_model(read_task(Path(arguments[0]).read_text(encoding="utf-8")))
    except GpuprofError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def record_model(task: RecordedTask) -> None:
    """Run the task's model under its profiler, and write the requested traces and outputs."""
    import numpy as np

    feeds = dict(np.load(task.inputs))
    if not task.only_nodes:
        run = open_run(task.model, feeds, task.provider, task.threads)
        for _ in range(task.warm_up):
            run()
        with _kineto(task.kineto) as marked:
            first, last = _runs(run, task.repeats, marked)
        # Outputs that differ between runs cannot be compared with those of another program.
        if task.outputs and outputs_differ(first, last) is None:
            np.savez(task.outputs, allow_pickle=False, **last)
        del run  # release its memory before another session takes as much
    if task.nodes is not None:
        files = NodeFiles(task.nodes)
        try:
            _record_nodes(task, files, feeds)
        except GpuprofError as error:  # the plain recording remains valid
            files.index.write_text(json.dumps({"error": str(error)}), encoding="utf-8")


def _record_nodes(task: RecordedTask, files: NodeFiles, feeds: Mapping[str, Any]) -> None:
    """Record again with ONNX Runtime's profile of its nodes, and write the profile and the executed graph."""
    session = open_session(
        task.model,
        threads=task.threads,
        provider=task.provider,
        profile_prefix=str(files.prefix),
        optimized_path=files.executed,
    )
    run = session_run(session, feeds, task.model)
    for _ in range(task.warm_up):
        run()
    with _kineto(task.kineto_nodes) as marked:
        _runs(run, task.repeats, marked)
    began = session.get_profiling_start_time_ns()
    unix, monotonic = time.time_ns(), time.monotonic_ns()
    # The profile's clock differs by platform: Unix time, or time since the start of the machine.
    if abs(began - monotonic) < abs(began - unix):
        began += unix - monotonic
    files.index.write_text(json.dumps({"profile": session.end_profiling(), "epoch_ns": began}), encoding="utf-8")


def _runs(run: Run, repeats: int, marked: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    first_and_last: list[Mapping[str, Any]] = []
    for _ in range(repeats):
        with marked(RUN_RANGE):
            outputs = run()
        first_and_last = [*first_and_last[:1], outputs]
    return first_and_last[0], first_and_last[-1]


@contextmanager
def _kineto(trace: Path | None) -> Iterator[Any]:
    """Yield a function that marks a run: a range of torch.profiler, with its trace in ``trace``, or an NVTX range."""
    if trace is None:
        yield _nvtx()
        return
    try:
        import torch
        from torch import profiler
    except ImportError:
        raise UnavailableError("torch is not installed", "it brings the profiler: pip install torch") from None
    wanted = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        wanted.append(profiler.ProfilerActivity.CUDA)
    with profiler.profile(activities=wanted) as recording:
        yield profiler.record_function
    recording.export_chrome_trace(str(trace))


def _nvtx() -> Any:
    """Return a function that opens an NVTX range by its name; without a recording tool, a function without effect."""
    try:
        import nvtx
    except ImportError:
        if (reason := nvtx_unavailable_reason()) is None:
            return _torch_nvtx
        # A profiler waits for ranges: without them its report would hold nothing of the run.
        if "NVTX_INJECTION64_PATH" in os.environ or "NSYS_PROFILING_SESSION_ID" in os.environ:
            raise UnavailableError(reason) from None
        return lambda name: nullcontext()

    return nvtx.annotate


@contextmanager
def _torch_nvtx(name: str) -> Iterator[None]:
    """Open a range by PyTorch's own binding; its ``range`` would take a name for a format, its push does not."""
    from torch.cuda import nvtx

    nvtx.range_push(name)
    try:
        yield
    finally:
        nvtx.range_pop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
