"""The evidence for checking a deployment map, and the violations of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import NOTHING_TRIED, Estimator, TriedRuns
from gpuprof.domain.sojourn import QueueModel
from gpuprof.errors import InputError
from gpuprof.rules.host_work import NO_HOST_WORK, HostWork

#: Tolerance of a map's figures: rounding only.
RELATIVE_ROUNDING = 1e-3
ABSOLUTE_ROUNDING = 1e-6


def is_rounded_to(value: float, true: float) -> bool:
    """Return whether a figure of a map differs from the true one by no more than rounding.

    Examples
    --------
    >>> is_rounded_to(12.34, 12.341), is_rounded_to(12.3, 12.341)
    (True, False)
    """
    return abs(value - true) <= RELATIVE_ROUNDING * abs(true) + ABSOLUTE_ROUNDING


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule a map breaks."""

    #: ``"geometry"``, ``"share"``, ``"memory"``, ``"failed"``, ``"rate"``, ``"slo"``, ``"time"``, ``"fleet"`` or
    #: ``"figures"``.
    rule: str
    where: str  #: ``"node0 gpu 1"``, or a model.
    message: str  #: The rule and the value that breaks it.

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Data for checking a map."""

    devices: Mapping[str, Device]  #: By name.
    queueing: QueueModel
    estimator: Estimator | None = None  #: None: the times in the map are used unchecked.
    #: ``confidence``, ``latency_budget``: As in `gpuprof.placement.problem.Options`.
    confidence: float | None = None
    latency_budget: float | None = None
    overhead_ms: float = 0.0
    host: HostWork = NO_HOST_WORK  #: Host work, as in `gpuprof.placement.problem.Options`.
    demands: tuple[Demand, ...] | None = None  #: None: the demands in the map itself are used.
    #: Available devices, by name; None or absent: as many as needed.
    counts: Mapping[str, int | None] | None = None
    tried: TriedRuns = NOTHING_TRIED  #: Runs recorded as failed, which override the estimator.

    def __post_init__(self) -> None:
        if self.latency_budget is not None and not 0.0 < self.latency_budget <= 1.0:
            raise InputError(f"a latency budget must be above 0 and at most 1 but got {self.latency_budget:g}")
        if self.confidence is not None and not 0.0 <= self.confidence < 1.0:
            raise InputError(f"a confidence must be at least 0 and below 1 but got {self.confidence:g}")
        if not 0.0 <= self.overhead_ms < 1e9:
            raise InputError(f"an overhead must be at least 0 ms but got {self.overhead_ms:g}")
