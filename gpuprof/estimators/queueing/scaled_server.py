"""Replicas and their requests, with times in units common to the whole pool."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprof.domain.arrival_process import ArrivalProcess


@dataclass(frozen=True, slots=True)
class ScaledServer:
    """A `gpuprof.domain.sojourn.BatchServer` with times in units common to the whole pool."""

    latency: tuple[float, ...]  #: Mean time of a batch of 1, 2, … requests.
    max_wait: float
    processes: int
    #: ``cv``, ``pause``, ``pause_cv``: Variation of a service time (gamma); ratio of a batch's time on an idle process
    #: to its time directly after another batch, and the variation on an idle process.
    cv: float
    pause: float
    pause_cv: float

    @property
    def capacity(self) -> float:
        """Requests per unit of time when every batch is full."""
        return self.processes * len(self.latency) / self.latency[-1]


@dataclass(frozen=True, slots=True)
class PoolArrivals:
    """Requests to a pool."""

    rate: float  #: Requests per unit of time.
    scv: float = 1.0  #: Squared coefficient of variation of gamma gaps.
    #: Arrivals, scaled to this rate; ``scv`` is then ignored.
    process: ArrivalProcess | None = None
    unit_ms: float = 1.0  #: Unit of time, for processes in absolute times.
