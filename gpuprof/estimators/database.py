"""The default estimator: what the kernel database measured, else what lies between, else the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import EXTRAPOLATED, INTERPOLATED, MEASURED, Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import describe_sizes
from gpuprof.errors import InputError
from gpuprof.estimators.creq.creq import UnprofiledRequirements
from gpuprof.estimators.cross_gpu.execution import Execution
from gpuprof.estimators.cross_gpu.latency_grid import CrossGpuLatencies
from gpuprof.estimators.cross_gpu.measured_ops import read_timed_ops
from gpuprof.estimators.interference.colocation import Colocations
from gpuprof.estimators.interference.models import Running
from gpuprof.estimators.measured.calibration import Calibration
from gpuprof.estimators.measured.curve import BatchCurve
from gpuprof.estimators.measured.envelope import LatencyEnvelope
from gpuprof.estimators.measured.failures import require_no_failure
from gpuprof.estimators.measured.figures import (
    behaviour_after_pause,
    blend_figures,
    estimate_bandwidth,
    figure_of,
    figure_within,
    widen_by,
    widen_interval,
)
from gpuprof.estimators.measured.known_models import KnownModels, require_readable
from gpuprof.estimators.measured.measured import CREQ_METRICS, MeasuredModel, Point
from gpuprof.estimators.measured.sized import blend_measured
from gpuprof.estimators.measured.surface import Reading, Surface
from gpuprof.estimators.memory.reserved import predict_reserved
from gpuprof.estimators.roofline.roofline import dispatch_ms, roofline_ms, source_of, unknown_ms
from gpuprof.kernel_db.store import KernelDb
from gpuprof.runtime.batch_verdicts import BatchVerdicts

if TYPE_CHECKING:  # scikit-learn takes a second to import
    from gpuprof.estimators.learned.learned import LearnedModel
    from gpuprof.estimators.roofline.op_work import WorkByBatch

_MOST_BATCH = 256
#: Percent of a GPU: what MPS serving systems cut it into (ParvaGPU, iGniter: tenths).
_GPU_SHARES = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0)


class DatabaseEstimator:
    """Implements `gpuprof.domain.estimate.Estimator`.

    Parameters
    ----------
    db : KernelDb or None
        None: nothing was measured, every figure is the roofline's.
    graphs : mapping of str to Path, optional
        Model's name → its ONNX file, for models that the database does not hold or whose file has moved. A model
        may also be named by the path itself; if the database knows the file by its hash, its figures count.
    learned : callable
        Device → regressors trained for it, or None; called once a device, when something was not measured. They
        are asked before the roofline.
    execution : Execution, optional
        In which precision and by which runtime models run on GPUs of which nothing was measured; by default what the
        model's types give in ONNX Runtime.

    Attributes
    ----------
    known : KnownModels
        Which models there are, and what is known of each.
    verdicts : BatchVerdicts
        Which models mix the items of a batch: no batch but of one is listed for them.
    """

    def __init__(
        self,
        db: KernelDb | None,
        graphs: Mapping[str, Path] | None = None,
        learned: Callable[[Device], LearnedModel | None] = lambda device: None,
        execution: Execution | None = None,
    ) -> None:
        self.known = KnownModels(db, graphs)
        self.verdicts = BatchVerdicts(None if db is None else db.path)
        contents = {name: known.sha256 for name, known in self.known.measured.items()}
        variants = {
            (name, device): ranked[0]
            for name, known in self.known.measured.items()
            for device, ranked in known.variants.items()
        }
        self._colocations = Colocations(db, self._running, contents, variants, self._sm_utilization)
        self._learned = cache(lambda identity: learned(identity.device))
        timed = cache(lambda name: read_timed_ops(db, name) if db is not None else [])
        self._cross_gpu = CrossGpuLatencies(
            execution or Execution(), self.known.bind_graph, lambda device: timed(device.name)
        )
        self._unprofiled = UnprofiledRequirements(self._cross_gpu)
        self._surfaces: dict[tuple[str, str, int], Surface] = {}
        self._envelopes: dict[tuple[str, str], LatencyEnvelope] = {}
        self._calibrations: dict[str, Calibration] = {}
        # Caches of this object: on the methods themselves they would keep every estimator alive.
        self._answer = lru_cache(maxsize=200_000)(self._estimate)
        self._alone = lru_cache(maxsize=200_000)(self._latency)
        self._behaviours = lru_cache(maxsize=200_000)(self._behaviour)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models in the database, sorted."""
        return self.known.names

    @property
    def colocations(self) -> Colocations:
        """What was co-located, and the interference models that it speaks for."""
        return self._colocations

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict ``processes`` copies of ``model`` under ``share``, with ``beside`` running on the same device.

        Raises
        ------
        InputError
            When the model or a neighbour is unknown, the model was not measured on the device and its ONNX file is
            not there, or what is asked for is ruled out by a failure.
        """
        if batch < 1 or processes < 1:
            raise InputError(f"batch and processes must be at least 1 but got {batch} and {processes}")
        self._check_neighbours(device, beside)
        return self._answer(_Identity(device), Workload(model, batch, share, processes), tuple(beside))

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the times of `estimate` at each of the batches, without what else it says of them.

        Raises
        ------
        InputError
            As `estimate` for any of them.
        """
        if type(self).estimate is not DatabaseEstimator.estimate:  # whoever derives a class says what it likes
            return tuple(self.estimate(model, device, one, share, (), processes).latency_ms for one in batches)
        known, identity, times = self.known.find_model(model), _Identity(device), []
        failed = known.failed_on(device.name)
        if device.kind == "gpu" and not (failed or known.points.get(device.name) or known.others):
            return tuple(self._predict_times(known, device, batches, _part_of_one(share, processes)))
        for batch in batches:
            workload = Workload(model, batch, share, processes)
            if failed and not known.has_run(device.name, workload):
                require_no_failure(device, workload, failed)
            times.append(self._alone(identity, workload)[0])
        return tuple(times)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes measured under the nearest share, else the powers of two that fit in memory."""
        if self.verdicts.mixed_output(self.known.find_model(model).sha256) is not None:
            return (1,)
        points = self.known.list_points(model, device)
        if points:
            exact = {point.batch for point in points if point.share == share}
            return tuple(sorted(exact or {point.batch for point in points}))
        if (only := self.known.only_batch(model)) is not None:
            return (only,)
        powers = [2**k for k in range(_MOST_BATCH.bit_length())]
        return tuple(batch for batch in powers if self._fits(model, device, batch, share)) or (1,)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the measured shares, or else whole cores or tenths and MIG instances; the whole always."""
        measured = {point.share for point in self.known.list_points(model, device)}
        if len(measured) < 2:
            steps = (
                [100.0 * cores / device.compute_units for cores in range(1, device.compute_units + 1)]
                if device.kind == "cpu"
                else list(_GPU_SHARES)
            )
            measured |= {Share(step) for step in steps}
            measured |= {Share(100.0, profile.name) for profile in device.mig_profiles}
        return tuple(sorted(measured | {Share()}, key=lambda share: (device.fraction(share), share.mig or "")))

    def _estimate(self, identity: _Identity, workload: Workload, beside: tuple[Workload, ...]) -> Estimate:
        device, known = identity.device, self.known.find_model(workload.model)
        failed = known.failed_on(device.name)
        if failed and not known.has_run(device.name, workload):
            require_no_failure(device, workload, failed)
        latency, cv = self._alone(identity, workload)
        if beside:
            latency = self._colocations.beside(latency, device, workload, beside)
        pause = behaviour_after_pause(known, device, workload, cv)
        certain = latency.source in (MEASURED, INTERPOLATED) and known.weight_bytes is not None
        # Reading a file of hundreds of megabytes takes a second.
        work = None if certain else self.known.read_work(known)
        return Estimate(
            workload=workload,
            device=device.name,
            latency_ms=latency,
            latency_cv=cv,
            pause_factor=pause[0],
            pause_cv=pause[1],
            memory_bytes=self._memory(known, device, workload),
            weight_bytes=work.smallest.weight_bytes if known.weight_bytes is None and work else known.weight_bytes,
            creq_pct=self._creq(known, device, workload),
            dram_pct=figure_of(known, device, workload, "dram_pct"),
            l2_pct=figure_of(known, device, workload, "l2_pct"),
            power_w=figure_of(known, device, workload, "power_w"),
            variant=next((str(one) for one in known.variants.get(device.name, ())), None),
            unknown_ops=work.smallest.unknown_ops if work and latency.source not in (MEASURED, INTERPOLATED) else (),
        )

    def _creq(self, known: MeasuredModel, device: Device, workload: Workload) -> tuple[tuple[str, Figure], ...]:
        """Return the compute requirement by metric: as profiled, else of the whole GPU as its kernels will fill it."""
        if known.points.get(device.name) or known.others:
            columns = [(metric, figure_of(known, device, workload, column)) for metric, column in CREQ_METRICS.items()]
            return tuple((metric, figure) for metric, figure in columns if figure is not None)
        if (
            device.kind != "gpu"
            or workload.share != Share()
            or workload.processes > 1
            or self.known.read_work(known) is None
        ):
            return ()
        return self._unprofiled.predict(known, device, workload.batch)

    def _latency(self, identity: _Identity, workload: Workload) -> tuple[Figure, float]:
        """Return the latency alone and its coefficient of variation."""
        known = self.known.find_model(workload.model)
        if not known.points.get(identity.device.name) and known.others:
            found = self._latency_over_sizes(identity, known, workload)
            if found is not None:
                return found
        return self._latency_at_sizes(identity, known, workload)

    def _latency_over_sizes(
        self, identity: _Identity, known: MeasuredModel, workload: Workload
    ) -> tuple[Figure, float] | None:
        """Return the latency at sizes that were not measured: on the line between those that were, else carried over.

        None where no size was measured on the device, or neither is possible.
        """
        device = identity.device
        parts = blend_measured(known, device.name)
        if parts:
            each = [(*self._latency_at_sizes(identity, one, workload), weight) for one, weight in parts]
            figure = blend_figures([(latency, weight) for latency, _, weight in each])
            error = self._calibration(device).interpolation_error(0.0)
            return widen_by(figure, error), max(cv for _, cv, _ in each)
        return self._carry_over_sizes(identity, known, workload)

    def _carry_over_sizes(
        self, identity: _Identity, known: MeasuredModel, workload: Workload
    ) -> tuple[Figure, float] | None:
        """Return the latency scaled from the nearest sizes by what both take by the op costs."""
        device, share = identity.device, workload.share
        measured = [one for one in known.others if one.points.get(device.name)]
        if not measured:
            return None
        shape = self._shape(known, device)
        if shape is None:
            require_readable(known)
            said = " and ".join(sorted(describe_sizes(one.sizes) for one in measured))
            raise InputError(
                f"{known.model} was measured on {device.name} at {said}, which says nothing of "
                f"{describe_sizes(known.sizes)} without its ONNX file",
                f"gpuprof profile MODEL --dim {describe_sizes(known.sizes[:1])}, or give the file instead of the name",
            )
        asked_shape = shape(workload.batch, share)
        factors = []
        for neighbour_size in measured:
            other = self._shape(neighbour_size, device)
            if other is not None and asked_shape > 0.0 and (measured_shape := other(workload.batch, share)) > 0.0:
                factors.append((asked_shape / measured_shape, neighbour_size))
        if not factors:
            raise InputError(
                f"{known.model} was not measured at {describe_sizes(known.sizes)}, and its ops have nothing to count",
                f"gpuprof profile MODEL --dim {describe_sizes(known.sizes[:1])}",
            )
        factor, nearest = min(factors, key=lambda pair: (abs(math.log2(pair[0])), pair[1].name))
        latency, cv = self._latency_at_sizes(identity, nearest, workload)
        error = self._calibration(device).carried_error(abs(math.log2(factor)))
        return widen_by(replace(latency.scale_by(factor), source=EXTRAPOLATED), error), cv

    def _latency_at_sizes(self, identity: _Identity, known: MeasuredModel, workload: Workload) -> tuple[Figure, float]:
        """Return the latency from what was measured at the model's own sizes, and its coefficient of variation."""
        device = identity.device
        measured = sorted({point.processes for point in known.points.get(device.name, [])})
        if not measured:
            part = _part_of_one(workload.share, workload.processes)
            return self._predict_times(known, device, (workload.batch,), part)[0], 0.0
        processes = workload.processes if workload.processes in measured else measured[0]
        part = replace(workload.share, sm_pct=min(100.0, workload.share.sm_pct * processes / workload.processes))
        surface = self._surface(known, device, processes)
        reading = surface.read_latency(workload.batch, part, lambda: self._shape(known, device))
        point = surface.nearest(workload.batch, part)
        if processes != workload.processes or reading.source == EXTRAPOLATED:
            return self._extrapolate(known, device, workload, reading.value, point.relative_error), point.cv
        return self._with_interval(reading, point, device), point.cv

    def _extrapolate(
        self, known: MeasuredModel, device: Device, workload: Workload, value: float, measured_error: float
    ) -> Figure:
        """Return a figure beyond what was measured, within what the measurements leave open."""
        key = known.name, device.name
        if key not in self._envelopes:
            self._envelopes[key] = LatencyEnvelope(known.points[device.name], device)
        low, high = self._envelopes[key].interval(workload.batch, workload.share, workload.processes)
        low, high = low / (1.0 + measured_error), high * (1.0 + measured_error)
        return Figure(min(max(value, low), high), EXTRAPOLATED, low, high)

    def _with_interval(self, reading: Reading, point: Point, device: Device) -> Figure:
        error: float | None = point.relative_error or None
        if reading.source == INTERPOLATED:
            error = self._calibration(device).interpolation_error(point.relative_error)
        return figure_within(reading.value, reading.source, error)

    def _predict_times(
        self, known: MeasuredModel, device: Device, batches: Sequence[int], share: Share
    ) -> list[Figure]:
        """Return the times of batches of a model that was not measured on the device."""
        work = self.known.read_work(known)
        if work is None:
            if failed := known.failures.get(device.name):
                raise InputError(
                    f"every measurement of {known.name} on {device.name} failed, the last: {failed[-1]}",
                    "profile it again, at a smaller batch or under a larger share",
                )
            require_readable(known)
            raise InputError(
                f"{known.name} was not measured on {device.name} and its ONNX file is not there",
                f"give the file, or choose {' or '.join(sorted(known.points)) or 'a device it was measured on'}",
            )
        learned = self._learned(_Identity(device))
        if learned:
            figures = [learned.latency(self.known.bind_graph(known, batch), share) for batch in batches]
        else:
            figures = self._predict_unmeasured(known, work, device, batches, share)
        if any(one.value <= 0.0 for one in figures):  # nothing but views and constants, or strings of unknown bytes
            raise InputError(
                f"{known.name}: no op of it has FLOPs or bytes to count, so its time can only be measured",
                "gpuprof profile MODEL",
            )
        if not work.smallest.unknown_ops:
            return figures
        each = zip(figures, batches, strict=True)
        return [widen_interval(figure, unknown_ms(work.at(batch), device, share)) for figure, batch in each]

    def _predict_unmeasured(
        self, known: MeasuredModel, work: WorkByBatch, device: Device, batches: Sequence[int], share: Share
    ) -> list[Figure]:
        """Return what was learned on other GPUs, for a CPU the roofline; scaled by what other models took here."""
        calibration = self._calibration(device)
        if device.kind == "gpu":
            figures = self._cross_gpu.predict_series(known, device, batches, share)
            if any(one.value <= 0.0 for one in figures):
                return figures
            return [calibration.scale_prediction(one.value, one.source, one.upper() / one.value) for one in figures]
        widened = []
        for at in map(work.at, batches):
            figure = calibration.scale_prediction(roofline_ms(at, device, share), source_of(device))
            widened.append(widen_interval(figure, dispatch_ms(at, device) if figure.value > 0.0 else 0.0))
        return widened

    def _check_neighbours(self, device: Device, beside: Sequence[Workload]) -> None:
        for neighbour in beside:
            if neighbour.batch < 1 or neighbour.processes < 1:
                raise InputError(
                    f"batch and processes beside must be at least 1 but got {neighbour.batch}, {neighbour.processes}"
                )
            if not self._colocations.has_seen(device, neighbour.model):
                self.known.find_model(neighbour.model)

    def _running(self, device: Device, workload: Workload) -> Running | None:
        """Return how a workload behaves alone, for the interference models; None where nothing is known of it."""
        return self._behaviours(_Identity(device), workload)

    def _sm_utilization(self, device: Device, workload: Workload) -> float | None:
        """Return which part of the SMs a workload alone keeps busy, in percent; the upper end where it is predicted."""
        figures = dict(self._creq(self.known.find_model(workload.model), device, workload))
        figure = figures.get("wavg_sm_util")
        return None if figure is None else min(100.0, figure.value if figure.is_observed else figure.upper())

    def _behaviour(self, identity: _Identity, workload: Workload) -> Running | None:
        device = identity.device
        try:
            known = self.known.find_model(workload.model)
            alone = self._alone(identity, workload)[0].value
        except InputError:
            return None
        l2, dram = (estimate_bandwidth(known, device, workload, column, alone) for column in ("l2_pct", "dram_pct"))
        return Running(
            model=workload.model,
            batch=workload.batch,
            share=device.fraction(workload.share),
            solo_ms=alone,
            l2_pct=l2 or 0.0,
            dram_pct=self._traffic_pct(known, device, workload, alone) if dram is None else dram,
        )

    def _traffic_pct(self, known: MeasuredModel, device: Device, workload: Workload, alone_ms: float) -> float:
        """Return what the ops read and write over what the memory could deliver meanwhile, 0 without the graph."""
        work = self.known.read_work(known)
        if work is None:
            return 0.0
        moved = float(work.at(workload.batch).bytes_moved.sum()) * workload.processes
        return min(100.0, 100.0 * moved / (device.dram_bytes_per_s * alone_ms / 1e3))

    def _memory(self, known: MeasuredModel, device: Device, workload: Workload) -> Figure | None:
        """Return the peak memory: measured, a line in the batch or the sizes between, else weights and activations."""
        if not known.points.get(device.name):
            parts = blend_measured(known, device.name)
            each = [(self._memory(one, device, workload), weight) for one, weight in parts]
            if each and all(figure is not None for figure, _ in each):
                return blend_figures([(figure, weight) for figure, weight in each if figure is not None])
            if (beyond := self._memory_beyond(known, device, workload)) is not None:
                return beyond
        points = known.points.get(device.name, [])
        same = {p.batch: p.figures["memory_peak_bytes"] for p in points if "memory_peak_bytes" in p.figures}
        same |= {
            p.batch: p.figures["memory_peak_bytes"]
            for p in points
            if "memory_peak_bytes" in p.figures and p.share == workload.share and p.processes == workload.processes
        }
        if same:
            curve = BatchCurve(same)
            found = curve.at(workload.batch)
            return Figure(*found) if found else curve.extrapolate(workload.batch)
        work = self.known.read_work(known)
        if work is None:
            return None
        if (learned := self._learned(_Identity(device))) and learned.memory:
            return learned.memory_figure(self.known.bind_graph(known, workload.batch))
        at = work.at(workload.batch)
        if device.kind == "gpu":
            return predict_reserved(at.weight_bytes, at.activation_bytes)
        return Figure(at.weight_bytes + at.activation_bytes, source_of(device))

    def _memory_beyond(self, known: MeasuredModel, device: Device, workload: Workload) -> Figure | None:
        """Return what the nearest measured sizes take, and what the activations are more or less; None: unknown."""
        work = self.known.read_work(known)
        if work is None:
            return None
        activation_bytes = work.at(workload.batch).activation_bytes
        by_distance = []
        for one in known.others:
            figure = self._memory(one, device, workload) if one.points.get(device.name) else None
            if figure is not None and (other := self.known.read_work(one)) is not None:
                more = activation_bytes - other.at(workload.batch).activation_bytes
                by_distance.append((abs(more), Figure(max(figure.value + more, work.at(1).weight_bytes), EXTRAPOLATED)))
        return min(by_distance, key=lambda pair: pair[0])[1] if by_distance else None

    def _fits(self, model: str, device: Device, batch: int, share: Share) -> bool:
        memory = self._memory(self.known.find_model(model), device, Workload(model, batch, share))
        return memory is None or memory.value <= device.memory_bytes(share)

    def _surface(self, known: MeasuredModel, device: Device, processes: int) -> Surface:
        """Return what was measured of a model with so many processes, which some of its points have."""
        key = (known.name, device.name, processes)
        if key not in self._surfaces:
            points = [point for point in known.points[device.name] if point.processes == processes]
            self._surfaces[key] = Surface(points, device)
        return self._surfaces[key]

    def _calibration(self, device: Device) -> Calibration:
        if device.name not in self._calibrations:
            surfaces = {
                name: self._surface(known, device, 1)
                for name, known in self.known.select_comparable(device).items()
                if any(point.processes == 1 for point in known.points.get(device.name, []))
            }
            self._calibrations[device.name] = Calibration(
                surfaces, lambda name: self._shape(self.known.measured[name], device)
            )
        return self._calibrations[device.name]

    def _shape(self, known: MeasuredModel, device: Device) -> Callable[[int, Share], float] | None:
        work = self.known.read_work(known)
        if work is None:
            return None
        if device.kind == "gpu":
            return lambda batch, share: self._cross_gpu.predict(known, device, batch, share).value
        return lambda batch, share: roofline_ms(work.at(batch), device, share)


class _Identity:
    """A device as a key: hashed by its name, equal only when every number is."""

    __slots__ = ("device",)

    def __init__(self, device: Device) -> None:
        self.device = device

    def __hash__(self) -> int:
        return hash(self.device.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and (self.device is other.device or self.device == other.device)


def _part_of_one(share: Share, processes: int) -> Share:
    """Return the part of one process: they split the share evenly, each in its own part, and no more is known."""
    return share if processes == 1 else Share(share.sm_pct / processes, share.mig)
