"""The program that a profiler records: ``python -m gpuprof.profiling.gpu.recorded_run TASK.json``.

It runs a model a few times, each time in a range of its own, so that what belongs to which run stands in the report
and warm-up can be told apart. With ``kineto`` in its task it is its own profiler: it records once without further
ranges (``kineto``), and where PyTorch runs the model once more with one around each node (``kineto_nodes``), which
ties kernels to nodes and takes some microseconds each. With ``only_runs`` no range is opened within those of the runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.profiling.child.runner import Run, nvtx_unavailable_reason, open_run, outputs_differ
from gpuprof.profiling.child.task import RecordedTask, read_task
from gpuprof.profiling.timeline.timeline import RUN_RANGE
from gpuprof.runtime.providers import TORCH_PROVIDERS


def main(arguments: list[str]) -> int:
    """Do the task in the file; what went wrong stands on stderr as one line."""
    try:
        record_model(read_task(Path(arguments[0]).read_text(encoding="utf-8")))
    except GpuprofError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


class _Ranges:
    """Opens a profiler's range around a node while it is on."""

    def __init__(self, open_range: Any) -> None:
        self._open = open_range
        self.on = True

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        opened: AbstractContextManager[Any] = self._open(name) if self.on else nullcontext()
        return opened


def record_model(task: RecordedTask) -> None:
    """Run the task's model as its profiler wants it, and leave the traces and outputs that the task asks for."""
    import numpy as np

    feeds = dict(np.load(task.inputs))
    open_range = None if task.only_runs else _torch_ranges() if task.kineto else _nvtx()
    ranges = None if open_range is None else _Ranges(open_range)
    run = open_run(task.model, feeds, task.provider, task.threads, ranges)
    for _ in range(task.warm_up):
        run()
    if ranges is not None and task.kineto:
        # The first recording without ranges around nodes, which take microseconds each: the model's times are from it.
        ranges.on = False
    with _kineto(task.kineto) as marked:
        first, last = _runs(run, task.repeats, marked)
    if ranges is not None and task.kineto_nodes and task.provider in TORCH_PROVIDERS:
        ranges.on = True
        with _kineto(task.kineto_nodes) as marked:
            _runs(run, task.repeats, marked)
    # What answers differently from run to run cannot be compared with another one's answers.
    if task.outputs and outputs_differ(first, last) is None:
        np.savez(task.outputs, allow_pickle=False, **last)


def _runs(run: Run, repeats: int, marked: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    first_and_last: list[Mapping[str, Any]] = []
    for _ in range(repeats):
        with marked(RUN_RANGE):
            outputs = run()
        first_and_last = [*first_and_last[:1], outputs]
    return first_and_last[0], first_and_last[-1]


@contextmanager
def _kineto(trace: Path | None) -> Iterator[Any]:
    """Give what marks a run: a range of torch.profiler's, whose trace goes to ``trace``, or one of NVTX's."""
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


def _torch_ranges() -> Any:
    """Return what opens a range of torch.profiler by its name; nothing where it is not installed."""
    try:
        from torch import profiler
    except ImportError:
        return None
    return profiler.record_function


def _nvtx() -> Any:
    """Return what opens an NVTX range by its name; nothing where the tool that would record it is not around."""
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
