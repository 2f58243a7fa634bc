"""Batch times of a model alone: measured, else interpolated or extrapolated, else predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import EXTRAPOLATED, INTERPOLATED, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import describe_sizes
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuLatencies
from gpuprof.estimators.measured.failures import require_success
from gpuprof.estimators.measured.known_models import KnownModels, require_readable
from gpuprof.estimators.measured.measured import MeasuredModel, Point, blend_measured
from gpuprof.estimators.measured.surface import (
    Calibration,
    LatencyEnvelope,
    Surface,
    blend_figures,
    figure_within,
    widen_by,
    widen_interval,
)
from gpuprof.estimators.roofline import dispatch_ms, roofline_ms, source_of, unknown_ms

if TYPE_CHECKING:  # scikit-learn takes a second to import
    from gpuprof.estimators.learned.learned import LearnedModel
    from gpuprof.estimators.roofline import WorkByBatch


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

    def alone(self, device: Device, workload: Workload) -> tuple[Figure, float]:
        """Return the latency alone and its coefficient of variation."""
        record = self._known.find_model(workload.model)
        if not record.points.get(device.name) and record.others:
            figure_and_cv = self._over_sizes(device, record, workload)
            if figure_and_cv is not None:
                return figure_and_cv
        return self._at_sizes(device, record, workload)

    def _over_sizes(self, device: Device, model: MeasuredModel, workload: Workload) -> tuple[Figure, float] | None:
        """Return the latency at unmeasured sizes: interpolated between measured sizes, else carried over.

        None where no size was measured on the device, or neither is possible.
        """
        parts = blend_measured(model, device.name)
        if parts:
            each = [(*self._at_sizes(device, sized_model, workload), weight) for sized_model, weight in parts]
            figure = blend_figures([(latency, weight) for latency, _, weight in each])
            error = self._calibration(device).interpolation_error(0.0)
            return widen_by(figure, error), max(cv for _, cv, _ in each)
        return self._carry_over_sizes(device, model, workload)

    def _carry_over_sizes(
        self, device: Device, model: MeasuredModel, workload: Workload
    ) -> tuple[Figure, float] | None:
        """Return the latency at the nearest sizes, scaled by the ratio of the op costs."""
        share = workload.share
        measured = [peer for peer in model.others if peer.points.get(device.name)]
        if not measured:
            return None
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
        latency, cv = self._at_sizes(device, nearest, workload)
        error = self._calibration(device).carried_error(abs(math.log2(factor)))
        return widen_by(replace(latency.scale_by(factor), source=EXTRAPOLATED), error), cv

    def _at_sizes(self, device: Device, model: MeasuredModel, workload: Workload) -> tuple[Figure, float]:
        """Return the latency from measurements at the model's own sizes, and its coefficient of variation."""
        measured = sorted({point.processes for point in model.points.get(device.name, [])})
        if not measured:
            part = part_of_one(workload.share, workload.processes)
            return self.predict(model, device, (workload.batch,), part)[0], 0.0
        processes = workload.processes if workload.processes in measured else measured[0]
        part = replace(workload.share, sm_pct=min(100.0, workload.share.sm_pct * processes / workload.processes))
        surface = self._surface(model, device, processes)
        value, source = surface.read_latency(workload.batch, part, lambda: self._shape(model, device))
        point = surface.nearest(workload.batch, part)
        if processes != workload.processes or source == EXTRAPOLATED:
            figure = self._extrapolate(model, device, workload, value, point)
            return replace(figure, source=point.mark_source(figure.source)), point.cv
        if source == INTERPOLATED:
            error = self._calibration(device).interpolation_error(max(point.relative_error, point.low_error or 0.0))
            return figure_within(value, point.mark_source(source), error), point.cv
        return Figure(value, point.mark_source(source), *point.ends_of(value)), point.cv

    def _extrapolate(
        self, model: MeasuredModel, device: Device, workload: Workload, value: float, nearest: Point
    ) -> Figure:
        """Return an extrapolated figure, clipped to the bounds from the measurements."""
        key = model.name, device.name
        if key not in self._envelopes:
            self._envelopes[key] = LatencyEnvelope(model.points[device.name], device)
        low, high = self._envelopes[key].interval(workload.batch, workload.share, workload.processes)
        low, high = nearest.ends_of(low)[0] or low, nearest.ends_of(high)[1] or high
        return Figure(min(max(value, low), high), EXTRAPOLATED, low, high)

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
        calibration = self._calibration(device)
        if device.kind == "gpu":
            return [*map(calibration.scale_figure, self._cross_gpu.predict_series(model, device, batches, share))]
        widened = []
        for at in map(work.at, batches):
            figure = calibration.scale_prediction(roofline_ms(at, device, share), source_of(device))
            widened.append(widen_interval(figure, dispatch_ms(at, device) if figure.value > 0.0 else 0.0))
        return widened

    def board_work(self, model: MeasuredModel, device: Device) -> Figure | None:
        """Return the least time of a whole GPU per request in ms, None where regressors were trained for it.

        Raises `InputError` when the device lacks the precision.
        """
        if (learned := self._learned(device)) and learned.times:
            return None
        return self._calibration(device).scale_figure(self._cross_gpu.board_seconds(model, device).scale_by(1e3))

    def list_ratios(self, device: Device) -> Mapping[str, Sequence[float]]:
        """Return measured over predicted times of the models measured on a device, which scale its predictions."""
        return self._calibration(device).ratios

    def _surface(self, model: MeasuredModel, device: Device, processes: int) -> Surface:
        """Return the measurements of a model with ``processes`` processes; some points must have this number."""
        key = (model.name, device.name, processes)
        if key not in self._surfaces:
            points = [point for point in model.points[device.name] if point.processes == processes]
            self._surfaces[key] = Surface(points, device)
        return self._surfaces[key]

    def _calibration(self, device: Device) -> Calibration:
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


def part_of_one(share: Share, processes: int) -> Share:
    """Return the share of one process: processes are assumed to split the share evenly.

    Examples
    --------
    >>> part_of_one(Share(50.0), 2).sm_pct
    25.0
    """
    return share if processes == 1 else Share(share.sm_pct / processes, share.mig)
