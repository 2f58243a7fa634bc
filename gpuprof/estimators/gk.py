"""USHER's GK-Estimator: a model's requirement from its kernels and their concurrency (OSDI'24, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, prod
from pathlib import Path
from statistics import median

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.occupancy import cap_occupancy, occupancies
from gpuprof.domain.runtime_variant import comparable_rows
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.conformal import ENOUGH_MODELS, LEVEL, quantile
from gpuprof.estimators.cross_gpu.kernels import LaunchMode, host_seconds, list_kernels
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.estimators.learned.training_set import OpFacts, facts_of_op, facts_of_row, feature_matrix, roofline_ns
from gpuprof.estimators.measured.known_models import padding_of
from gpuprof.estimators.measured.measured import CREQ_METRICS
from gpuprof.estimators.memory import peak_activation_bytes, workspace_bytes
from gpuprof.estimators.roofline import GraphWork, op_times_s, roofline_ms, unknown_ms, work_of
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import KernelRow, OpRow
from gpuprof.kernel_db.store import KernelDb


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of an op."""

    name: str
    duration_ns: float  #: Median over its executions.
    occupancy_pct: float | None = None  #: Measured, else estimated from the launch, else theoretical.
    #: SMs needed by the blocks at once, in percent of all, by the launch as in `profile` (thesis section 5.3.2). Unlike
    #: the activity counted by ncu, it does not fall with the tail of a kernel.
    sm_util_pct: float | None = None


class KernelTable:
    """Kernels by op; for an unseen op, those of the nearest op of its type.

    ``kernels``: op's signature → its kernels, in launch order; ``facts``: op's signature → the op.
    """

    def __init__(self, device: Device, kernels: Mapping[str, Sequence[Kernel]], facts: Mapping[str, OpFacts]) -> None:
        self._device = device
        self._kernels, self._facts = kernels, facts
        by_type: dict[str, list[str]] = {}
        for signature in sorted(kernels):
            if signature in facts:
                by_type.setdefault(facts[signature].op_type, []).append(signature)
        self._by_type = by_type
        self._features = {
            op_type: feature_matrix([facts[s] for s in group], device, Share()) for op_type, group in by_type.items()
        }

    def __len__(self) -> int:
        """Return the number of ops with kernels."""
        return len(self._kernels)

    def kernels_of(self, signature: str, op: OpFacts) -> tuple[Kernel, ...] | None:
        """Return the kernels of an op; None where no op of its type was seen.

        Kernels of the nearest op are scaled in time by the ratio of both ops' roofline times.
        """
        if signature in self._kernels:
            return tuple(self._kernels[signature])
        signatures = self._by_type.get(op.op_type)
        if not signatures:
            return None
        distance = np.abs(self._features[op.op_type] - feature_matrix([op], self._device, Share())).sum(axis=1)
        nearest = signatures[int(distance.argmin())]
        # In nanoseconds: the 1 avoids a division by zero for ops without traffic, whose least time is 0.
        least, of_nearest = roofline_ns([op, self._facts[nearest]], self._device, Share()) + 1.0
        scale = float(least / of_nearest)
        return tuple(
            Kernel(kernel.name, kernel.duration_ns * scale, kernel.occupancy_pct, kernel.sm_util_pct)
            for kernel in self._kernels[nearest]
        )


def read_kernel_table(db: KernelDb, device: Device) -> KernelTable:
    """Return the kernels measured on the whole of ``device``."""
    where = {"device": device.name, "sm_share_pct": 100.0, "mig_profile": None}
    ops = read_records(db, OpRow, where)
    facts = {row.signature: facts_of_row(row) for row in ops}
    groups: dict[str, dict[tuple[str, int, str | None], list[KernelRow]]] = {}
    for row in comparable_rows(read_records(db, KernelRow, where)):
        if row.op_signature is not None and row.duration_ns is not None:
            execution = (row.run_id, row.repeat, row.op_name)
            groups.setdefault(row.op_signature, {}).setdefault(execution, []).append(row)
    typical = {signature: _typical(list(executions.values()), device) for signature, executions in groups.items()}
    return KernelTable(device, typical, facts)


