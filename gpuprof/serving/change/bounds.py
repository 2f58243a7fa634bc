"""Compares a model's load with the planned load of its map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.serving.change.window import SURE, ServiceWindow
from gpuprof.serving.router.neighbour_times import NeighbourCost


class Departure(StrEnum):
    """The kinds of departure of a model from the bounds of its plan."""

    RATE = "more requests than planned"
    LATENCY = "batches take longer than planned"
    SLO = "p99 passes the SLO"
    IDLE = "fewer requests than planned"
    QUICK = "batches take less time than planned"

    @property
    def is_short(self) -> bool:
        """Return whether the plan gives too little capacity, rather than too much."""
        return self in (Departure.RATE, Departure.LATENCY, Departure.SLO)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a plan, as fractions of its predictions."""

    #: ``more``, ``less``: Allowed multiples of the planned rate.
    more: float = 1.2
    less: float = 0.5
    #: Allowed multiple of the predicted batch time, or its inverse; more if the map's interval is wider.
    slower: float = 1.25


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The planned load of a model: rate, percentile, and upper end over mean of its batch times."""

    rate_rps: float
    percentile: float
    slowest: float


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """The measured load of a model in a window."""

    window: ServiceWindow
    #: Measured over predicted time of batches of the same sizes; None without batches.
    slowdown: float | None
    #: Part of the slow-down caused by the neighbours; None: not analysed, or no batches.
    neighbours: NeighbourCost | None = None


def read_planned(deployment: DeploymentMap, model: str) -> PlannedLoad:
    """Return the planned load of a model of a map."""
    entry = deployment.models[model]
    slowest = 1.0
    for _, _, _, replica in deployment.places():
        if replica.model == model:
            plan = replica.predicted
            upper = 1.0 if plan.latency_ms_interval is None else plan.latency_ms_interval[1] / (plan.latency_ms or 1.0)
            slowest = max(slowest, upper, plan.pause_factor)
    return PlannedLoad(entry.rate_rps, entry.percentile, slowest)


def find_departure(plan: PlannedLoad, load: ObservedLoad, bounds: Bounds) -> Departure | None:
    """Return the significant departure of a model from the bounds of its plan; None without one."""
    window = load.window
    chance_rps = SURE * math.sqrt(max(1, window.arrived)) / window.seconds
    slower = max(bounds.slower, plan.slowest)
    if window.rate_rps - chance_rps > bounds.more * plan.rate_rps:
        return Departure.RATE
    if load.slowdown is not None and load.slowdown > slower:
        return Departure.LATENCY
    if window.breaks_slo(plan.percentile):
        return Departure.SLO
    if window.rate_rps + chance_rps < bounds.less * plan.rate_rps:
        return Departure.IDLE
    if load.slowdown is not None and load.slowdown < 1.0 / slower:
        return Departure.QUICK
    return None
