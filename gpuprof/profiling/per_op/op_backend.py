"""Backends that run single ops and read their times: on the CPU from ONNX Runtime's profile, on a GPU from CUPTI's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError
from gpuprof.kernel_db.schema import PER_OP, KernelRow
from gpuprof.machine.gpu_share import bind_shares
from gpuprof.profiling.cpu.node_times import SKIPPED_REPEATS, NodeEvent, read_node_events
from gpuprof.profiling.cpu.op_rows import node_kernel
from gpuprof.profiling.gpu.gpu_rows import kernel_rows
from gpuprof.profiling.gpu.recording import trace_op
from gpuprof.profiling.per_op.op_model import OpSource
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.launch_occupancy import ESTIMATED, with_occupancy
from gpuprof.profiling.worker.job import Job, Request
from gpuprof.profiling.worker.measurement import share_worker, slices_of
from gpuprof.profiling.worker.process import Worker
from gpuprof.profiling.worker.tasks import Effort, Feeds, WorkerSetup, profile_nodes
from gpuprof.runtime.providers import ORT_CPU, ORT_CUDA
from gpuprof.runtime.session import session_settings

EFFORT = Effort(time_s=0.15, min_repeats=7, max_repeats=200)
#: Fewer repeats than on a CPU: only kernels of a single repeat are kept, but a trace holds all of them.
GPU_EFFORT = Effort(time_s=0.05, min_repeats=7, max_repeats=30)
#: Nodes that change the layout for a lone op; within a model they are rare.
_LAYOUT = {"ReorderInput", "ReorderOutput"}


@dataclass(frozen=True, slots=True)
class Observation:
    """Measurement of an op."""

    times_ns: tuple[int, ...] = ()  #: Time of each repeat without warm-up; empty for ops not executed.
    kernels: tuple[KernelRow, ...] = ()  #: Kernels of the last repeat, without the id of their run.
    note: str | None = None  #: Reason for a missing time, or a caveat for readers.


class OpBackend(Protocol):
    """Runs single ops under a share of a device."""

    @property
    def provider(self) -> str:
        """Execution provider that runs the ops."""

    def settings(self) -> dict[str, object]:
        """Return the settings that affect the figures."""

    def start(self) -> AbstractContextManager[Worker]:
        """Yield a worker held to the share."""

    def measure(self, worker: Worker, source: OpSource, model: Path, feeds: Feeds) -> Observation:
        """Return the observation of an op, run as the single-op ``model``.

        Raises `GpuprofError` when the op cannot be run, or ends the worker.
        """


def op_backend(device: Device, share: Share) -> OpBackend:
    """Return the backend for a device.

    Raises `UnavailableError` for a GPU without PyTorch, whose profiler sees the kernels of any runtime in its process.
    """
    if device.kind == "cpu":
        return CpuOpBackend(device, share)
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError(
            "ops on a GPU are timed by torch.profiler, and torch is not installed", "pip install torch"
        )
    return GpuOpBackend(device, share)


@dataclass(frozen=True)
class CpuOpBackend:
    """Cores of this machine, and ONNX Runtime's own profile."""

    device: Device
    share: Share

    @property
    def provider(self) -> str:
        """ONNX Runtime's own kernels."""
        return ORT_CPU

    def settings(self) -> dict[str, object]:
        """Return the session's settings and how often each op is repeated."""
        return {**session_settings(slices_of([self.share])[0].threads), "effort": asdict(EFFORT)}

    def start(self) -> AbstractContextManager[Worker]:
        """Yield a worker held to its cores."""
        return share_worker(self.share, "ops")

    def measure(self, worker: Worker, source: OpSource, model: Path, feeds: Feeds) -> Observation:
        """Return the time between the op's nodes; changes of layout that only a lone op needs are left out."""
        trace = _events(worker.call(profile_nodes, model, feeds, model.parent, EFFORT))
        if not trace:
            return Observation(note="not executed: the runtime drops it")
        last = [event for event in trace if event.repeat == max(e.repeat for e in trace)]
        layout = sum(event.duration_ns for event in last if event.op_type in _LAYOUT)
        request = _request(source, self.device, self.share)
        rows = tuple(node_kernel(request, event, position, source.op) for position, event in enumerate(last))
        return Observation(
            _sums(trace), _name_ops(rows, source), f"changes of layout, {layout} ns, left out" if layout else None
        )


@dataclass(frozen=True)
class GpuOpBackend:
    """A share of a GPU, with torch.profiler, which records kernels of any runtime in the process."""

    device: Device
    share: Share

    @property
    def provider(self) -> str:
        """Execution provider that runs the ops."""
        return ORT_CUDA

    def settings(self) -> dict[str, object]:
        """Return the session's settings and how often each op is repeated."""
        return {**session_settings(1, self.provider), "effort": asdict(GPU_EFFORT), "occupancy": ESTIMATED}

    @contextmanager
    def start(self) -> Iterator[Worker]:
        """Yield a worker bound to its share by MPS or MIG."""
        with (
            bind_shares(self.device, [self.share]) as (environment,),
            Worker(WorkerSetup(provider=self.provider), "ops", environment) as worker,
        ):
            yield worker

    def measure(self, worker: Worker, source: OpSource, model: Path, feeds: Feeds) -> Observation:
        """Return the sums of the op's kernels: launch time on the CPU is not part of the op's time on the device."""
        path: Path = worker.call(trace_op, model, feeds, GPU_EFFORT)
        try:
            timeline = read_json_trace(path, expect_kernels=False).select_runs()
        except InputError as error:
            return Observation(note=f"not measured: {error}")
        finally:
            path.unlink(missing_ok=True)
        if not len(timeline.kernels):
            return Observation(note="no kernel: the runtime drops it, or only changes a shape")
        sums = timeline.kernels.groupby("repeat")["duration_ns"].sum().sort_index()
        times = tuple(int(value) for value in sums.tolist())
        last = timeline.kernels[timeline.kernels["repeat"] == timeline.kernels["repeat"].max()].assign(repeat=0)
        kernels, _ = with_occupancy(last.reset_index(drop=True), self.device)
        rows = kernel_rows(_request(source, self.device, self.share), kernels)
        return Observation(times[SKIPPED_REPEATS:] or times, _name_ops(rows, source))


def _request(source: OpSource, device: Device, share: Share) -> Request:
    alone = ModelGraph(PER_OP, source.batch, (source.op,), (), source.op.outputs, source.op.weights, 0, "", "")
    return Request("", datetime.min, device, Job(alone, source.path, share))


def _name_ops(rows: Sequence[KernelRow], source: OpSource) -> tuple[KernelRow, ...]:
    return tuple(replace(row, op_name=f"{source.model}:{source.op.name}") for row in rows)


def _events(profile: Path) -> tuple[NodeEvent, ...]:
    try:
        return read_node_events(profile)
    except InputError:  # a whole profile without a node: the runtime has dropped the op
        return ()
    finally:
        profile.unlink(missing_ok=True)


def _sums(trace: Sequence[NodeEvent]) -> tuple[int, ...]:
    """Return the op's time in each run of its model, warm-up left out."""
    times: dict[int, int] = {}
    for event in trace:
        if event.op_type not in _LAYOUT:
            times[event.repeat] = times.get(event.repeat, 0) + event.duration_ns
    repeats = sorted(times)[SKIPPED_REPEATS:] or sorted(times)
    return tuple(times[repeat] for repeat in repeats)