def _typical(executions: Sequence[Sequence[KernelRow]], device: Device) -> tuple[Kernel, ...]:
    """Return the kernels of the executions with the typical number of launches, with median values."""
    ordered = [sorted(rows, key=lambda row: row.position) for rows in executions]
    count = int(median(len(rows) for rows in ordered))
    same = [rows for rows in ordered if len(rows) == count] or ordered[:1]
    return tuple(
        Kernel(
            place[0].name,
            float(median(row.duration_ns or 0 for row in place)),
            _median([row.achieved_occupancy_pct for row in place])
            or _median([row.launch_occupancy_pct for row in place])
            or _median([row.theoretical_occupancy_pct for row in place]),
            _median([_compute_utilization(device, row) for row in place]),
        )
        for place in zip(*same, strict=True)
    )


def _compute_utilization(device: Device, row: KernelRow) -> float | None:
    """Return the SMs needed by a launch, in percent; None where the launch or the device's rules are unknown."""
    grid, block = (row.grid_x, row.grid_y, row.grid_z), (row.block_x, row.block_y, row.block_z)
    sizes = [size for size in (*grid, *block) if size is not None and size >= 1]
    if device.sm is None or len(sizes) < len(grid) + len(block) or row.registers_per_thread is None:
        return None
    try:
        launch = occupancies(
            device,
            blocks=prod(sizes[:3]),
            threads_per_block=prod(sizes[3:]),
            registers_per_thread=row.registers_per_thread,
            static_shared_bytes=row.static_shared_bytes or 0,
            dynamic_shared_bytes=row.dynamic_shared_bytes or 0,
        )
    except InputError:
        return None
    (sm_utilization_pct,) = launch.sm_utilization_pct.tolist()
    return None if isnan(sm_utilization_pct) else sm_utilization_pct


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(median(numbers)) if numbers else None


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of a model with its start."""

    op: int  #: Position in the graph.
    kernel: Kernel
    start_ns: float  #: Since the model's first kernel.


@dataclass(frozen=True, slots=True)
class ModelRequirement:
    """Latency, compute and memory requirement of a model."""

    latency_ms: float  #: All kernels in sequence, as runtimes launch them on one stream.
    #: ``max_occupancy_pct``, ``wavg_occupancy_pct``, ``wavg_sm_util_pct``: Creq by metric, as in `profile`: the largest
    #: sum over a set of concurrent kernels, at most 100; its average over the batch, gaps between kernels included
    #: where the host launches more slowly than the device runs; the same average of the SMs that their launches need.
    #: None where the kernels' counters or launches were not measured.
    max_occupancy_pct: float | None
    wavg_occupancy_pct: float | None
    wavg_sm_util_pct: float | None
    memory_bytes: int  #: Mreq: weights, the activations alive at once, and the largest workspace.
    unknown_ops: tuple[str, ...]  #: Op types without any kernel in the table, counted with no time.


def require(graph: ModelGraph, table: KernelTable, *, host_ms: float = 0.0) -> ModelRequirement:
    """Return the requirements of ``graph`` on the device of ``table``; ``host_ms``: host time to launch all kernels."""
    launches, unknown = launch_times(graph, table)
    sets = concurrent_sets(launches)
    return ModelRequirement(
        latency_ms=sum(launch.kernel.duration_ns for launch in launches) / 1e6,
        max_occupancy_pct=max((value for value, _ in _sums(sets, "occupancy_pct")), default=None),
        wavg_occupancy_pct=_average(_sums(sets, "occupancy_pct"), 1e6 * host_ms),
        wavg_sm_util_pct=_average(_sums(sets, "sm_util_pct"), 1e6 * host_ms),
        memory_bytes=memory_bytes(graph),
        unknown_ops=unknown,
    )


def launch_times(graph: ModelGraph, table: KernelTable) -> tuple[list[Launch], tuple[str, ...]]:
    """Return every kernel with its start, and the op types without kernels.

    The kernels of an op run one after another, the first from the end of the last kernel of all its producers.
    """
    before: dict[int, list[int]] = {}
    for producer, consumer in graph.edges():
        before.setdefault(consumer, []).append(producer)
    end = [0.0] * len(graph.ops)
    launches: list[Launch] = []
    unknown: set[str] = set()
    for position, op in enumerate(graph.ops):
        now = max((end[producer] for producer in before.get(position, ())), default=0.0)
        kernels = table.kernels_of(op.signature, facts_of_op(op, graph.batch))
        if kernels is None:
            unknown.add(op.op_type)
        for kernel in kernels or ():
            launches.append(Launch(position, kernel, now))
            now += kernel.duration_ns
        end[position] = now
    return launches, tuple(sorted(unknown))


def concurrent_sets(launches: Sequence[Launch], tau_ns: float = 1000.0) -> list[tuple[Launch, ...]]:
    """Return the sets of kernels that may run at once: kernels that start at most τ after the first of their set.

    τ is 0.001 ms in the paper. Kernels of an op depend on each other and are never in the same set.
    """
    sets: list[list[Launch]] = []
    for launch in sorted(launches, key=lambda event: (event.start_ns, event.op)):
        last = sets[-1] if sets else []
        if last and launch.start_ns - last[0].start_ns <= tau_ns and all(previous.op != launch.op for previous in last):
            last.append(launch)
        else:
            sets.append([launch])
    return [tuple(members) for members in sets]


def memory_bytes(graph: ModelGraph) -> int:
    """Return Mreq: weights, the largest size of live activations and the largest unfolded convolution input."""
    workspace = max((workspace_bytes(op) for op in graph.ops), default=0)
    return graph.weight_bytes + peak_activation_bytes(graph) + workspace


def _sums(sets: Sequence[Sequence[Launch]], metric: str) -> list[tuple[float, float]]:
    """Return the sum of the metric for each set, at most 100, and the set's duration; empty if a value is unknown."""
    sums = []
    for members in sets:
        values = [getattr(launch.kernel, metric) for launch in members]
        if any(value is None for value in values):
            return []
        length = max(launch.start_ns + launch.kernel.duration_ns for launch in members) - members[0].start_ns
        sums.append((float(cap_occupancy(sum(values))), length))
    return sums


