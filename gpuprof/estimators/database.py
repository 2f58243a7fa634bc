"""The default estimator: measured by the kernel database, else interpolated or extrapolated, else predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    EXTRAPOLATED,
    INTERPOLATED,
    MEASURED,
    Estimate,
    Figure,
    PredictedRequirements,
    Workload,
    classify_source,
)
from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.domain.runtime_variant import Padding
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import describe_sizes
from gpuprof.errors import InputError
from gpuprof.estimators.constants import constant
from gpuprof.estimators.creq import UnprofiledRequirements
from gpuprof.estimators.cross_gpu.cross_gpu import MOST_BATCH, TENTHS, CrossGpuLatencies
from gpuprof.estimators.cross_gpu.kernels import Execution, type_of_weights
from gpuprof.estimators.cross_gpu.node_groups import CONVOLUTIONS, PRODUCTS, NodeGroups
from gpuprof.estimators.interference.colocation import Colocations, RunningWorkload
from gpuprof.estimators.measured.known_models import (
    KnownModels,
    padding_of,
    require_readable,
    require_success,
)
from gpuprof.estimators.measured.measured import (
    CREQ_METRICS,
    BatchCurve,
    Calibration,
    LatencyEnvelope,
    MeasuredModel,
    Point,
    Surface,
    behaviour_after_pause,
    blend_figures,
    blend_measured,
    estimate_bandwidth,
    figure_of,
    widen_by,
    widen_interval,
)
from gpuprof.estimators.memory import PROCESS, context_fraction, predict_held, predict_process, shrink_context
from gpuprof.estimators.roofline import WorkByBatch, dispatch_ms, roofline_ms, source_of, unknown_ms
from gpuprof.kernel_db.store import KernelDb
from gpuprof.runtime.batch_items import BatchVerdicts

if TYPE_CHECKING:  # scikit-learn takes a second to import
    from gpuprof.estimators.learned.learned import LearnedModel


class ModelLatencies:
    """Times of models that run alone, from the best available source for each.

    ``learned``: device → regressors trained for it, or None; preferred to the roofline; ``cross_gpu``: predictions for
    unmeasured GPUs.
    """

    def __init__(
        self, models: KnownModels, learned: Callable[[Device], LearnedModel | None], cross_gpu: CrossGpuLatencies
    ) -> None:
        self._known, self._learned, self._cross_gpu = models, learned, cross_gpu
        self._surfaces: dict[tuple[str, str, int], Surface] = {}
        self._envelopes: dict[tuple[str, str], LatencyEnvelope] = {}
        self._calibrations: dict[str, Calibration] = {}
        #: Latency and its variation by batch, for each device, model, share and number of processes.
        self._alone: dict[tuple[str, str, Share, int], dict[int, tuple[Figure, float]]] = {}

    def alone(self, device: Device, workload: Workload) -> tuple[Figure, float]:
        """Return the latency alone and its coefficient of variation."""
        return self.list_alone(device, workload, (workload.batch,))[0]

    def list_alone(self, device: Device, workload: Workload, batches: Sequence[int]) -> list[tuple[Figure, float]]:
        """Return the latencies alone, with their coefficients of variation, of a workload at each of the batches."""
        known = self._alone.setdefault((device.name, workload.model, workload.share, workload.processes), {})
        if missing := [batch for batch in batches if batch not in known]:
            known.update(zip(missing, self._find_alone(device, workload, missing), strict=True))
        return [known[batch] for batch in batches]

    def _find_alone(self, device: Device, workload: Workload, batches: Sequence[int]) -> list[tuple[Figure, float]]:
        record = self._known.find_model(workload.model)
        if record.points.get(device.name) or not any(peer.points.get(device.name) for peer in record.others):
            return self._at_sizes(device, record, workload, batches)
        return [self._over_sizes(device, record, replace(workload, batch=batch)) for batch in batches]

    def _over_sizes(self, device: Device, model: MeasuredModel, workload: Workload) -> tuple[Figure, float]:
        """Return the latency at unmeasured sizes: interpolated between measured sizes, else carried over."""
        parts = blend_measured(model, device.name)
        if parts:
            batches = (workload.batch,)
            each = [(*self._at_sizes(device, peer, workload, batches)[0], weight) for peer, weight in parts]
            figure = blend_figures([(latency, weight) for latency, _, weight in each])
            error = self.calibrate(device).interpolation_error
            return widen_by(figure, error), max(cv for _, cv, _ in each)
        return self._carry_over_sizes(device, model, workload)

    def _carry_over_sizes(self, device: Device, model: MeasuredModel, workload: Workload) -> tuple[Figure, float]:
        """Return the latency at the nearest sizes, scaled by the ratio of the op costs."""
        share = workload.share
        measured = [peer for peer in model.others if peer.points.get(device.name)]
        shape = self._shape(model, device)
        if shape is None:
            require_readable(model)
            sizes = " and ".join(sorted(describe_sizes(peer.sizes) for peer in measured))
            raise InputError(
                f"{model.model} was measured on {device.name} at {sizes}, which says nothing of "
                f"{describe_sizes(model.sizes)} without its ONNX file",
                f"gpuprof profile MODEL --dim {describe_sizes(model.sizes[:1])}, or give the file instead of the name",
            )
        target_cost = shape(workload.batch, share)
        factors = []
        for neighbour_size in measured:
            cost = self._shape(neighbour_size, device)
            if cost is not None and target_cost > 0.0 and (peer_cost := cost(workload.batch, share)) > 0.0:
                factors.append((target_cost / peer_cost, neighbour_size))
        if not factors:
            raise InputError(
                f"{model.model} was not measured at {describe_sizes(model.sizes)}, and its ops have nothing to count",
                f"gpuprof profile MODEL --dim {describe_sizes(model.sizes[:1])}",
            )
        factor, nearest = min(factors, key=lambda pair: (abs(math.log2(pair[0])), pair[1].name))
        latency, cv = self._at_sizes(device, nearest, workload, (workload.batch,))[0]
        error = self.calibrate(device).carried_error(abs(math.log2(factor)))
        return widen_by(replace(latency.scale_by(factor), source=EXTRAPOLATED), error), cv

    def _at_sizes(
        self, device: Device, model: MeasuredModel, workload: Workload, batches: Sequence[int]
    ) -> list[tuple[Figure, float]]:
        """Return the latencies at the batches from measurements at the model's own sizes, with their variations."""
        points = model.points.get(device.name)
        if not points:
            part = part_of_one(workload.share, workload.processes)
            return [(latency, 0.0) for latency in self.predict(model, device, batches, part)]
        part, processes = workload.share, workload.processes
        if not any(point.processes == processes for point in points):
            processes = min(point.processes for point in points)
            part = replace(part, sm_pct=min(100.0, part.sm_pct * processes / workload.processes))
        surface, figures = self._surface(model, device, processes), []
        readings = surface.read_latencies(batches, part, lambda: self._shape(model, device))
        is_extrapolated = [processes != workload.processes or source == EXTRAPOLATED for _, source, _ in readings]
        intervals = [(0.0, math.inf)] * len(batches)
        if any(is_extrapolated):
            intervals = self._envelope(model, device).intervals(batches, workload.share, workload.processes)
        for (value, source, point), is_beyond, interval in zip(readings, is_extrapolated, intervals, strict=True):
            if is_beyond:
                figure = _clip_figure(value, interval, point)
            else:
                figure = Figure(value, point.mark_source(source), *point.ends_of(value))
                if source == INTERPOLATED:
                    figure = widen_by(figure, self.calibrate(device).interpolation_error)
            figures.append((figure, point.cv))
        return figures

    def _envelope(self, model: MeasuredModel, device: Device) -> LatencyEnvelope:
        key = model.name, device.name
        if key not in self._envelopes:
            self._envelopes[key] = LatencyEnvelope(model.points[device.name], device)
        return self._envelopes[key]

    def predict(self, model: MeasuredModel, device: Device, batches: Sequence[int], share: Share) -> list[Figure]:
        """Return the times of batches of a model without measurements on the device."""
        from gpuprof.graph.nodes import HOLDING_GRAPHS

        work = self._known.read_work(model)
        if work is None:
            require_success(model.name, device, model.failures.get(device.name, ()))
            require_readable(model)
            raise InputError(
                f"{model.name} was not measured on {device.name} and its ONNX file is not there",
                f"give the file, or choose {' or '.join(sorted(model.points)) or 'a device it was measured on'}",
            )
        learned = self._learned(device)
        if learned and learned.times:
            figures = [learned.latency(self._known.bind_graph(model, batch), share) for batch in batches]
        else:
            figures = self._predict_unmeasured(model, work, device, batches, share)
        # Only views and constants, strings of unknown bytes, or ops that nothing is known of. Of a loop without a count
        # of turns, one turn is known.
        unknown = set(work.smallest.unknown_ops) - HOLDING_GRAPHS
        if any(figure.value <= 0.0 for figure in figures) or unknown >= set(work.smallest.op_types):
            raise InputError(
                f"{model.name}: none of its ops takes a time that can be predicted, so that it can only be measured",
                "gpuprof profile MODEL",
            )
        if not work.smallest.unknown_ops:
            return figures
        each = zip(figures, batches, strict=True)
        return [widen_interval(figure, unknown_ms(work.at(batch), device, share)) for figure, batch in each]

    def _predict_unmeasured(
        self, model: MeasuredModel, work: WorkByBatch, device: Device, batches: Sequence[int], share: Share
    ) -> list[Figure]:
        """Return predictions learned on other GPUs, on a CPU the roofline, scaled by this device's measured models."""
        calibration = self.calibrate(device)
        if device.kind == "gpu":
            return [*map(calibration.scale_figure, self._cross_gpu.predict_series(model, device, batches, share))]
        widened = []
        for at in map(work.at, batches):
            figure = calibration.scale_prediction(roofline_ms(at, device, share), source_of(device))
            widened.append(widen_interval(figure, dispatch_ms(at, device) if figure.value > 0.0 else 0.0))
        return widened

    def board_work(self, model: MeasuredModel, device: Device) -> Figure | None:
        """Return a lower bound of the whole GPU's time per request in ms, None where regressors were trained for it.

        Raises `InputError` when the device lacks the precision.
        """
        if (learned := self._learned(device)) and learned.times:
            return None
        return self.calibrate(device).scale_figure(self._cross_gpu.board_seconds(model, device).scale_by(1e3))

    def _surface(self, model: MeasuredModel, device: Device, processes: int) -> Surface:
        """Return the measurements of a model with ``processes`` processes; some points must have this number."""
        key = (model.name, device.name, processes)
        if key not in self._surfaces:
            points = [point for point in model.points[device.name] if point.processes == processes]
            self._surfaces[key] = Surface(points, device)
        return self._surfaces[key]

    def calibrate(self, device: Device) -> Calibration:
        """Return the errors of figures on a device, fitted to the models measured on it."""
        if device.name not in self._calibrations:
            surfaces = {
                name: self._surface(record, device, 1)
                for name, record in self._known.select_comparable(device).items()
                if any(point.processes == 1 for point in record.points.get(device.name, []))
            }
            self._calibrations[device.name] = Calibration(
                surfaces, lambda name: self._shape(self._known.measured[name], device)
            )
        return self._calibrations[device.name]

    def _shape(self, model: MeasuredModel, device: Device) -> Callable[[int, Share], float] | None:
        work = self._known.read_work(model)
        if work is None:
            return None
        if device.kind == "gpu":
            return lambda batch, share: self._cross_gpu.predict(model, device, batch, share).value
        return lambda batch, share: roofline_ms(work.at(batch), device, share)


