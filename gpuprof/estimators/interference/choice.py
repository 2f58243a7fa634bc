"""Selects a device's interference model, by the least error on its measured co-locations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpuprof.estimators.conformal import quantile
from gpuprof.estimators.igniter.igniter import HardwareCoefficients, WorkloadCoefficients
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

Coefficients = tuple[HardwareCoefficients, Mapping[str, WorkloadCoefficients]]

#: Error factor of slow-downs on a device without co-locations: iGniter's predictions of the published pairs of a V100
#: are within it in nine of ten.
_UNTESTED = 1.12


@dataclass(frozen=True, slots=True)
class RankedModel:
    """A model fitted to all co-locations, with its error on held-out data."""

    name: str
    model: InterferenceModel
    #: Held-out unit of the evaluation. ``"model"``: a model's co-locations, as victim and as neighbour; with fewer than
    #: three co-located models ``"victim"`` or ``"pair"``; ``"everything"``: no co-locations, the coefficients come from
    #: profiles of models alone.
    left_out: str
    rows: int
    #: ``mean_pct``, ``p95_pct``: Absolute relative error of the latency.
    mean_pct: float | None
    p95_pct: float | None
    #: ``low``, ``high``: Nine of ten measured latencies were between these multiples of the predicted latency. With
    #: held-out models the level is nineteen of twenty: errors are common to all rows of a model, and there are few
    #: models.
    low: float
    high: float

    @property
    def learns(self) -> bool:
        """Whether the model is learned from co-locations, and so limited to them, unlike iGniter's model."""
        return self.name in ("linear", "traffic", "contention", "constant")


def rank_interference_models(
    measured: Sequence[ColocatedWorkload], coefficients: Coefficients | None
) -> tuple[RankedModel, ...]:
    """Return the models that can be evaluated on a device, by ascending error.

    ``measured``: co-locations of one device; ``coefficients``: of the same device; without them, iGniter's model and
    ours for GPUs are left out.
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
        except KeyError:  # an uncalibrated model
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


#: Least number of co-locations for a fit.
ENOUGH_ROWS = 8


def by_pair(row: ColocatedWorkload) -> str:
    """Return the joined names of the models in a co-location."""
    return "+".join(sorted([row.victim.model, *(one.model for one in row.beside)]))


def by_victim(row: ColocatedWorkload) -> str:
    """Return the model that was slowed down."""
    return row.victim.model


_GROUPS: dict[str, Callable[[ColocatedWorkload], str]] = {
    "pair": by_pair,
    "victim": by_victim,
    "nothing": lambda row: "all",  # fitted and tested on the same rows: the benchmark's yardstick
}


def ratios(make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload], left_out: str) -> list[float]:
    """Return measured over predicted latency of each row, predicted by a fit without its group."""
    group = _GROUPS[left_out]
    all_ratios = []
    for held in sorted({group(row) for row in measured}):
        # With nothing held out, all rows form a single group: the model is then fitted to the rows that it predicts.
        training = [row for row in measured if group(row) != held] or list(measured)
        model = make().fit(training)
        all_ratios += [
            row.latency_ms / (model.slowdown(row.victim, row.beside) * row.victim.solo_ms)
            for row in measured
            if group(row) == held
        ]
    return all_ratios


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """A co-location predicted by a fit without one of its models, in either role."""

    model: str  #: The held-out model.
    is_victim: bool  #: Whether the held-out model was the victim or a neighbour.
    ratio: float  #: Measured over predicted latency.


def leave_models_out(make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload]) -> list[LeftOutRow]:
    """Hold every model out in turn, as victim and as neighbour, and predict all rows in which it takes part.

    A model is skipped where too few rows remain without it.
    """
    rows = []
    for name in sorted({one.model for row in measured for one in (row.victim, *row.beside)}):
        training = [row for row in measured if not _takes_part(name, row)]
        if len(training) < ENOUGH_ROWS:
            continue
        model = make().fit(training)
        for row in measured:
            if _takes_part(name, row):
                ratio = row.latency_ms / (model.slowdown(row.victim, row.beside) * row.victim.solo_ms)
                rows.append(LeftOutRow(name, row.victim.model == name, ratio))
    return rows


def _takes_part(name: str, row: ColocatedWorkload) -> bool:
    return name in (row.victim.model, *(one.model for one in row.beside))
