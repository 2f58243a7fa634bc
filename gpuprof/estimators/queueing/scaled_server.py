"""Replicas, and the requests to them, with times in units that a whole pool has in common."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprof.domain.arrival_process import ArrivalProcess


@dataclass(frozen=True, slots=True)
class ScaledServer:
    """A `gpuprof.domain.sojourn.BatchServer` with times in units that the whole pool has in common."""

    latency: tuple[float, ...]  #: Mean time of a batch of 1, 2, … requests.
    max_wait: float
    processes: int
    #: ``cv``, ``pause``, ``pause_cv``: Variation of a service time (gamma); time of a batch that finds its process at
    #: rest over that of one that follows another, and its variation.
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

    rate: float  #: Per unit of time.
    scv: float = 1.0  #: Squared coefficient of variation of gamma gaps.
    #: Where given, the arrivals, at this rate already; ``scv`` then says nothing.
    process: ArrivalProcess | None = None
    unit_ms: float = 1.0  #: Of time, which processes need that know absolute times.
