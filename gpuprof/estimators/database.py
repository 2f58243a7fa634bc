"""The default estimator: measured by the kernel database, else interpolated, else predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    INTERPOLATED,
    MEASURED,
    Estimate,
    Figure,
    PredictedRequirements,
    Workload,
    classify_source,
)
from gpuprof.domain.runtime_variant import Padding
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.creq import UnprofiledRequirements
from gpuprof.estimators.cross_gpu.cross_gpu import MOST_BATCH, TENTHS, CrossGpuLatencies
from gpuprof.estimators.cross_gpu.execution import Execution
from gpuprof.estimators.interference.colocation import Colocations
from gpuprof.estimators.interference.models import RunningWorkload
from gpuprof.estimators.measured.failures import find_failure, require_no_failure
from gpuprof.estimators.measured.known_models import KnownModels, padding_of
from gpuprof.estimators.measured.measured import CREQ_METRICS, MeasuredModel
from gpuprof.estimators.measured.surface import behaviour_after_pause, estimate_bandwidth, figure_of
from gpuprof.estimators.model_latency import ModelLatencies, part_of_one
from gpuprof.estimators.model_memory import ModelMemory
from gpuprof.kernel_db.store import KernelDb
from gpuprof.runtime.batch_items import BatchVerdicts

if TYPE_CHECKING:  # scikit-learn takes a second to import
    from gpuprof.estimators.learned.learned import LearnedModel
    from gpuprof.estimators.roofline import WorkByBatch


class DatabaseEstimator:
    """Implements `gpuprof.domain.estimate.Estimator`.

    Parameters
    ----------
    db : KernelDb or None
        None: no measurements, every figure is the roofline's.
    graphs : mapping of str to Path, optional
        Model's name → its ONNX file, for models that the database does not hold or whose file has moved. A model
        may also be named by the path itself; if the database holds the file's hash, its figures count.
    learned : callable
        Device → regressors trained for it, or None; called once per device, on the first unmeasured figure. They
        take precedence over the roofline.
    execution : Execution, optional
        Precision and runtime of models on unmeasured GPUs; by default the precision of the model's types in ONNX
        Runtime.
    alone : bool
        Whether times of a share without neighbours are predicted for an otherwise idle board. By default the rest of
        the board is assumed busy, as for plans: future neighbours will use the bandwidth and cache that are idle now.

    Attributes
    ----------
    known : KnownModels
        The models, with their measurements.
    verdicts : BatchVerdicts
        Whether a model mixes the items of a batch: for such models only batch 1 is listed.
    """

    def __init__(
        self,
        db: KernelDb | None,
        graphs: Mapping[str, Path] | None = None,
        learned: Callable[[Device], LearnedModel | None] = lambda device: None,
        execution: Execution | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self.known = KnownModels(db, graphs)
        self.verdicts = BatchVerdicts(None if db is None else db.path)
        contents = {name: record.sha256 for name, record in self.known.measured.items()}
        variants = {
            (name, device): ranked[0]
            for name, record in self.known.measured.items()
            for device, ranked in record.variants.items()
        }
        #: The measured co-locations, with the interference models fitted to them.
        self.colocations = Colocations(db, self._running, contents, variants, self._sm_utilization)
        learned_of = cache(lambda identity: learned(identity.device))
        execution = self._execution = execution or Execution()
        cross_gpu = CrossGpuLatencies(execution, self.known.bind_graph, busy=not alone)
        self._learned: Callable[[Device], LearnedModel | None] = lambda device: learned_of(_Identity(device))
        self._latencies = ModelLatencies(self.known, self._learned, cross_gpu)
        self._memory = ModelMemory(self.known, self._learned, execution)
        self._unprofiled = UnprofiledRequirements(cross_gpu)
        # Caches of this object: caches of the methods themselves would keep every estimator alive.
        self._answer = lru_cache(maxsize=200_000)(self._estimate)
        self._alone = lru_cache(maxsize=200_000)(
            lambda identity, workload: self._latencies.alone(identity.device, workload)
        )
        self._fitting = lru_cache(maxsize=200_000)(self._list_fitting)
        self._behaviours = lru_cache(maxsize=200_000)(self._behaviour)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models in the database, sorted."""
        return tuple(sorted(self.known.measured))

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict ``processes`` copies of ``model`` under ``share``, with ``beside`` running on the same device.

        Raises `InputError` when the model or a neighbour is unknown, the model was not measured on the device and its
        ONNX file is missing, or a failure rules the workload out.
        """
        if batch < 1 or processes < 1:
            raise InputError(f"batch and processes must be at least 1 but got {batch} and {processes}")
        self._check_neighbours(device, beside)
        return self._answer(_Identity(device), Workload(model, batch, share, processes), tuple(beside))

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the times of `estimate` at each of the batches, without its other figures.

        Raises `InputError` as `estimate` does for any of them.
        """
        if type(self).estimate is not DatabaseEstimator.estimate:  # a subclass may override `estimate`
            return tuple(self.estimate(model, device, batch, share, (), processes).latency_ms for batch in batches)
        record, identity, times = self.known.find_model(model), _Identity(device), []
        failed = record.failed_on(device.name)
        if device.kind == "gpu" and not (failed or record.points.get(device.name) or record.others):
            return tuple(self._latencies.predict(record, device, batches, part_of_one(share, processes)))
        if batches and find_failure(device, Workload(model, max(batches), share, processes), failed) is None:
            failed = []  # a failure that rules out a batch rules out all larger batches
        for batch in batches:
            workload = Workload(model, batch, share, processes)
            if failed and not record.has_run(device.name, workload):
                require_no_failure(device, workload, failed)
            times.append(self._alone(identity, workload)[0])
        return tuple(times)

    def board_work_ms(self, model: str, device: Device) -> Figure | None:
        """Return the least time of the whole device per request; see `gpuprof.domain.estimate`.

        For a model measured on the device: the time under the share with the most work for its size.
        """
        record = self.known.find_model(model)
        if points := record.points.get(device.name):
            times = (p.latency_ms * device.fraction(p.share) / (p.batch * p.processes) for p in points)
            return Figure(min(times), MEASURED)
        if device.kind != "gpu" or record.others or self.known.read_work(record) is None:
            return None
        return self._latencies.board_work(record, device)

    def list_ratios(self, device: Device) -> Mapping[str, Sequence[float]]:
        """Return measured over predicted times by model, which scale the predictions for other models on a device."""
        return self._latencies.list_ratios(device)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes measured under the nearest share, else the powers of two that fit in memory."""
        record = self.known.find_model(model)
        if self.verdicts.mixed_output(self.known.hash_content(record)) is not None:
            return (1,)
        points = self.known.list_points(model, device)
        if points:
            exact = {point.batch for point in points if point.share == share}
            return tuple(sorted(exact or {point.batch for point in points}))
        if (only := self.known.read_fixed_batch(model)) is not None:
            return (only,)
        return self._fitting(_Identity(device), model, share.mig)

    def _list_fitting(self, identity: _Identity, model: str, mig: str | None) -> tuple[int, ...]:
        """Return the powers of two that fit: without measurements, memory does not depend on the share."""
        record, share = self.known.find_model(model), Share(mig=mig)
        powers = [2**k for k in range(MOST_BATCH.bit_length())]
        return tuple(batch for batch in powers if self._memory.fits(record, identity.device, batch, share)) or (1,)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the measured shares, or else whole cores or tenths and MIG instances; the whole always."""
        measured = {point.share for point in self.known.list_points(model, device)}
        if len(measured) < 2:
            steps = (
                [100.0 * cores / device.compute_units for cores in range(1, device.compute_units + 1)]
                if device.kind == "cpu"
                else list(TENTHS)
            )
            measured |= {Share(step) for step in steps}
            measured |= {Share(100.0, profile.name) for profile in device.mig_profiles}
        return tuple(sorted(measured | {Share()}, key=lambda share: (device.fraction(share), share.mig or "")))

    def _estimate(self, identity: _Identity, workload: Workload, beside: tuple[Workload, ...]) -> Estimate:
        device, record = identity.device, self.known.find_model(workload.model)
        self.known.require_no_failure(record, device, workload, beside)
        if beside:
            # A plan asks for a workload beside thousands of others: all figures but its time stay as alone.
            alone = self._answer(identity, workload, ())
            latency = self.colocations.beside(alone.latency_ms, device, workload, beside)
            return replace(alone, latency_ms=latency, unknown_ops=self._list_unknown(record, latency))
        latency, cv = self._alone(identity, workload)
        pause = behaviour_after_pause(record, device, workload, cv)
        work = self._read_work(record, latency)
        return Estimate(
            workload=workload,
            device=device.name,
            latency_ms=latency,
            latency_cv=cv,
            pause_factor=pause[0],
            pause_cv=pause[1],
            memory_bytes=(memory := self._memory.peak(record, device, workload)),
            context_bytes=self._memory.context_bytes(device, memory, record.weight_bytes or 0, workload),
            weight_bytes=work.smallest.weight_bytes if record.weight_bytes is None and work else record.weight_bytes,
            creq_pct=self._creq(record, device, workload),
            dram_pct=figure_of(record, device, workload, "dram_pct"),
            l2_pct=figure_of(record, device, workload, "l2_pct"),
            power_w=figure_of(record, device, workload, "power_w"),
            variant=next((str(variant) for variant in record.variants.get(device.name, ())), None),
            unknown_ops=self._list_unknown(record, latency),
            padding=self._find_padding(record, device),
        )

    def _find_padding(self, model: MeasuredModel, device: Device) -> Padding:
        is_served = self._execution.runtime.is_onnxruntime or bool(model.points.get(device.name))
        return padding_of(model, device) if is_served else Padding.NONE

    def _read_work(self, model: MeasuredModel, latency: Figure) -> WorkByBatch | None:
        """Return the work of a model where its measurements do not suffice."""
        certain = classify_source(latency.source) in (MEASURED, INTERPOLATED) and model.weight_bytes is not None
        # Reading a file of hundreds of megabytes takes a second.
        return None if certain else self.known.read_work(model)

    def _list_unknown(self, model: MeasuredModel, latency: Figure) -> tuple[str, ...]:
        """Return the ops of unknown cost where they make a time unsure."""
        if classify_source(latency.source) in (MEASURED, INTERPOLATED):
            return ()
        work = self.known.read_work(model)
        return () if work is None else work.smallest.unknown_ops

    def _creq(self, model: MeasuredModel, device: Device, workload: Workload) -> Sequence[tuple[str, Figure]]:
        """Return the compute requirement by metric: as profiled, else predicted from the kernels on the whole GPU."""
        if model.points.get(device.name) or model.others:
            columns = [(metric, figure_of(model, device, workload, column)) for metric, column in CREQ_METRICS.items()]
            return tuple((metric, figure) for metric, figure in columns if figure is not None)
        if (
            device.kind != "gpu"
            or workload.share != Share()
            or workload.processes > 1
            or self.known.read_work(model) is None
        ):
            return ()
        return PredictedRequirements(lambda: self._predict_creq(model, device, workload.batch))

    def _predict_creq(self, model: MeasuredModel, device: Device, batch: int) -> tuple[tuple[str, Figure], ...]:
        """Return each requirement by trained regressors, else from launches."""
        figures = dict(self._unprofiled.predict(model, device, batch))
        if (learned := self._learned(device)) is not None:
            graph = self.known.bind_graph(model, batch)
            trained = {metric: learned.creq_figure(metric, graph) for metric in CREQ_METRICS}
            figures |= {metric: figure for metric, figure in trained.items() if figure is not None}
        return tuple(figures.items())

    def _check_neighbours(self, device: Device, beside: Sequence[Workload]) -> None:
        for neighbour in beside:
            if neighbour.batch < 1 or neighbour.processes < 1:
                raise InputError(
                    f"batch and processes beside must be at least 1 but got {neighbour.batch}, {neighbour.processes}"
                )
            if not self.colocations.has_seen(device, neighbour.model):
                self.known.find_model(neighbour.model)

    def _running(self, device: Device, workload: Workload) -> RunningWorkload | None:
        """Return the behaviour of a workload alone, for the interference models; None where unknown."""
        return self._behaviours(_Identity(device), workload)

    def _sm_utilization(self, device: Device, workload: Workload) -> float | None:
        """Return the busy part of the SMs of a workload alone, in percent; the upper end where predicted."""
        figures = dict(self._creq(self.known.find_model(workload.model), device, workload))
        figure = figures.get("wavg_sm_util")
        return None if figure is None else min(100.0, figure.value if figure.is_observed else figure.upper())

    def _behaviour(self, identity: _Identity, workload: Workload) -> RunningWorkload | None:
        device = identity.device
        try:
            record = self.known.find_model(workload.model)
            alone = self._alone(identity, workload)[0].value
        except InputError:
            return None
        l2, dram = (estimate_bandwidth(record, device, workload, column, alone) for column in ("l2_pct", "dram_pct"))
        return RunningWorkload(
            model=workload.model,
            batch=workload.batch,
            share=device.fraction(workload.share),
            solo_ms=alone,
            l2_pct=l2 or 0.0,
            dram_pct=self._traffic_pct(record, device, workload, alone) if dram is None else dram,
        )

    def _traffic_pct(self, model: MeasuredModel, device: Device, workload: Workload, alone_ms: float) -> float:
        """Return the ops' traffic over the memory's capacity in the time alone, in percent; 0 without the graph."""
        work = self.known.read_work(model)
        if work is None:
            return 0.0
        bytes_moved = float(work.at(workload.batch).bytes_moved.sum()) * workload.processes
        return min(100.0, 100.0 * bytes_moved / (device.dram_bytes_per_s * alone_ms / 1e3))


class _Identity:
    """A device as a key: hashed by its name, equal only when every number is."""

    __slots__ = ("device",)

    def __init__(self, device: Device) -> None:
        self.device = device

    def __hash__(self) -> int:
        return hash(self.device.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and (self.device is other.device or self.device == other.device)
