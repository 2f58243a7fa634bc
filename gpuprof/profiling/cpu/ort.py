"""The default collector: ONNX Runtime in worker processes, its own profile of every node, and peak rates of the CPU.

Peak rates (FLOP/s of a matrix product, bytes/s of passes over caches and memory) run in ONNX Runtime, in a worker held
to the share, as models do: ceilings that a model can reach.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.errors import UnavailableError, install_hint
from gpuprof.graph.executed_graph import read_executed
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, ModelRow
from gpuprof.profiling.collector import Collected
from gpuprof.profiling.cpu.op_rows import NodeTimes, kernel_rows, node_times, op_rows, read_node_events
from gpuprof.profiling.worker.job import DEFAULT_LIMITS, Request, TimingLimits
from gpuprof.profiling.worker.measurement import Crew, Timing, share_worker
from gpuprof.profiling.worker.tasks import Effort, profile_nodes, time_shapes
from gpuprof.runtime.session import runtime_version, session_settings

#: Side of the square matrices: a product takes tens of milliseconds on a core, far longer than a call.
_SIDE = 1024
#: Sizes of working sets, read and written repeatedly: from a core's own cache to beyond all caches.
_SETS = tuple(1 << power for power in range(18, 29))
SOURCE = (
    f"measured: ONNX Runtime, float32 product of two {_SIDE}x{_SIDE} matrices; Relu over {_SETS[0] >> 10} KiB to "
    f"{_SETS[-1] >> 20} MiB, read and written bytes counted once each, less what a call takes; best of repeats"
)
#: Figures of a sample that rows of ``colocations`` do not have.
_OF_MODELS_ALONE = frozenset({"latency_p50_low_ms", "latency_p50_high_ms"})


def measure_ceilings(device: Device, share: Share, run_id: str, limits: TimingLimits = DEFAULT_LIMITS) -> DeviceRow:
    """Return the ceilings of ``share`` of this machine's CPU, measured in about the ``min_time_s`` of the limits.

    Raises `UnavailableError` when the share cannot be enforced here.
    """
    shapes = [[(size // 8,)] for size in _SETS]
    effort = Effort(time_s=limits.min_time_s / (len(shapes) + 2), min_repeats=limits.min_repeats)
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as name, share_worker(share, "peak rates") as worker:
        product, passes = Path(name, "product.onnx"), Path(name, "passes.onnx")
        _write_model(product, "MatMul", [(_SIDE, _SIDE)] * 2)
        _write_model(passes, "Relu", shapes[0])
        (product_s,) = worker.call(time_shapes, product, [[(_SIDE, _SIDE)] * 2], effort)
        call_s, *passes_s = worker.call(time_shapes, passes, [[(1,)], *shapes], effort)
    rates = [(size, size / max(pass_s - call_s, 0.1 * pass_s)) for size, pass_s in zip(_SETS, passes_s, strict=True)]
    return DeviceRow(
        run_id=run_id,
        device=device.name,
        kind=device.kind,
        compute_units=device.compute_units,
        sm_share_pct=share.sm_pct,
        clock_mhz=device.clock_mhz,
        float32_flops_per_s=2.0 * _SIDE**3 / product_s,
        dram_bytes=device.dram_bytes,
        dram_bytes_per_s=rates[-1][1],
        reread_bytes_per_s=json.dumps(rates),
        l2_bytes=device.l2_bytes,
        measured=True,
        source=SOURCE,
    )


def _write_model(path: Path, op_type: str, shapes: Sequence[tuple[int, ...]]) -> None:
    from onnx import TensorProto, helper, save

    free = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [None] * len(s)) for i, s in enumerate(shapes)]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shapes[0]))
    node = helper.make_node(op_type, [info.name for info in free], ["y"])
    graph = helper.make_graph([node], op_type, free, [output])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


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
        return take_result(self.collect_batches([request]))

    def collect_batches(self, requests: Sequence[Request]) -> Iterator[Collected | UnavailableError]:
        """Measure requests that differ in the batch size in the same processes; yield the results in order.

        Raises `InputError` when the shares do not fit.
        """
        with Crew(requests[0].jobs) as crew:
            for request in requests:
                try:
                    yield self._collect(request, crew)
                except UnavailableError as error:
                    yield error

    def _collect(self, request: Request, crew: Crew) -> Collected:
        timings = crew.measure(request.jobs, request.limits)
        settings = {**session_settings(timings[0].part.threads), "limits": asdict(request.limits)}
        notes = describe_disturbance(timings[0])
        if request.beside:
            return Collected(colocations=colocation_rows(request, timings), settings=settings, notes=notes)
        if request.job.processes > 1:  # nodes are timed in a single process
            return Collected(models=(_model_row(request, timings[0], None),), settings=settings, notes=notes)
        times = _time_nodes(request, crew)
        return Collected(
            models=(_model_row(request, timings[0], times),),
            ops=op_rows(request, times),
            kernels=kernel_rows(request, times),
            settings=settings,
            notes=notes if request.job.graph.unread else (*notes, *times.notes()),
        )


def take_result(results: Iterator[Collected | UnavailableError]) -> Collected:
    """Return the only result of a collector, or raise it."""
    (result,) = results
    if isinstance(result, UnavailableError):
        raise result
    return result


def describe_disturbance(timing: Timing) -> tuple[str, ...]:
    """Return a note on what disturbed a measurement."""
    return () if timing.disturbance is None else (f"unstable: {timing.disturbance}",)


def _time_nodes(request: Request, crew: Crew) -> NodeTimes:
    """Return the nodes' times from ONNX Runtime's profiler, in a separate pass, because it slows batches down."""
    job = request.job
    effort = Effort(time_s=request.limits.min_time_s, min_repeats=5, max_repeats=50)
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as name:
        profile: Path = crew.leader.call(profile_nodes, job.path, job.inputs(), Path(name), effort)
        return node_times(job.graph, read_executed(Path(name, "optimized.onnx")), read_node_events(profile))


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
        cpu_wait_pct=timing.cpu_wait_pct,
        kernel_count=len(times.executed) if times else None,
        node_time_ms=times.total_ns / 1e6 if times else None,
        untied_time_ms=times.untied_ns / 1e6 if times else None,
    )


def colocation_rows(request: Request, timings: Sequence[Timing]) -> tuple[ColocationRow, ...]:
    """Return a row for each co-located job."""
    jobs = request.jobs
    labels = [job.label for job in jobs]
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
