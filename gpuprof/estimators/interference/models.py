"""Models of the slowdown of a workload by its neighbours on a device, and the choice between them.

A device's model is that with the least error on its measured co-locations, each held out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from gpuprof.estimators.conformal import quantile
from gpuprof.estimators.constants import constant
from gpuprof.estimators.igniter.igniter import (
    Coefficients,
    HardwareCoefficients,
    PlacedWorkload,
    WorkloadCoefficients,
    added_launch_ms,
    predict,
)

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class RunningWorkload:
    """Behaviour of a workload alone under its share; 0 for unmeasured figures."""

    model: str
    batch: int
    share: float  #: Fraction of the device.
    solo_ms: float  #: Latency alone, transfers included.
    #: ``l2_pct``, ``dram_pct``: Mean use of the L2 cache's and the DRAM's bandwidth.
    l2_pct: float = 0.0
    dram_pct: float = 0.0
    kernels: int = 0  #: Launches per batch.
    transfer_ms: float = 0.0  #: Time alone of a batch's transfers between host and device.
    power_w: float = 0.0  #: Above idle.


@dataclass(frozen=True, slots=True)
class ColocatedWorkload:
    """A measurement: ``victim`` took ``latency_ms`` while ``beside`` ran."""

    victim: RunningWorkload
    beside: tuple[RunningWorkload, ...]
    latency_ms: float

    @property
    def slowdown(self) -> float:
        """Latency over latency alone."""
        return self.latency_ms / self.victim.solo_ms


class InterferenceModel(Protocol):
    """Predicts slowdowns."""

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Learn from measurements; return self."""

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return latency beside others over latency alone, at least 1."""


class NoInterference:
    """No slowdown by neighbours."""

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Learn nothing."""
        return self

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return 1."""
        return 1.0


class ConstantInterference:
    """The same slowdown by any neighbours: the mean of the measurements."""

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Take the mean."""
        self.factor_ = float(np.mean([row.slowdown for row in measured]))
        return self

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return the mean slowdown if there is a neighbour."""
        return max(1.0, self.factor_) if beside else 1.0


class _AdditiveInterference(ABC):
    """A slow-down above 1 that is a sum with coefficients of at least 0, the same for all models."""

    @abstractmethod
    def _features(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> Array:
        """Return the terms of the sum."""

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Fit the coefficients by non-negative least squares on relative errors."""
        from scipy.optimize import nnls  # half a second to import, not needed without neighbours

        features = np.array([self._features(row.victim, row.beside) for row in measured])
        slow = np.array([row.slowdown for row in measured])
        self.weights_, _ = nnls(features / slow[:, None], (slow - 1.0) / slow)
        return self

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return 1 plus the terms."""
        return 1.0 + float(self._features(victim, beside) @ self.weights_) if beside else 1.0


class TrafficInterference(_AdditiveInterference):
    """Our model where only memory traffic is known, as on a CPU: neighbours' traffic slows down workloads with much
    traffic.

    The terms are a constant cost of any neighbour (clock, last-level cache), the neighbours' bandwidth, its product
    with the victim's, and the demand of all beyond the capacity. Bandwidths are those of the workloads alone,
    ``dram_pct``.
    """

    def _features(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> Array:
        victim_use, neighbour_use = victim.dram_pct / 100.0, sum(neighbour.dram_pct for neighbour in beside) / 100.0
        return np.array([1.0, neighbour_use, victim_use * neighbour_use, max(0.0, victim_use + neighbour_use - 1.0)])


class ContentionModel(_AdditiveInterference):
    """Our model: each shared resource adds a part, in proportion to the victim's need and the neighbours' use.

    The terms are:

    - the clock lost to the power limit (iGniter's equations 9 and 10);
    - launches: iGniter's delay of a kernel (equation 6) times the victim's kernels over its time;
    - L2: the neighbours' use (equation 8);
    - the link to the host, which iGniter leaves out: the fraction of the victim's time in transfers, and the
      fraction of the time that the neighbours hold the link;
    - the DRAM: the product of both sides' use.
    """

    def __init__(self, hardware: HardwareCoefficients) -> None:
        self._hardware = hardware

    def _features(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> Array:
        hardware = self._hardware
        demand = hardware.idle_power_w + victim.power_w + sum(neighbour.power_w for neighbour in beside)
        over = max(0.0, demand - hardware.max_power_w)
        delay = added_launch_ms(hardware, 1 + len(beside))
        return np.array(
            [
                min(0.9, -hardware.alpha_f * over / hardware.max_clock_mhz),
                delay * victim.kernels / victim.solo_ms,
                sum(neighbour.l2_pct for neighbour in beside) / 100.0,
                victim.transfer_ms / victim.solo_ms,
                sum(neighbour.transfer_ms / neighbour.solo_ms for neighbour in beside),
                victim.dram_pct * sum(neighbour.dram_pct for neighbour in beside) / 1e4,
            ]
        )


class IgniterInterference:
    """iGniter's model: its prediction beside others over its prediction alone."""

    def __init__(self, hardware: HardwareCoefficients, workloads: Mapping[str, WorkloadCoefficients]) -> None:
        self._hardware = hardware
        self._workloads = workloads

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Return self: the coefficients come from profiles."""
        return self

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return the ratio of the two predictions."""
        placed, neighbours = self._place_workload(victim), [self._place_workload(neighbour) for neighbour in beside]
        together, alone = predict(self._hardware, placed, neighbours), predict(self._hardware, placed, ())
        return max(1.0, together.latency_ms / alone.latency_ms)

    def _place_workload(self, running: RunningWorkload) -> PlacedWorkload:
        return PlacedWorkload(self._workloads[running.model], running.batch, running.share)


#: Least number of co-locations for a fit.
ENOUGH_ROWS = 8


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
        return self.name in ("traffic", "contention", "constant")


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
    # 95% of rows for nine of ten units: errors are common to all rows of a unit, and there are few units.
    high = quantile((max(ratio, 1.0 / ratio) for ratio in ratios), 0.95) or 1.0
    error = 100.0 * np.abs(1.0 / np.array(ratios) - 1.0)
    mean_pct, p95_pct = float(error.mean()), float(np.percentile(error, 95))
    return RankedModel(name, make().fit(measured), left_out, len(ratios), mean_pct, p95_pct, 1.0 / high, high)


#: Unit that is left out → the units that a co-location belongs to.
_UNITS: dict[str, Callable[[ColocatedWorkload], set[str]]] = {
    "model": lambda row: {row.victim.model, *(neighbour.model for neighbour in row.beside)},
    "victim": lambda row: {row.victim.model},
    "pair": lambda row: {"+".join(sorted([row.victim.model, *(neighbour.model for neighbour in row.beside)]))},
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
