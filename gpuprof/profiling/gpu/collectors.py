"""Collectors for NVIDIA GPUs: each times a model without a profiler, then records the model under a profiler.

A profiler slows the model down, and everything later in its process: all batch sizes are timed first, in resident
processes under their shares, and then recorded in others. NVML samples the GPU during the timing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

from gpuprof.errors import GpuprofError, UnavailableError, install_hint
from gpuprof.machine.gpu_share import bind_shares, describe_share_means
from gpuprof.machine.mps import LOG, add_log_tails
from gpuprof.profiling.collector import Collected
from gpuprof.profiling.cpu.ort import describe_disturbance, take_result
from gpuprof.profiling.gpu.gpu_rows import (
    Recording,
    device_rows,
    gpu_colocation_rows,
    kernel_rows,
    model_row,
    op_rows,
    timing_columns,
)
from gpuprof.profiling.gpu.nvml import NvmlFigures, NvmlSampler, driver_version, idle_figures, nvml_unavailable_reason
from gpuprof.profiling.gpu.recording import (
    Timelines,
    UnreadError,
    describe_recording_errors,
    join_node_profile,
    join_recording,
    nvtx_unavailable_reason,
    read_kineto,
    record_with_kineto,
    run_for_recording,
    run_nodes_for_recording,
)
from gpuprof.profiling.nsight.ncu import CONDITIONS, Counters, count_events
from gpuprof.profiling.nsight.nsys import export_report, read_nsys, record_program
from gpuprof.profiling.nsight.tool_process import find_tool, tool_version
from gpuprof.profiling.timeline.creq import compute_requirement
from gpuprof.profiling.timeline.timeline import Timeline
from gpuprof.profiling.worker.job import Job, Request
from gpuprof.profiling.worker.measurement import Crew, ShareBinding, Timing
from gpuprof.profiling.worker.process import Worker, task_command
from gpuprof.profiling.worker.tasks import WorkerSetup
from gpuprof.runtime.child_process import package_path
from gpuprof.runtime.gpu_probe import gpu_provider, probe_gpu
from gpuprof.runtime.gpu_session import GPU_CHOICE, GpuOptions, read_choice
from gpuprof.runtime.providers import ORT_CUDA
from gpuprof.runtime.session import has_cuda_build, runtime_version, session_settings

#: Timing of a request, and the GPU's figures meanwhile; or why there are none.
_Timed = tuple[tuple[Timing, ...], NvmlFigures] | GpuprofError


class GpuCollector:
    """Times models under NVML sampling; the subclasses add recordings by profilers.

    Attributes
    ----------
    counters : bool
        True if ncu counts.
    """

    name = "nvml"
    kinds: tuple[str, ...] = ("gpu",)
    provider = ORT_CUDA  #: Execution provider that runs the models.
    timeline: str | None = None  #: Kernel recorder: ``"nsys"``, ``"cupti"`` (torch.profiler), or None.
    counters = False

    def __init__(self) -> None:
        # By default CUDA lists the fastest GPU first: NVML would sample another GPU than the measured GPU.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        self._idle_power_w: float | None = None

    def available(self) -> str | None:
        """Return None when the GPU, the runtime and all tools are available, else the first reason."""
        reasons = [nvml_unavailable_reason(), gpu_unavailable_reason()]
        if self.timeline == "nsys":
            reasons.append(_nsys_unavailable_reason())
        if self.timeline == "cupti" and importlib.util.find_spec("torch") is None:
            reasons.append("torch, which brings its profiler, is not installed")
        if self.counters and find_tool("ncu") is None:
            reasons.append("ncu is not installed: it comes with the CUDA toolkit")
        if self.timeline == "nsys" or self.counters:
            reasons.append(nvtx_unavailable_reason())
        return next((reason for reason in reasons if reason is not None), None)

    def version(self) -> str:
        """Return the versions of the underlying tools."""
        tools = [f"{tool} {version}" for tool, version in self._tool_versions.items()]
        return ", ".join(tools) or "nvml"

    def runtime(self) -> tuple[str, str]:
        """Return name and version of the runtime."""
        return runtime_version()

    def collect(self, request: Request) -> Collected:
        """Measure a request; see `gpuprof.profiling.collector.Collector`."""
        return take_result(self.collect_batches([request]))

    def collect_batches(self, requests: Sequence[Request]) -> Iterator[Collected | UnavailableError]:
        """Measure requests that differ in the batch size in the same processes; yield the results in order.

        All are timed first, then recorded. Raises `InputError` when a model is refused or the shares do not fit;
        `UnavailableError` when a share is not available here.
        """
        idle = self._measure_idle()
        shares = [job.share for job in requests[0].jobs]
        with ExitStack() as stack:
            environments = stack.enter_context(bind_shares(requests[0].device, shares))
            bindings = [ShareBinding(self.provider, environment) for environment in environments]
            with NvmlSampler() as sampler, Crew(requests[0].jobs, bindings) as crew:
                timed = [self._time(request, crew, sampler) for request in requests]
            recorder = None
            if self.timeline == "cupti" and requests[0].records and not requests[0].beside:
                recorder = stack.enter_context(self._worker(requests[0].job, environments[0]))
            for request, measured in zip(requests, timed, strict=True):
                if isinstance(measured, UnavailableError):
                    log = environments[0].get(LOG)
                    yield add_log_tails(measured, log)
                    continue
                if isinstance(measured, GpuprofError):
                    raise measured
                try:
                    yield self._complete(request, measured, idle, bindings, recorder)
                except UnavailableError as error:
                    yield error

    def _time(self, request: Request, crew: Crew, sampler: NvmlSampler) -> _Timed:
        try:
            timings = crew.measure(request.jobs, request.limits, sampler.begin, sampler.stop)
        except GpuprofError as error:
            return error
        return timings, sampler.figures()

    def _complete(
        self,
        request: Request,
        measured: tuple[tuple[Timing, ...], NvmlFigures],
        idle: NvmlFigures,
        bindings: Sequence[ShareBinding],
        recorder: Worker | None,
    ) -> Collected:
        """Return the rows of a timed request, completed by the profilers' recordings."""
        timings, sampled = measured
        settings = self._settings(request, timings[0], sampled, [binding.environment for binding in bindings])
        if request.beside:
            delay_ms, notes = self._dispatch_beside(request, bindings, timings[0]) if self.timeline else (None, ())
            rows = gpu_colocation_rows(request, timings, sampled, delay_ms)
            notes = (*describe_disturbance(timings[0]), *_describe_options(timings), *notes)
            return Collected(colocations=rows, settings=settings, notes=notes, executions=_executions(timings))
        recorded = self._record(request, bindings[0].environment, recorder, timings[0].loaded.gpu)
        recorded = recorded.tie_to_ops(request.job.graph).estimate_occupancy(request.device)
        needed = recorded.requirement(request.device, timings[0].stats.latency_p50_ms)
        columns = timing_columns(timings[0], sampled, idle)
        return Collected(
            models=(model_row(request, needed, recorded.nodes, **columns),),
            ops=op_rows(request, recorded),
            kernels=kernel_rows(request, recorded.kernels),
            devices=device_rows(request, recorded),
            settings=settings,
            notes=(
                *describe_disturbance(timings[0]),
                *_describe_options(timings),
                *recorded.notes,
                *(needed.notes if needed else ()),
            ),
            lost=recorded.lost,
            executions=_executions(timings),
        )

    def _worker(self, job: Job, environment: Mapping[str, str]) -> Worker:
        return Worker(WorkerSetup(provider=self.provider), job.title, environment)

    def _settings(
        self, request: Request, timing: Timing, sampled: NvmlFigures, environments: Sequence[Mapping[str, str]]
    ) -> dict[str, object]:
        settings = {**session_settings(timing.part.threads, self.provider), **(CONDITIONS if self.counters else {})}
        settings |= {"limits": asdict(request.limits), "nvidia_driver": driver_version(), "clock_control": "none"}
        gpu = timing.loaded.gpu
        return settings | {
            GPU_CHOICE: read_choice(),
            "gpu_options": None if gpu is None else asdict(gpu),
            "power": sampled.power_source,
            "temperature_c": sampled.temperature_c,
            "share_by": describe_share_means(environments),
        }

    def _measure_idle(self) -> NvmlFigures:
        """Return the memory held by other processes, and the least power sampled: a GPU cools down for some seconds."""
        idle = idle_figures()
        powers = [power for power in (idle.power_w, self._idle_power_w) if power is not None]
        self._idle_power_w = min(powers, default=None)
        return replace(idle, power_w=self._idle_power_w)

    @cached_property
    def _tool_versions(self) -> dict[str, str]:
        versions: dict[str, str | None] = {}
        if self.timeline == "nsys" and (nsys := find_tool("nsys")):
            versions["nsys"] = tool_version(nsys)
        if self.timeline == "cupti":
            versions["torch"] = importlib.metadata.version("torch")
        if self.counters and (ncu := find_tool("ncu")):
            versions["ncu"] = tool_version(ncu)
        return {tool: version or "unknown" for tool, version in versions.items()}

    def _record(
        self, request: Request, environment: Mapping[str, str], recorder: Worker | None, gpu: GpuOptions | None
    ) -> Recording:
        """Return the profilers' recording of a job; empty if it is only timed."""
        if not request.records:
            return join_recording(None, None, self._tool_versions, ())
        counts: Counters | None = None
        notes, missing = tuple[str, ...](), tuple[str, ...]()
        with tempfile.TemporaryDirectory(prefix="gpuprof-") as name:
            directory = Path(name)
            timelines, unseen = self._timelines_if_seen(request, directory, environment, recorder, gpu)
            if self.counters:
                counts, notes, missing = self._count_kernels(request, directory, environment, gpu)
        return join_recording(timelines, counts, self._tool_versions, (*unseen, *notes), missing)

    def _timelines_if_seen(
        self,
        request: Request,
        directory: Path,
        environment: Mapping[str, str],
        recorder: Worker | None,
        gpu: GpuOptions | None,
    ) -> tuple[Timelines | None, tuple[str, ...]]:
        """Return the timelines, and notes; under a share or in a worker, a failed recording is skipped."""
        if not self.timeline:
            return None, ()
        job, limits = request.job, request.limits
        try:
            if recorder is not None:
                recorder.send(record_with_kineto, job.path, job.inputs(), directory, gpu)
                recorder.receive(limits.tool_s)
                return read_kineto(directory), ()
            plain = self._nsys_timeline(request, directory, environment, gpu, with_nodes=False)
            record = lambda: self._nsys_timeline(request, directory, environment, gpu, with_nodes=True)  # noqa: E731
            return join_node_profile(directory, plain, record), ()
        except UnavailableError as error:
            if recorder is None and not (environment and isinstance(error, UnreadError)):
                raise
            return None, (f"no kernels{' under the share' if environment else ''}: {error}",)

    def _dispatch_beside(
        self, request: Request, bindings: Sequence[ShareBinding], timing: Timing
    ) -> tuple[float | None, tuple[str, ...]]:
        """Return the time per batch in which the device waits for launches beside neighbours (iGniter, eq. 6)."""
        environment, gpu = bindings[0].environment, timing.loaded.gpu
        with (
            tempfile.TemporaryDirectory(prefix="gpuprof-") as name,
            Crew(request.beside, bindings[1:]) as neighbours,
            neighbours.keep_running(request.beside, request.limits),
        ):
            try:
                if self.timeline == "cupti":
                    with self._worker(request.job, environment) as worker:
                        worker.call(record_with_kineto, request.job.path, request.job.inputs(), Path(name), gpu)
                    plain = read_kineto(Path(name)).plain
                else:
                    plain = self._nsys_timeline(request, Path(name), environment, gpu, with_nodes=False)
            except UnreadError as error:
                return None, (f"no kernels under the share: {error}",)
        needed = compute_requirement(plain.kernels, plain, None, timing.stats.latency_p50_ms)
        return (None, ()) if needed is None else (needed.dispatch_ms, needed.notes)

    def _nsys_timeline(
        self,
        request: Request,
        directory: Path,
        environment: Mapping[str, str],
        gpu: GpuOptions | None,
        with_nodes: bool,
    ) -> Timeline:
        """Record the program with nsys, by itself or with ONNX Runtime's own profile of its nodes."""
        job, report = request.job, directory / ("with_nodes" if with_nodes else "plain")
        setup = WorkerSetup(provider=self.provider)
        file, model, feeds = report.with_suffix(".task"), job.path.absolute(), job.inputs()
        if with_nodes:
            command = task_command(file, setup, run_nodes_for_recording, model, feeds, directory, gpu)
        else:
            command = task_command(file, setup, run_for_recording, model, feeds, gpu)
        bound = {**package_path(), **environment}
        recording = record_program(command, report, time_limit_s=request.limits.tool_s, environment=bound)
        with describe_recording_errors(), export_report(recording) as sqlite:
            return read_nsys(sqlite).select_runs()

    def _count_kernels(
        self, request: Request, directory: Path, environment: Mapping[str, str], gpu: GpuOptions | None
    ) -> tuple[Counters | None, tuple[str, ...], tuple[str, ...]]:
        """Return the counters, notes, and the reasons for missing counters; for all only if a timeline exists."""
        job, setup = request.job, WorkerSetup(provider=self.provider)
        task, gpu = directory / "count.task", None if gpu is None else gpu.without_graphs()
        # ncu selects kernels by their range, and replays every kernel for each set of counters: a single run.
        command = task_command(task, setup, run_for_recording, job.path.absolute(), job.inputs(), gpu, repeats=1)
        bound = {**package_path(), **environment}
        try:
            with describe_recording_errors():
                counts, notes = count_events(command, directory, time_limit_s=request.limits.tool_s, environment=bound)
                return counts, notes, counts.notes
        except UnavailableError as error:
            if not self.timeline:
                raise
            return None, (), (f"no counters: {error}",)