def _clip_figure(value: float, interval: tuple[float, float], nearest: Point) -> Figure:
    """Return an extrapolated figure, clipped to the bounds from the measurements."""
    low, high = interval
    low, high = nearest.ends_of(low)[0] or low, nearest.ends_of(high)[1] or high
    return Figure(min(max(value, low), high), nearest.mark_source(EXTRAPOLATED), low, high)


def part_of_one(share: Share, processes: int) -> Share:
    """Return the share of one process: processes are assumed to split the share evenly.

    Examples
    --------
    >>> part_of_one(Share(50.0), 2).sm_pct
    25.0
    """
    return share if processes == 1 else Share(share.sm_pct / processes, share.mig)


#: Types that a runtime converts to the chosen precision; narrower types and integers stay.
_CHANGED = frozenset({"float64", "float32", "float16", "bfloat16"})
#: Catalogue's name of a precision → type of activations and of products' weights, where it is another.
_GENERAL = {"tfloat32": "float32", "float8": "float16", "int8": "float16"}
_OPERAND = {"tfloat32": "float32", "float8": "float8e4m3fn"}
#: Precisions with attention as a single kernel.
NARROW = frozenset({"float16", "bfloat16", "float8", "int8"})


def hold_graph(graph: ModelGraph, precision: str, *, retyped: bool) -> ModelGraph:
    """Return the graph with tensors in the types that a runtime holds in memory for products in ``precision``.

    ``retyped``: whether the precision differs from the file's, so that weights and activations change type.
    """
    ops = _join_attention(graph.ops) if precision in NARROW else graph.ops
    if not retyped:
        return replace(graph, ops=ops)
    general, operand = _GENERAL.get(precision, precision), _OPERAND.get(precision, precision)
    multiplied = {weight.name for op in ops if op.op_type in PRODUCTS | CONVOLUTIONS for weight in op.weights}

    def retype(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        types = (
            (tensor, operand if tensor.name in multiplied and len(tensor.shape) > 1 else general) for tensor in tensors
        )
        return tuple(replace(tensor, dtype=dtype) if tensor.dtype in _CHANGED else tensor for tensor, dtype in types)

    changed = (replace(op, inputs=retype(op.inputs), outputs=retype(op.outputs)) for op in ops)
    inputs, outputs = retype(graph.inputs), retype(graph.outputs)
    return replace(graph, ops=tuple(changed), inputs=inputs, outputs=outputs, weights=retype(graph.weights))


def _join_attention(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return the ops with the ops of each attention replaced by a single op that reads all their outside inputs."""
    joined: dict[int, Op] = {}
    inside: set[int] = set()
    for last, group in NodeGroups(ops, fused=False, narrow=True).attention.items():
        outputs = {tensor.name for place in group for tensor in ops[place].outputs}
        inputs = {t.name: t for place in sorted(group) for t in ops[place].inputs if t.name not in outputs}
        joined[last] = replace(ops[last], inputs=tuple(inputs.values()))
        inside.update(group)
    return tuple(joined.get(place, op) for place, op in enumerate(ops) if place not in inside or place in joined)


class ModelMemory:
    """Peak memory of one process of a model, from the best available source for each.

    ``learned``: device → regressors trained for it, or None; preferred to the sum of weights and activations;
    ``execution``: precision and runtime of models on unmeasured GPUs.
    """

    def __init__(
        self, models: KnownModels, learned: Callable[[Device], LearnedModel | None], execution: Execution | None = None
    ) -> None:
        self._known, self._learned, self._execution = models, learned, execution or Execution()
        self._held: dict[tuple[str, str], WorkByBatch] = {}
        self._reserved: dict[tuple[str, str, int], Figure] = {}
        self._types: dict[str, str] = {}

    def peak(self, model: MeasuredModel, device: Device, workload: Workload) -> Figure | None:
        """Return the peak memory: measured, linear in the batch or between sizes, else from weights and activations."""
        if not model.points.get(device.name) and not model.others:
            return self._predict(model, device, workload)
        if not model.points.get(device.name):
            parts = blend_measured(model, device.name)
            each = [(self.peak(sized_model, device, workload), weight) for sized_model, weight in parts]
            if each and all(figure is not None for figure, _ in each):
                return blend_figures([(figure, weight) for figure, weight in each if figure is not None])
            if (beyond := self._beyond_sizes(model, device, workload)) is not None:
                return beyond
        own = model.read_series(device.name, workload.share, workload.processes)
        points = model.points.get(device.name, ())
        same = {}
        for point in own.values() if workload.batch in own else (*points, *own.values()):
            if "memory_peak_bytes" in point.figures:
                same[point.batch] = point.figures["memory_peak_bytes"]
        if same:
            curve = BatchCurve(same)
            reading = curve.at(workload.batch)
            return Figure(*reading) if reading else curve.extrapolate(workload.batch)
        return self._predict(model, device, workload)

    def context_bytes(self, device: Device, memory: Figure | None, weight_bytes: int, workload: Workload) -> int:
        """Return the part of the peak memory that is the context of a process on a GPU, 0 where it is unknown.

        A prediction from weights and activations includes a constant one. Measurements do not separate the context, so
        the smallest is assumed, where the figure can include one; an allocator's figures do not.
        """
        if device.kind != "gpu" or memory is None:
            return 0
        fraction = context_fraction(device.granted_fraction(part_of_one(workload.share, workload.processes)))
        if memory.source.startswith(PROCESS):
            return int(fraction * constant("memory", "process_bytes"))
        least = int(fraction * constant("memory", "least_process_bytes"))
        return least if memory.is_observed and memory.value - weight_bytes >= least else 0

    def _predict(self, model: MeasuredModel, device: Device, workload: Workload) -> Figure | None:
        """Return the memory of weights, activations and, on a GPU, the context; None without the model's file."""
        batch = workload.batch
        work = self._known.read_work(model)
        if work is None:
            return None
        if (learned := self._learned(device)) and learned.memory:
            return learned.memory_figure(self._known.bind_graph(model, batch))
        if device.kind != "gpu":
            at = work.at(batch)
            return Figure(at.weight_bytes + at.activation_bytes, source_of(device))
        if model.name not in self._types:
            self._types[model.name] = type_of_weights(work.graph)
        precision = self._execution.rate_name(device, self._types[model.name])
        key = model.name, precision, batch
        if key not in self._reserved:  # a plan asks for each batch under dozens of shares
            at = self._hold(model, work, precision).at(batch)
            predict = predict_held if self._execution.runtime.is_onnxruntime else predict_process
            self._reserved[key] = predict(at.weight_bytes, at.activation_bytes, self._execution.precision)
        return shrink_context(
            self._reserved[key], device.granted_fraction(part_of_one(workload.share, workload.processes))
        )

    def _hold(self, model: MeasuredModel, work: WorkByBatch, precision: str) -> WorkByBatch:
        """Return the work of a model with the tensors in memory in ``precision``."""
        retyped = self._execution.precision is not None
        if not (retyped or precision in NARROW):
            return work
        key = model.name, precision
        if key not in self._held:

            def bind_held(batch: int) -> ModelGraph:
                return hold_graph(self._known.bind_graph(model, batch), precision, retyped=retyped)

            self._held[key] = WorkByBatch(bind_held, work.smallest_batch)
        return self._held[key]

    def _beyond_sizes(self, model: MeasuredModel, device: Device, workload: Workload) -> Figure | None:
        """Return the memory at the nearest measured sizes plus the difference in activations; None where unknown."""
        work = self._known.read_work(model)
        if work is None:
            return None
        activation_bytes = work.at(workload.batch).activation_bytes
        by_distance = []
        for peer in model.others:
            figure = self.peak(peer, device, workload) if peer.points.get(device.name) else None
            if figure is not None and (sibling_work := self._known.read_work(peer)) is not None:
                more = activation_bytes - sibling_work.at(workload.batch).activation_bytes
                by_distance.append((abs(more), Figure(max(figure.value + more, work.at(1).weight_bytes), EXTRAPOLATED)))
        return min(by_distance, key=lambda pair: pair[0])[1] if by_distance else None

    def fits(self, model: MeasuredModel, device: Device, batch: int, share: Share) -> bool:
        """Return whether a batch fits into the memory of a share; true where its memory is unknown."""
        memory = self.peak(model, device, Workload(model.model, batch, share))
        return memory is None or memory.value <= device.memory_bytes(share)


class DatabaseEstimator:
    """Implements `gpuprof.domain.estimate.Estimator`.

    Parameters
    ----------
    db : KernelDb or None
        None: no measurements, every figure is predicted.
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
        behaviour = lru_cache(maxsize=200_000)(self._behaviour)
        self.colocations = Colocations(db, behaviour, contents, variants, self._sm_utilization)
        execution = self._execution = execution or Execution()
        cross_gpu = CrossGpuLatencies(execution, self.known.bind_graph, busy=not alone)
        self._learned: Callable[[Device], LearnedModel | None] = cache(learned)
        self._latencies = ModelLatencies(self.known, self._learned, cross_gpu)
        self._memory = ModelMemory(self.known, self._learned, execution)
        self._unprofiled = UnprofiledRequirements(cross_gpu)
        # Caches of this object: caches of the methods themselves would keep every estimator alive.
        self._answer = lru_cache(maxsize=200_000)(self._estimate)
        self._fitting = lru_cache(maxsize=200_000)(self._list_fitting)

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
        return self._answer(device, Workload(model, batch, share, processes), tuple(beside))

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the times of `estimate` at each of the batches, without its other figures.

        Raises `InputError` as `estimate` does for any of them.
        """
        if type(self).estimate is not DatabaseEstimator.estimate:  # a subclass may override `estimate`
            return tuple(self.estimate(model, device, batch, share, (), processes).latency_ms for batch in batches)
        record, workload = self.known.find_model(model), Workload(model, max(batches), share, processes)
        if self.known.find_least_failure(record, device, share, processes) is not None:
            for batch in batches:
                self.known.require_no_failure(record, device, replace(workload, batch=batch), ())
        return tuple(latency for latency, _ in self._latencies.list_alone(device, workload, batches))

    def board_work_ms(self, model: str, device: Device) -> Figure | None:
        """Return a lower bound of the whole device's time per request; see `gpuprof.domain.estimate`.

        For a model measured on the device: the time under the share with the most work for its size.
        """
        record = self.known.find_model(model)
        if points := record.points.get(device.name):
            times = (p.latency_ms * device.fraction(p.share) / (p.batch * p.processes) for p in points)
            return Figure(min(times), MEASURED)
        if device.kind != "gpu" or record.others or self.known.read_work(record) is None:
            return None
        return self._latencies.board_work(record, device)

    def least_beside(self, model: str, device: Device, alone: Figure) -> Figure:
        """Return a lower bound of the time of a batch beside any neighbours; see `gpuprof.domain.estimate`."""
        return self.colocations.least_beside(alone, device)

    def list_ratios(self, device: Device) -> Mapping[str, Sequence[float]]:
        """Return measured over predicted times by model, which scale the predictions for other models on a device."""
        return self._latencies.calibrate(device).ratios

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
        return self._fitting(device, model, share.mig)

    def _list_fitting(self, device: Device, model: str, mig: str | None) -> tuple[int, ...]:
        """Return the powers of two that fit: without measurements, memory does not depend on the share."""
        record, share = self.known.find_model(model), Share(mig=mig)
        powers = [2**k for k in range(MOST_BATCH.bit_length())]
        return tuple(batch for batch in powers if self._memory.fits(record, device, batch, share)) or (1,)

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

    def _estimate(self, device: Device, workload: Workload, beside: tuple[Workload, ...]) -> Estimate:
        record = self.known.find_model(workload.model)
        self.known.require_no_failure(record, device, workload, beside)
        if beside:
            # A plan asks for a workload beside thousands of others: all figures but its time stay as alone.
            alone = self._answer(device, workload, ())
            latency = self.colocations.beside(alone.latency_ms, device, workload, beside)
            return replace(alone, latency_ms=latency, unknown_ops=self._list_unknown(record, latency))
        latency, cv = self._latencies.alone(device, workload)
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
        """Return the ops of unknown cost if they make the time uncertain."""
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
        """Return each requirement from launches, corrected by trained regressors if there are any."""
        figures = dict(self._unprofiled.predict(model, device, batch))
        if (learned := self._learned(device)) is not None:
            graph = self.known.bind_graph(model, batch)
            launched = {metric: figure.value for metric, figure in figures.items()}
            trained = {metric: learned.creq_figure(metric, graph, launched) for metric in CREQ_METRICS}
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

    def _sm_utilization(self, device: Device, workload: Workload) -> float | None:
        """Return the SM utilisation of a workload alone, in percent; the upper end where predicted."""
        figures = dict(self._creq(self.known.find_model(workload.model), device, workload))
        figure = figures.get("wavg_sm_util")
        return None if figure is None else min(100.0, figure.value if figure.is_observed else figure.upper())

    def _behaviour(self, device: Device, workload: Workload) -> RunningWorkload | None:
        """Return the resource use of a workload alone, for the interference models; None where unknown."""
        try:
            record = self.known.find_model(workload.model)
            alone = self._latencies.alone(device, workload)[0].value
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
        """Return the ops' DRAM traffic in percent of the memory's capacity during the batch; 0 without the graph."""
        work = self.known.read_work(model)
        if work is None:
            return 0.0
        bytes_moved = float(work.at(workload.batch).bytes_moved.sum()) * workload.processes
        return min(100.0, 100.0 * bytes_moved / (device.dram_bytes_per_s * alone_ms / 1e3))
