"""The default collector: ONNX Runtime in a child process, and its own profile of every node."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gpuprof.errors import install_hint
from gpuprof.graph.executed_graph import read_executed
from gpuprof.kernel_db.schema import ColocationRow, ModelRow, workload_label
from gpuprof.profiling.child.children import Child
from gpuprof.profiling.child.job import Job, Request
from gpuprof.profiling.child.measurement import Timing, label, measure, save_inputs, shared_group, slices_of
from gpuprof.profiling.child.task import Effort, NodesTask
from gpuprof.profiling.collector import Collected
from gpuprof.profiling.cpu.node_times import NodeTimes, node_times, read_node_events
from gpuprof.profiling.cpu.op_rows import kernel_rows, op_rows
from gpuprof.runtime.providers import ORT_CPU
from gpuprof.runtime.session import runtime_version, session_settings

_LOAD_S = 600.0
#: Effort of the pass that times nodes, separate from the latencies: ONNX Runtime's profiler slows a batch down.
_NODE_PASS = Effort(time_s=1.5, min_repeats=5, max_repeats=50)
#: Figures of a sample that rows of ``colocations`` do not have.
_OF_MODELS_ALONE = frozenset({"latency_p50_low_ms", "latency_p50_high_ms"})


class OrtCollector:
    """Times batches in ONNX Runtime, and each node in a second, separate pass."""

    name = "ort"
    kinds: tuple[str, ...] = ("cpu",)

    def available(self) -> str | None:
        """Return None when ONNX Runtime is installed, else the fix."""
        if importlib.util.find_spec("onnxruntime") is None:
            return f"onnxruntime is not installed: {install_hint('cpu')}"
        return None

    def version(self) -> str:
        """Return the version of ONNX Runtime, which includes its profiler."""
        return self.runtime()[1]

    def runtime(self) -> tuple[str, str]:
        """Return ``("onnxruntime", version)``."""
        return runtime_version()

    def collect(self, request: Request) -> Collected:
        """Measure a request; see `gpuprof.profiling.collector.Collector`."""
        timings = measure(request.job, request.beside, request.limits)
        settings = {**session_settings(timings[0].part.threads), "limits": asdict(request.limits)}
        if request.beside:
            return Collected(colocations=colocation_rows(request, timings), settings=settings)
        if request.job.processes > 1:  # nodes are timed in a single process
            return Collected(models=(_model_row(request, timings[0], None),), settings=settings)
        times, differs = self._node_pass(request.job)
        return Collected(
            models=(replace(_model_row(request, timings[0], times), error=differs),),
            ops=op_rows(request, times),
            kernels=kernel_rows(request, times),
            settings=settings,
            notes=() if request.job.graph.unread else times.notes(),
        )

    def _node_pass(self, job: Job) -> tuple[NodeTimes, str | None]:
        """Return the nodes' times, and how the outputs under a share differ from those without, if they do."""
        part = slices_of([job.share])[0]
        with tempfile.TemporaryDirectory(prefix="gpuprof-") as name, shared_group("nodes") as group:
            directory = Path(name)
            save_inputs(job, directory / "inputs.npz")
            task = NodesTask(
                provider=ORT_CPU,
                threads=part.threads,
                part=part,
                group=group,
                model=job.path,
                inputs=directory / "inputs.npz",
                profile_prefix=str(directory / "profile"),
                optimized=directory / "optimized.onnx",
                compare=not job.share.is_whole,
                effort=_NODE_PASS,
            )
            with Child(task, label(job)) as child:
                child.expect("ready", _LOAD_S)
                child.tell("go")
                done = child.expect("done", _LOAD_S)
            executed, trace = read_executed(directory / "optimized.onnx"), read_node_events(Path(done["profile"]))
            return node_times(job.graph, executed, trace), done["differs"]


def _model_row(request: Request, timing: Timing, times: NodeTimes | None) -> ModelRow:
    job = request.job
    return ModelRow(
        **request.columns(),
        processes=job.processes,
        model_sha256=job.graph.sha256,
        model_path=job.graph.path,
        **asdict(timing.stats),
        latency_paused_mean_ms=timing.paused_ms,
        latency_paused_std_ms=timing.paused_std_ms,
        throughput_rps=timing.throughput_rps,
        memory_peak_bytes=timing.memory_peak_bytes,
        memory_held_bytes=timing.memory_held_bytes,
        weight_bytes=None if job.graph.unread else job.graph.weight_bytes,
        input_bytes=sum(tensor.bytes for tensor in job.graph.inputs),
        flops=None if job.graph.unread else job.graph.flops,
        cpu_utilization_pct=timing.cpu_utilization_pct,
        kernel_count=len(times.executed) if times else None,
        node_time_ms=times.total_ns / 1e6 if times else None,
        untied_time_ms=times.untied_ns / 1e6 if times else None,
    )


def colocation_rows(request: Request, timings: Sequence[Timing]) -> tuple[ColocationRow, ...]:
    """Return a row for each co-located job."""
    jobs = (request.job, *request.beside)
    labels = [workload_label(j.graph.sized_name, j.graph.batch, j.share.sm_pct, j.share.mig, j.processes) for j in jobs]
    return tuple(
        ColocationRow(
            run_id=request.run_id,
            device=request.device.name,
            group=0,
            member=member,
            model=job.graph.name,
            batch=job.graph.batch,
            beside=" + ".join(labels[:member] + labels[member + 1 :]),
            sm_share_pct=job.share.sm_pct,
            mig_profile=job.share.mig,
            processes=job.processes,
            model_sha256=job.graph.sha256,
            **{name: value for name, value in asdict(timing.stats).items() if name not in _OF_MODELS_ALONE},
            throughput_rps=timing.throughput_rps,
        )
        for member, (job, timing) in enumerate(zip(jobs, timings, strict=True))
    )