class NsysNcuCollector(GpuCollector):
    """Kernels in time by nsys, counters by ncu, joined kernel by kernel."""

    name, timeline, counters = "nsys+ncu", "nsys", True


class CuptiNcuCollector(GpuCollector):
    """Kernels in time by torch.profiler, counters by ncu, joined kernel by kernel."""

    name, timeline, counters = "cupti+ncu", "cupti", True


class NsysCollector(GpuCollector):
    """Kernels in time, by Nsight Systems."""

    name, timeline = "nsys", "nsys"


class CuptiCollector(GpuCollector):
    """Kernels in time, by torch.profiler, which reads the same CUPTI records without nsys."""

    name, timeline = "cupti", "cupti"


class NcuCollector(GpuCollector):
    """Counters of each kernel, by Nsight Compute; not their order in time."""

    name, counters = "ncu", True


def _executions(timings: Sequence[Timing]) -> tuple[str | None, ...]:
    return tuple(timing.loaded.gpu.execution if timing.loaded.gpu else None for timing in timings)


def _describe_options(timings: Sequence[Timing]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(remark for timing in timings for remark in timing.loaded.remarks))


def gpu_unavailable_reason() -> str | None:
    """Return None when ONNX Runtime can use a GPU here, else the reason in a line."""
    if gpu_provider() is not None:
        return None
    if importlib.util.find_spec("onnxruntime") is None:
        return f"onnxruntime is not installed: {install_hint('gpu')}"
    if has_cuda_build():
        return probe_gpu().reason
    return f"this onnxruntime has no {ORT_CUDA}: pip install 'onnxruntime-gpu[cuda,cudnn]' in place of onnxruntime"


def _nsys_unavailable_reason() -> str | None:
    binary = find_tool("nsys")
    if binary is None:
        return "nsys is not installed: apt-get install nsight-systems"
    return None if tool_version(binary) else f"{binary} does not run"
