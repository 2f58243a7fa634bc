"""Selects a device's interference model: the one with the least error on its measured co-locations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpuprof.estimators.igniter.igniter import HardwareCoefficients, WorkloadCoefficients
from gpuprof.estimators.interference.judgement import ENOUGH_ROWS, by_pair, by_victim, leave_models_out, ratios
from gpuprof.estimators.interference.models import (
    ColocatedWorkload,
    ConstantInterference,
    ContentionModel,
    IgniterInterference,
    InterferenceModel,
    LinearInterference,
    NoInterference,
    TrafficInterference,
)
from gpuprof.estimators.measured.curve import quantile

Coefficients = tuple[HardwareCoefficients, Mapping[str, WorkloadCoefficients]]

#: What a slowdown may be off where nothing was co-located on the device: iGniter's predictions of the published pairs
#: of a V100 are within this in nine of ten.
_UNTESTED = 1.12


@dataclass(frozen=True, slots=True)
class RankedModel:
    """A model fitted to everything, and how far off it was for what it had not seen."""

    name: str
    model: InterferenceModel
    #: ``"model"``: what was left out of the fit, as victim and as neighbour, and then predicted; where fewer than three
    #: models were co-located ``"victim"`` or ``"pair"``; ``"everything"``: nothing was measured, the coefficients come
    #: from profiles of models alone.
    left_out: str
    rows: int
    #: ``mean_pct``, ``p95_pct``: Absolute relative error of the latency.
    mean_pct: float | None
    p95_pct: float | None
    #: ``low``, ``high``: Nine of ten measured latencies were between these multiples of the predicted one. With models
    #: left out, nineteen of twenty are asked for: a model is off as a whole, and there are few of them.
    low: float
    high: float

    @property
    def learns(self) -> bool:
        """Whether it speaks from co-locations, and so of nothing beyond them; iGniter's model does from profiles."""
        return self.name in ("linear", "traffic", "contention", "constant")


def rank_interference_models(
    measured: Sequence[ColocatedWorkload], coefficients: Coefficients | None
) -> tuple[RankedModel, ...]:
    """Return the models that can be evaluated on a device, by ascending error.

    ``measured``: of one device; ``coefficients``: of the same device; without them, iGniter's model and ours for GPUs
    are not asked.
    """
    makes = _candidates(coefficients)
    left_out = _choose_left_out(measured)
    if left_out is None:
        if coefficients is None:
            return ()
        return (RankedModel("igniter", makes["igniter"](), "everything", 0, None, None, 1.0 / _UNTESTED, _UNTESTED),)
    judged = []
    for name, make in makes.items():
        try:
            judged.append(_judge_model(name, make, measured, left_out))
        except KeyError:  # a model that was never calibrated
            continue
    return tuple(sorted(judged, key=lambda one: one.mean_pct or 0.0))


def _candidates(coefficients: Coefficients | None) -> dict[str, Callable[[], InterferenceModel]]:
    makes: dict[str, Callable[[], InterferenceModel]] = {
        "none": NoInterference,
        "constant": ConstantInterference,
        "linear": LinearInterference,
        "traffic": TrafficInterference,
    }
    if coefficients is not None:
        hardware, workloads = coefficients
        makes["igniter"] = lambda: IgniterInterference(hardware, workloads)
        makes["contention"] = lambda: ContentionModel(hardware)
    return makes


def _choose_left_out(measured: Sequence[ColocatedWorkload]) -> str | None:
    if len(measured) < ENOUGH_ROWS:
        return None
    if leave_models_out(NoInterference, measured):
        return "model"
    if len({by_victim(row) for row in measured}) > 1:
        return "victim"
    return "pair" if len({by_pair(row) for row in measured}) > 1 else None


def _judge_model(
    name: str, make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload], left_out: str
) -> RankedModel:
    if left_out == "model":
        ratios_found = [row.ratio for row in leave_models_out(make, measured)]
        high = quantile((max(ratio, 1.0 / ratio) for ratio in ratios_found), 0.95) or 1.0
        low = 1.0 / high
    else:
        ratios_found = ratios(make, measured, left_out)
        high = quantile(ratios_found, 0.95) or 1.0
        low = 1.0 / (quantile((1.0 / ratio for ratio in ratios_found), 0.95) or 1.0)
    error = 100.0 * np.abs(1.0 / np.array(ratios_found) - 1.0)
    return RankedModel(
        name,
        make().fit(measured),
        left_out,
        len(ratios_found),
        float(error.mean()),
        float(np.percentile(error, 95)),
        min(low, 1.0),
        max(high, 1.0),
    )