def _average(sums: Sequence[tuple[float, float]], least_ns: float) -> float | None:
    total = max(sum(length for _, length in sums), least_ns if sums else 0.0)
    return sum(value * length for value, length in sums) / total if total > 0.0 else None


SOURCE = "GK-Estimator"


class GkEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` by the kernels of ops (`gpuprof.estimators.gk`).

    A model's latency is the sum of its kernels' times, its compute requirement that of concurrent kernels, its memory
    the largest size of live tensors. Kernels are measured on the whole device; times under a share are scaled by the
    roofline's ratio. The interval comes from the errors of this estimator on the models measured on the device, from
    four models on; an op type without kernels counts with its roofline and widens the interval. Neighbours slow a model
    down as in `DatabaseEstimator`. ``graphs``: as for `DatabaseEstimator`.
    """

    def __init__(self, db: KernelDb | None, graphs: Mapping[str, Path] | None = None) -> None:
        self._db = db
        self._database = DatabaseEstimator(db, graphs)
        self._tables: dict[str, KernelTable] = {}
        self._spreads: dict[str, float | None] = {}
        #: Requirement and work of a model at a batch size, ops without kernels as those of unknown cost.
        self._known: dict[tuple[str, str, int], tuple[ModelRequirement, GraphWork]] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models in the database, sorted."""
        return self._database.models

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict ``processes`` copies of ``model``, each in an equal part of ``share``, with ``beside`` running.

        Raises `InputError` when the database holds no kernels of the device, or the model's ONNX file is not there.
        """
        if batch < 1 or processes < 1:
            raise InputError(f"batch and processes must be at least 1 but got {batch} and {processes}")
        required, work = self._of(model, device, batch)
        part = Share(share.sm_pct / processes, share.mig)
        longer = roofline_ms(work, device, part) / roofline_ms(work, device, Share())
        latency = self._figure(required, work, device).scale_by(longer)
        creq = [(metric, getattr(required, column)) for metric, column in CREQ_METRICS.items()]
        alone = Estimate(
            workload=Workload(model, batch, share, processes),
            device=device.name,
            latency_ms=latency,
            memory_bytes=Figure(required.memory_bytes, SOURCE),
            weight_bytes=work.weight_bytes,
            creq_pct=tuple((name, Figure(value, SOURCE)) for name, value in creq if value is not None),
            unknown_ops=required.unknown_ops,
            padding=padding_of(self._database.known.find_model(model), device),
        )
        if not beside:
            return alone
        slowed = self._database.colocations.beside(latency, device, alone.workload, tuple(beside))
        return replace(alone, latency_ms=slowed)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes worth considering, as `DatabaseEstimator` does."""
        return self._database.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares worth considering, as `DatabaseEstimator` does."""
        return self._database.shares(model, device)

    def _of(self, model: str, device: Device, batch: int) -> tuple[ModelRequirement, GraphWork]:
        key = (model, device.name, batch)
        if key not in self._known:
            table = self._table(device)
            graph = self._database.known.read_graph(model, batch)
            mode = LaunchMode.ONNXRUNTIME  # the runtime of `profile`'s averages
            host_ms = 1e3 * host_seconds(list_kernels(graph, "float32", mode), mode)
            required = require(graph, table, host_ms=host_ms)
            work = replace(work_of(graph), unknown_ops=required.unknown_ops)
            self._known[key] = (required, work)
        return self._known[key]

    def _figure(self, required: ModelRequirement, work: GraphWork, device: Device) -> Figure:
        """Return the latency on the whole device; ops without kernels take their roofline time."""
        unseen = np.array([op in work.unknown_ops for op in work.op_types], dtype=bool)
        value = required.latency_ms + 1e3 * float(op_times_s(work, device, Share())[unseen].sum())
        more = unknown_ms(work, device, Share())
        spread = self._spread(device)
        if spread is None and not more:
            return Figure(value, SOURCE)
        return Figure(value, SOURCE, value / (spread or 1.0), value * (spread or 1.0) + more)

    def _spread(self, device: Device) -> float | None:
        """Return the error of estimated latencies against measurements, as a factor; None with too few models."""
        if device.name not in self._spreads:
            self._spreads[device.name] = None  # ends the recursion
            ratios = []
            for model in self.models:
                ratio = self._ratio(model, device)
                if ratio:
                    ratios.append(max(ratio, 1.0 / ratio))
            self._spreads[device.name] = quantile(ratios, LEVEL) if len(ratios) >= ENOUGH_MODELS else None
        return self._spreads[device.name]

    def _ratio(self, model: str, device: Device) -> float | None:
        if device.name not in self._database.known.devices_of(model):
            return None
        batch = self._database.batches(model, device, Share())[0]
        try:
            measured = self._database.estimate(model, device, batch, Share()).latency_ms.value
            estimated_ms = self._of(model, device, batch)[0].latency_ms
        except InputError:  # the model's file is gone
            return None
        return measured / estimated_ms if estimated_ms else None

    def _table(self, device: Device) -> KernelTable:
        if device.name not in self._tables and self._db is not None:
            self._tables[device.name] = read_kernel_table(self._db, device)
        table = self._tables.get(device.name)
        if not table:
            raise InputError(
                f"the database holds no kernels of {device.name} that are tied to ops, which the GK-Estimator adds up",
                "gpuprof profile --collector cupti (or nsys) on it ties kernels by ONNX Runtime's own profile; from "
                "reports, name both: --from-report KERNELS --from-report ONNXRUNTIME_PROFILE.json",
            )
        return table
