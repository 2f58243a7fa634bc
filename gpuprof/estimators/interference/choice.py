"""Selects a device's interference model, by the least error on its measured co-locations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpuprof.estimators.conformal import quantile
from gpuprof.estimators.constants import constant
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

#: Least number of co-locations for a fit.
ENOUGH_ROWS = 8
#: Level of an interval of nine of ten units: errors are common to all rows of a unit, and there are few units.
_ROW_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class RankedModel:
    """A model fitted to all co-locations, with its error on held-out data."""

    name: str
    model: InterferenceModel
    #: Held-out unit of the evaluation. ``"model"``: a model's co-locations, as victim and as neighbour; with fewer than
    #: three co-located models ``"victim"`` or ``"pair"``; ``"everything"``: the coefficients come from profiles of
    #: models alone.
    left_out: str
    rows: int
    #: ``mean_pct``, ``p95_pct``: Absolute relative error of the latency.
    mean_pct: float | None
    p95_pct: float | None
    #: ``low``, ``high``: Nine of ten measured latencies were between these multiples of the predicted latency.
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
    units = tuple(_UNITS) if len(measured) >= ENOUGH_ROWS else ()
    left_out = next((unit for unit in units if leave_out(NoInterference, measured, unit)), None)
    if left_out is None:
        if coefficients is None:
            return ()
        error = constant("published", "igniter_error")
        return (RankedModel("igniter", makes["igniter"](), "everything", 0, None, None, 1.0 / error, error),)
    ranking = []
    for name, make in makes.items():
        try:
            ranking.append(_judge_model(name, make, measured, left_out))
        except KeyError:  # an uncalibrated model
            continue
    return tuple(sorted(ranking, key=lambda ranked: ranked.mean_pct or 0.0))


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


def _judge_model(
    name: str, make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload], left_out: str
) -> RankedModel:
    ratios = [row.ratio for row in leave_out(make, measured, left_out)]
    high = quantile((max(ratio, 1.0 / ratio) for ratio in ratios), _ROW_LEVEL) or 1.0
    error = 100.0 * np.abs(1.0 / np.array(ratios) - 1.0)
    mean_pct, p95_pct = float(error.mean()), float(np.percentile(error, 95))
    return RankedModel(name, make().fit(measured), left_out, len(ratios), mean_pct, p95_pct, 1.0 / high, high)


def name_pair(row: ColocatedWorkload) -> str:
    """Return the joined names of the models in a co-location."""
    return "+".join(sorted([row.victim.model, *(neighbour.model for neighbour in row.beside)]))


#: Unit that is left out → the units that a co-location belongs to.
_UNITS: dict[str, Callable[[ColocatedWorkload], set[str]]] = {
    "model": lambda row: {row.victim.model, *(neighbour.model for neighbour in row.beside)},
    "victim": lambda row: {row.victim.model},
    "pair": lambda row: {name_pair(row)},
}


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """A co-location predicted by a fit without its unit."""

    unit: str  #: The held-out model, victim or pair.
    is_victim: bool  #: Whether a held-out model was the victim or a neighbour.
    ratio: float  #: Measured over predicted latency.


def leave_out(
    make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload], unit: str
) -> list[LeftOutRow]:
    """Hold every unit out in turn, and predict all rows that belong to it.

    A unit is skipped where no rows remain without it, or too few for a model in both roles. ``unit``: ``"model"``, as
    victim and as neighbour, ``"victim"`` or ``"pair"``.
    """
    units_of, rows = _UNITS[unit], []
    least = ENOUGH_ROWS if unit == "model" else 1
    for name in sorted({name for row in measured for name in units_of(row)}):
        training = [row for row in measured if name not in units_of(row)]
        if len(training) < least:
            continue
        model = make().fit(training)
        for row in measured:
            if name in units_of(row):
                ratio = row.latency_ms / (model.slowdown(row.victim, row.beside) * row.victim.solo_ms)
                rows.append(LeftOutRow(name, row.victim.model == name, ratio))
    return rows
