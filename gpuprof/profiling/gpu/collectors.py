"""Collectors for NVIDIA GPUs: each times a model without a profiler, then records the model under a profiler.

A profiler slows the model down, so timing and recording are separate passes, one after another under the same share.
NVML samples the GPU during the timing.
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
from typing import Any

from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.machine.gpu_share import bind_shares, describe_share_means
from gpuprof.machine.mps import LOG, add_log_tails
from gpuprof.profiling.child.children import Child
from gpuprof.profiling.child.job import Request, TimingLimits
from gpuprof.profiling.child.measurement import GPU_WARM_UP_S, ShareBinding, Timing, keep_running, label, measure
from gpuprof.profiling.child.runner import gpu_unavailable_reason, nvtx_unavailable_reason
from gpuprof.profiling.child.task import BatchesTask, BatchTasks, LatencyTask, RecordedTask
from gpuprof.profiling.collector import Collected
from gpuprof.profiling.gpu.batch_exchange import record_batch, time_batch
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
from gpuprof.profiling.gpu.timelines import (
    NodeFiles,
    Timelines,
    UnreadError,
    describe_recording_errors,
    join_recording,
)
from gpuprof.profiling.nsight.ncu_report import Counters
from gpuprof.profiling.nsight.ncu_tool import CONDITIONS, count_events, find_ncu
from gpuprof.profiling.nsight.nsys_report import read_nsys
from gpuprof.profiling.nsight.nsys_tool import export_report, find_nsys, record_program
from gpuprof.profiling.nsight.recorded_program import RecordedProgram
from gpuprof.profiling.nsight.shared_outputs import SharedOutputs
from gpuprof.profiling.nsight.tool_process import tool_version
from gpuprof.profiling.timeline.creq import compute_requirement
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.timeline import Timeline
from gpuprof.runtime.providers import ORT_CUDA
from gpuprof.runtime.session import runtime_version, session_settings

#: Counters of a kernel are the same in each run, and ncu replays every kernel for each set of counters.
_COUNTED_REPEATS = 1
_BATCH_PROCESS = "gpuprof.profiling.gpu.batch_process"
#: Duration of sampling an idle GPU: once for its power, and before each run for memory held by others.
_IDLE_S, _GLANCE_S = 1.0, 0.1


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
        self._outputs = SharedOutputs()

    def available(self) -> str | None:
        """Return None when the GPU, the runtime and all tools are available, else the first reason."""
        reasons = [nvml_unavailable_reason(), gpu_unavailable_reason()]
        if self.timeline == "nsys":
            reasons.append(_nsys_unavailable_reason())
        if self.timeline == "cupti" and importlib.util.find_spec("torch") is None:
            reasons.append("torch, which brings its profiler, is not installed")
        if self.counters and (find_ncu() is None):
            reasons.append("ncu is not installed: it comes with the CUDA toolkit")
        if self.timeline == "nsys" or self.counters:
            reasons.append(nvtx_unavailable_reason())
        return next((reason for reason in reasons if reason is not None), None)

    def version(self) -> str:
        """Return the versions of the underlying tools."""
        found = [f"{tool} {version}" for tool, version in self._tool_versions.items()]
        return ", ".join(found) or "nvml"

    def runtime(self) -> tuple[str, str]:
        """Return name and version of the runtime."""
        return runtime_version()

    def collect(self, request: Request) -> Collected:
        """Measure a request; see `gpuprof.profiling.collector.Collector`."""
        jobs = (request.job, *request.beside)
        idle = self._measure_idle()
        shares = [job.share for job in jobs]
        with bind_shares(request.device, shares) as environments, NvmlSampler() as sampler:
            bindings = [ShareBinding(self.provider, environment) for environment in environments]
            timings = measure(request.job, request.beside, request.limits, bindings, sampler.begin, sampler.stop)
            sampled = sampler.figures()
            settings = self._settings(request, timings[0], sampled, environments)
            if request.beside:
                latency_ms = timings[0].stats.latency_p50_ms
                delay_ms, notes = self._dispatch_beside(request, bindings, latency_ms) if self.timeline else (None, ())
                rows = gpu_colocation_rows(request, timings, sampled, delay_ms)
                return Collected(colocations=rows, settings=settings, notes=notes)
            recorded, error = self._record(request, environments[0])
        columns = timing_columns(timings[0], sampled, idle)
        return self._make_rows(request, timings[0], columns, recorded, error, settings)

    @property
    def can_measure_batches_together(self) -> bool:
        """Return whether `collect_batches` can replace `collect`: external tools need a process per batch."""
        return not self.counters and self.timeline in (None, "cupti")

    def collect_batches(self, requests: Sequence[Request]) -> Iterator[Collected | GpuprofError]:
        """Measure requests for a model under a share, alone, in a single process; yield the results in order.

        All batches are timed first, then recorded (`gpuprof.profiling.gpu.batch_process`). Raises `InputError` or
        `UnavailableError` when the share is not available here.
        """
        idle = self._measure_idle()
        first = requests[0]
        with ExitStack() as stack:
            (environment,) = stack.enter_context(bind_shares(first.device, [first.job.share]))
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuprof-")))
            sampler = stack.enter_context(NvmlSampler())
            programs = [self._program(one, directory / str(place)) for place, one in enumerate(requests)]
            rows = [self._batch_tasks(program, first.limits, bool(environment)) for program in programs]
            task = BatchesTask(provider=self.provider, rows=rows)
            said = label(first.job)
            child = stack.enter_context(Child(task, said, environment=environment or None, module=_BATCH_PROCESS))
            timed = [time_batch(child, sampler, one) for one in requests]
            # After the last timing; the process waits for this line (`batch_process`).
            child.tell("record")
            for request, program, timed_batch in zip(requests, programs, timed, strict=True):
                unrecorded = record_batch(child, request.limits.tool_s)
                if isinstance(timed_batch, GpuprofError):
                    log = environment.get(LOG)
                    yield add_log_tails(timed_batch, log) if isinstance(timed_batch, UnavailableError) else timed_batch
                    continue
                timing, sampled = timed_batch
                settings = self._settings(request, timing, sampled, [environment])
                recorded, error = self._read_batch(request, program, unrecorded, bool(environment))
                yield self._make_rows(request, timing, timing_columns(timing, sampled, idle), recorded, error, settings)

    def _program(self, request: Request, directory: Path) -> RecordedProgram:
        directory.mkdir()
        return RecordedProgram(request.job, directory, self.provider, request.limits.tool_s)

    def _batch_tasks(self, program: RecordedProgram, limits: TimingLimits, shared: bool) -> BatchTasks:
        recorded = program.task
        if self.timeline:
            plain, with_nodes = _kineto_files(program)
            recorded = replace(recorded, kineto=plain, kineto_nodes=with_nodes, nodes=program.directory)
        if shared:
            recorded = replace(recorded, outputs=program.outputs("shared"))
        timed = LatencyTask(
            provider=self.provider,
            model=recorded.model,
            inputs=recorded.inputs,
            limits=limits,
            leads=True,
            beside_others=False,
            warm_up_s=GPU_WARM_UP_S,
        )
        return BatchTasks(timed=timed, recorded=recorded if self.timeline or shared else None)

    def _read_batch(
        self, request: Request, program: RecordedProgram, unrecorded: GpuprofError | None, shared: bool
    ) -> tuple[Recording, str | None]:
        """Return the recording of a batch size, and the difference of its outputs under the share."""
        error = self._outputs.difference(request.job, program, program.outputs("shared")) if shared else None
        if not self.timeline:
            return join_recording(None, None, self._tool_versions, ()), error
        try:
            if unrecorded is not None:
                raise unrecorded
            with describe_recording_errors():
                timelines = self._read_kineto(program)
        except GpuprofError as failure:
            return join_recording(None, None, self._tool_versions, (f"no kernels: {failure}",)), error
        return join_recording(timelines, None, self._tool_versions, ()), error

    def _settings(
        self, request: Request, timing: Timing, sampled: NvmlFigures, environments: Sequence[Mapping[str, str]]
    ) -> dict[str, object]:
        settings = {**session_settings(timing.part.threads, self.provider), **(CONDITIONS if self.counters else {})}
        settings |= {"limits": asdict(request.limits), "nvidia_driver": driver_version(), "clock_control": "none"}
        return settings | {"power": sampled.power_source, "share_by": describe_share_means(environments)}

    def _make_rows(
        self,
        request: Request,
        timing: Timing,
        columns: dict[str, Any],
        recorded: Recording,
        error: str | None,
        settings: dict[str, object],
    ) -> Collected:
        recorded = recorded.tie_to_ops(request.job.graph).estimate_occupancy(request.device)
        needed = recorded.requirement(request.device, timing.stats.latency_p50_ms)
        return Collected(
            models=(model_row(request, needed, recorded.nodes, **columns, error=error),),
            ops=op_rows(request, recorded),
            kernels=kernel_rows(request, recorded.kernels),
            devices=device_rows(request, recorded),
            settings=settings,
            notes=(*recorded.notes, *(needed.notes if needed else ())),
            lost=recorded.lost,
        )

    def _measure_idle(self) -> NvmlFigures:
        """Return the memory held by other processes, and the least power seen: a GPU cools down for some seconds."""
        seen = idle_figures(seconds=_IDLE_S if self._idle_power_w is None else _GLANCE_S)
        known = [power for power in (seen.power_w, self._idle_power_w) if power is not None]
        self._idle_power_w = min(known, default=None)
        return replace(seen, power_w=self._idle_power_w)

    @cached_property
    def _tool_versions(self) -> dict[str, str]:
        versions: dict[str, str | None] = {}
        if self.timeline == "nsys" and (nsys := find_nsys()):
            versions["nsys"] = tool_version(nsys)
        if self.timeline == "cupti":
            versions["torch"] = importlib.metadata.version("torch")
        if self.counters and (ncu := find_ncu()):
            versions["ncu"] = tool_version(ncu)
        return {tool: version or "unknown" for tool, version in versions.items()}

    def _record(self, request: Request, environment: Mapping[str, str]) -> tuple[Recording, str | None]:
        """Return the profilers' recording of a process, and the difference of its outputs under the share."""
        with tempfile.TemporaryDirectory(prefix="gpuprof-") as name:
            directory = Path(name)
            program = RecordedProgram(request.job, directory, self.provider, request.limits.tool_s)
            shared = program.outputs("shared")
            task = replace(program.task, outputs=shared) if environment else program.task
            if environment and not self.timeline:
                program.run(environment, task)
            bound = {**program.path, **environment}
            timelines, unseen = self._timelines_if_seen(program, task, bound, bool(environment))
            error = self._outputs.difference(request.job, program, shared) if environment else None
            counted, notes, lost = self._count_kernels(program, bound) if self.counters else (None, (), ())
        return join_recording(timelines, counted, self._tool_versions, (*unseen, *notes), lost), error

    def _timelines_if_seen(
        self,
        program: RecordedProgram,
        task: RecordedTask,
        environment: Mapping[str, str],
        shared: bool,
        with_nodes: bool = True,
    ) -> tuple[Timelines | None, tuple[str, ...]]:
        """Return the timelines, and notes; under a share a recording that a profiler cannot make is left out."""
        if not self.timeline:
            return None, ()
        try:
            return self._timelines(program, task, environment, with_nodes), ()
        except UnreadError as error:
            if not shared:
                raise
            return None, (f"no kernels under the share: {error}",)

    def _dispatch_beside(
        self, request: Request, bindings: Sequence[ShareBinding], latency_ms: float
    ) -> tuple[float | None, tuple[str, ...]]:
        """Return a batch's time in which the device waits for launches while the neighbours run (iGniter, eq. 6)."""
        with tempfile.TemporaryDirectory(prefix="gpuprof-") as name:
            program = RecordedProgram(request.job, Path(name), self.provider, request.limits.tool_s)
            bound = {**program.path, **bindings[0].environment}
            with keep_running(request.beside, bindings[1:], request.limits):
                timelines, unseen = self._timelines_if_seen(program, program.task, bound, True, with_nodes=False)
        if timelines is None:
            return None, unseen
        needed = compute_requirement(timelines.plain.kernels, timelines.plain, None, latency_ms)
        return (None, ()) if needed is None else (needed.dispatch_ms, needed.notes)

    def _timelines(
        self, program: RecordedProgram, task: RecordedTask, environment: Mapping[str, str], with_nodes: bool
    ) -> Timelines:
        """Record the plain program, and again with ONNX Runtime's own profile of its nodes."""
        nodes = program.directory if with_nodes else None
        if self.timeline == "cupti":
            plain_file, nodes_file = _kineto_files(program)
            program.run(environment, replace(task, kineto=plain_file, kineto_nodes=nodes_file, nodes=nodes))
            with describe_recording_errors():
                return self._read_kineto(program)
        plain = self._nsys_timeline(program, task, environment, "plain")
        if nodes is None:
            return Timelines(plain, plain)
        again = replace(program.task, nodes=nodes, only_nodes=True)
        return NodeFiles(nodes).join(plain, lambda: self._nsys_timeline(program, again, environment, "nodes"))

    def _read_kineto(self, program: RecordedProgram) -> Timelines:
        plain_file, nodes_file = _kineto_files(program)
        plain = read_json_trace(plain_file).select_runs()
        return NodeFiles(program.directory).join(plain, lambda: read_json_trace(nodes_file).select_runs())

    def _nsys_timeline(
        self, program: RecordedProgram, task: RecordedTask, environment: Mapping[str, str], name: str
    ) -> Timeline:
        report, command = program.directory / name, program.command(task)
        written = record_program(command, report, time_limit_s=program.time_limit_s, environment=environment)
        with describe_recording_errors(), export_report(written) as sqlite:
            return read_nsys(sqlite).select_runs()

    def _count_kernels(
        self, program: RecordedProgram, environment: Mapping[str, str]
    ) -> tuple[Counters | None, tuple[str, ...], tuple[str, ...]]:
        """Return the counters, notes, and the reason for missing counters if a timeline already exists."""
        # ncu selects kernels by their range: a single run makes the selection unambiguous.
        command = program.command(replace(program.task, repeats=_COUNTED_REPEATS))
        try:
            with describe_recording_errors():
                counted, notes = count_events(
                    command, program.directory, time_limit_s=program.time_limit_s, environment=environment
                )
                return counted, notes, ()
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


def _kineto_files(program: RecordedProgram) -> tuple[Path, Path]:
    return program.directory / "kineto.json", program.directory / "kineto_nodes.json"


def _nsys_unavailable_reason() -> str | None:
    binary = find_nsys()
    if binary is None:
        return "nsys is not installed: apt-get install nsight-systems"
    return None if tool_version(binary) else f"{binary} does not run"
