"""Errors of interpolation and of the roofline on a device, from its measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from gpuprof.domain.estimate import Figure
from gpuprof.estimators.conformal import (
    ENOUGH_MODELS,
    LEVEL,
    common_factor,
    interval_factor,
    left_out_residuals,
    quantile,
)
from gpuprof.estimators.constants import constant
from gpuprof.estimators.measured.surface import Shape, Surface

_LEAST = 0.01


class Calibration:
    """Errors of interpolation, extrapolation and predictions on a device, fitted to its measurements.

    ``surfaces``: measurements with one process by model name. ``shape_of``: returns a model's roofline in ms by batch
    size and share, None without a graph; called only to scale a roofline, because it reads the file.
    """

    def __init__(self, surfaces: Mapping[str, Surface], shape_of: Callable[[str], Shape | None]) -> None:
        self._surfaces = surfaces
        self._shape_of = shape_of

    def interpolation_error(self, measured_error: float) -> float:
        """Return the half-width of an interpolated value's 90% interval, as a fraction of the value.

        ``measured_error``: relative error of the measurements.
        """
        return max(self._between, _LEAST) + measured_error

    def scale_prediction(self, least_ms: float, source: str) -> Figure:
        """Return the figure for a roofline of ``least_ms``, scaled by the device's ratio of measurement to roofline.

        From four measured models on, the interval is conformal: each model's ratio is compared with that of the others.
        With fewer models it is the spread of published measurements on two GPUs, and without models their range, which
        guarantees nothing on other kinds of devices.
        """
        if not self.ratios:
            low, high = (constant("published", f"roofline_{end}") for end in ("low", "high"))
            return Figure(least_ms, source, least_ms * low, least_ms * high)
        return self._scale_by_models(least_ms, source, constant("published", "roofline_spread"))

    def scale_figure(self, figure: Figure) -> Figure:
        """Return a prediction learned on other devices, scaled like a roofline by the models measured
        on this device.
        """
        if not self.ratios or figure.value <= 0.0:
            return figure
        return self._scale_by_models(figure.value, figure.source, figure.upper() / figure.value)

    def _scale_by_models(self, predicted_ms: float, source: str, spread: float) -> Figure:
        value = predicted_ms * common_factor(self.ratios)
        if len(self.ratios) >= ENOUGH_MODELS:
            spread = interval_factor(left_out_residuals(self.ratios)) or 1.0
        return Figure(value, source, value / spread, value * spread)

    @cached_property
    def _between(self) -> float:
        errors = [e for s in self._surfaces.values() for c in s.curves.values() for e in c.left_out_errors()]
        error = quantile(errors, LEVEL) if len(errors) >= 5 else None
        return constant("published", "interpolation_error") if error is None else error

    def carried_error(self, doublings: float) -> float:
        """Return half of the 90% interval over the value, for figures carried over from other sizes."""
        return max(self._beyond, _LEAST) * max(1.0, doublings)

    @cached_property
    def _beyond(self) -> float:
        errors = [e for s in self._surfaces.values() for c in s.curves.values() for e in c.end_errors()]
        error = quantile(errors, LEVEL) if len(errors) >= 5 else None
        return constant("published", "extrapolation_error") if error is None else error

    @cached_property
    def ratios(self) -> dict[str, list[float]]:
        """Ratios of measured to roofline time by model name, without models whose roofline is zero."""
        shapes = {name: self._shape_of(name) for name in self._surfaces}
        ratios = {
            name: [
                point.latency_ms / least
                for point in self._surfaces[name].points.values()
                if (least := shape(point.batch, point.share)) > 0.0
            ]
            for name, shape in shapes.items()
            if shape is not None
        }
        return {name: values for name, values in ratios.items() if values}
