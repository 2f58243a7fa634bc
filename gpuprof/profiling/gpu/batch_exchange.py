"""The parent's messages to the process that measures all batch sizes (`gpuprof.profiling.gpu.batch_process`)."""

from __future__ import annotations

from gpuprof.errors import GpuprofError
from gpuprof.profiling.child.children import Child
from gpuprof.profiling.child.job import Request
from gpuprof.profiling.child.measurement import Timing, timing_of
from gpuprof.profiling.gpu.nvml import NvmlFigures, NvmlSampler

_LOAD_S = 600.0


def time_batch(child: Child, sampler: NvmlSampler, request: Request) -> tuple[Timing, NvmlFigures] | GpuprofError:
    """Return the timing of a process's next batch size, or the error of a batch that cannot run."""
    try:
        ready = child.expect("ready", _LOAD_S)
        sampler.begin()
        child.tell("go")
        child.expect("timed", request.limits.max_time_s + request.limits.hang_s)
        sampler.stop()
        sampled = sampler.figures()
        done = child.expect("done", request.limits.hang_s)
    except GpuprofError as error:
        return error
    return timing_of(request.job, done, request.limits, ready["sms"]), sampled


def record_batch(child: Child, within_s: float) -> GpuprofError | None:
    """Wait until a process has recorded its next batch size; return the error if the recording failed."""
    try:
        child.expect("recorded", within_s)
    except GpuprofError as error:
        return error
    return None
