"""Sojourn times of requests in a replica: batch formation, queueing and service."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gpuprof.domain.arrival_process import ArrivalProcess, DeterministicArrivals, GammaArrivals, scale_to_rate

#: Step of the load grid in log(1 / (1 - load)), to which queues are nearly proportional near capacity, and last index.
_LOAD_STEP = 0.08
LAST_LOAD = 80  # a load of 0.9983
_LEAST_LOAD = 1e-3


def grid_to_load(index: int) -> float:
    """Return the load at a grid index, 0 to `LAST_LOAD`; models solve pools on this grid and interpolate.

    Examples
    --------
    >>> round(load_to_grid(grid_to_load(7)), 6)
    7.0
    """
    return max(_LEAST_LOAD, -math.expm1(-_LOAD_STEP * index))


def load_to_grid(load: float) -> float:
    """Return the fractional grid index of a load, the inverse of `grid_to_load`."""
    # Just below the last index: interpolation needs a next grid point.
    return min(-math.log1p(-load) / _LOAD_STEP, LAST_LOAD - 1e-9)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A stream of requests."""

    rate_rps: float
    scv: float = 1.0  #: Squared coefficient of variation of independent gamma gaps (Poisson: 1, constant: 0).
    #: Arrival process of any shape at this rate; where given, ``scv`` is ignored.
    process: ArrivalProcess | None = None

    @classmethod
    def from_process(cls, process: ArrivalProcess | None, rate_rps: float) -> Arrivals:
        """Return the arrivals of a process scaled to a rate; Poisson arrivals without a process."""
        if process is None:
            return cls(rate_rps)
        if isinstance(process, DeterministicArrivals):
            return cls(rate_rps, 0.0)
        if isinstance(process, GammaArrivals):
            return cls(rate_rps, process.scv)
        return cls(rate_rps, process=scale_to_rate(process, rate_rps))


@dataclass(frozen=True, slots=True)
class BatchServer:
    """A replica as a queue in front of ``processes`` identical batch servers.

    The rule of batch formation is the same as in the router and the simulator: a free process takes the oldest
    ``batch`` waiting requests; fewer only once the oldest has waited ``max_wait_ms``. A batch of n takes
    ``latency_ms[n - 1]`` on average, with coefficient of variation ``latency_cv``.
    """

    latency_ms: tuple[float, ...]
    batch: int
    max_wait_ms: float
    processes: int = 1
    latency_cv: float = 0.0
    #: Ratio of batch times on an idle process, whose caches are cold, and on a busy process.
    pause_factor: float = 1.0
    pause_cv: float | None = None  #: Coefficient of variation of batch times on an idle process; None: ``latency_cv``.
    overhead_ms: float = 0.0  #: Added to every request outside the server: network, parsing, routing.

    @property
    def capacity_rps(self) -> float:
        """Requests per second when every batch is full."""
        return 1000.0 * self.batch * self.processes / self.latency_ms[self.batch - 1]


@dataclass(frozen=True, slots=True)
class Sojourn:
    """Distribution of the time from a request's arrival to its answer."""

    #: Fraction of time in which a process is busy; at 1.0 or more the queue grows without bound, and all times below
    #: are infinite.
    utilization: float
    mean_batch: float  #: Mean number of requests in a batch.
    mean_ms: float
    #: (probability, milliseconds), increasing, dense enough to interpolate in; starts at 0.0, ends at or above 0.9999.
    quantiles_ms: tuple[tuple[float, float], ...]

    def percentile(self, percent: float) -> float:
        """Return the time in milliseconds within which ``percent`` of the requests are answered.

        Examples
        --------
        >>> sojourn = Sojourn(0.5, 1.0, 11.0, quantiles_ms=((0.0, 5.0), (0.5, 10.0), (1.0, 20.0)))
        >>> sojourn.percentile(75.0), sojourn.fraction_within(15.0)
        (15.0, 0.75)
        """
        probability = percent / 100.0
        below_p, below_ms = self.quantiles_ms[0]
        for p, ms in self.quantiles_ms:
            if p >= probability:
                span = p - below_p
                if span <= 0 or ms == float("inf"):
                    return ms
                return below_ms + (ms - below_ms) * (probability - below_p) / span
            below_p, below_ms = p, ms
        return below_ms

    def fraction_within(self, limit_ms: float) -> float:
        """Return the fraction of requests answered within ``limit_ms``."""
        below_p, below_ms = 0.0, 0.0
        for p, ms in self.quantiles_ms:
            if ms > limit_ms:
                if ms == float("inf") or ms <= below_ms:
                    return below_p
                return max(0.0, below_p + (p - below_p) * (limit_ms - below_ms) / (ms - below_ms))
            below_p, below_ms = p, ms
        return 1.0


@dataclass(frozen=True, slots=True)
class ServedPart:
    """A replica's part of a pool: its requests per second, and the distribution of their sojourn times."""

    rate_rps: float
    sojourn: Sojourn


@dataclass(frozen=True, slots=True)
class PoolSojourn:
    """Distribution of sojourn times in a pool of replicas behind a router."""

    whole: Sojourn  #: Distribution over all requests, with the utilization of all processes.
    #: Parts by replica, in the order of the servers; the rates add up to the arrival rate.
    parts: tuple[ServedPart, ...]


class QueueModel(Protocol):
    """Predicts sojourn times of a replica, or of a pool behind a router, under a stream of requests."""

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in the system."""

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas with a common stream.

        The router sends each request to the replica with the earliest expected answer
        (`gpuprof.rules.routing.FastestFirst`). Times are infinite at or beyond the capacity of the pool. ``coarse``
        results are fast and may be off by some percent, for searches that verify their choice.
        """


@runtime_checkable
class QuickQueueModel(QueueModel, Protocol):
    """A queueing model whose times obey the rule of batch formation, so that lower bounds by this rule hold.

    It solves one process under Poisson requests by analysis. Other models may be rules of thumb, which allow more than
    batches can do.
    """

    is_analytic: bool  #: Always True: marks such a model.

    def guess_load(self, server: BatchServer, count: int, limit_ms: float, percent: float) -> float:
        """Return about the largest load at which ``count`` equal replicas answer ``percent`` of requests in time.

        The load is a part of the capacity; 0.0 where the replicas are late at any load. For searches that verify their
        choice.
        """
