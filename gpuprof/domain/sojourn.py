"""Sojourn times of requests in a replica or a pool: batch formation, queueing and service; queueing models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from gpuprof.domain.arrival_process import ArrivalProcess, DeterministicArrivals, GammaArrivals, scale_to_rate
from gpuprof.domain.number_format import ROUNDING
from gpuprof.domain.validation import LARGEST
from gpuprof.errors import InputError

#: Step of the load grid in log(1 / (1 - load)), to which queues are nearly proportional near capacity, and last index.
_LOAD_STEP = 0.08
LAST_LOAD = 80  # a load of 0.9983
_LEAST_LOAD = 1e-3


def grid_to_load(index: int) -> float:
    """Return the load at a grid index from 0 to `LAST_LOAD`; models solve pools at these loads and interpolate.

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
    """A stream of requests: rate, variation of gaps, and arrival process."""

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


class QuickQueueModel(QueueModel, Protocol):
    """A queueing model whose times obey the rule of batch formation, so that lower bounds by this rule hold.

    It is exact for one process under Poisson requests. Other models may be rules of thumb, which promise more than
    batch formation allows.
    """

    is_analytic: bool  #: Always True: marks such a model.

    def guess_load(self, server: BatchServer, count: int, limit_ms: float, percent: float) -> float:
        """Return the approximate largest load at which ``count`` equal replicas answer ``percent`` of requests in time.

        The load is a part of the capacity; 0.0 where the replicas are late at any load. For searches that verify their
        choice.
        """


def is_quick(queueing: QueueModel) -> TypeGuard[QuickQueueModel]:
    """Return whether a queueing model is a `QuickQueueModel`; searches ask too often for checks of a protocol."""
    return getattr(queueing, "is_analytic", False) is True


@dataclass(frozen=True, slots=True)
class ShapedQueue:
    """A queueing model with arrivals of a given shape in place of Poisson arrivals."""

    queueing: QueueModel
    #: Process of any rate, scaled to the rate in question (`gpuprof.domain.arrival_process.scale_to_rate`).
    shape: ArrivalProcess

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in a replica, the criterion for a map."""
        return self.pool(arrivals, (server,)).whole

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas with a common stream."""
        return self.queueing.pool(Arrivals.from_process(self.shape, arrivals.rate_rps), servers, coarse=coarse)


@dataclass(frozen=True, slots=True)
class ModelQueues:
    """A queueing model for each served model, selected by `queue_of`."""

    by_model: Mapping[str, QueueModel]
    #: Model for queries without a model's name: the utilization of a replica does not depend on the arrival process.
    unnamed: QueueModel

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in a replica of an unnamed model."""
        return self.unnamed.sojourn(arrivals, server)

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas of an unnamed model."""
        return self.unnamed.pool(arrivals, servers, coarse=coarse)


def queue_of(queueing: QueueModel, model: str) -> QueueModel:
    """Return the queueing model for the replicas of a model.

    Raises `InputError` where each model has its own queueing model, but this model has none.
    """
    if not isinstance(queueing, ModelQueues):
        return queueing
    if model not in queueing.by_model:
        modelled = ", ".join(sorted(queueing.by_model))
        raise InputError(f"nothing is known of how requests of {model} arrive", f"the trace has those of {modelled}")
    return queueing.by_model[model]


#: A rate that needs a longer tail exceeds the replicas' capacity.
_LONGEST_MS = 1e3 * LARGEST


def split_stream(queueing: QueueModel, arrivals: Arrivals, servers: Sequence[BatchServer]) -> PoolSojourn:
    """Return the times in replicas with independent streams at rates proportional to capacity."""
    capacity = math.fsum(server.capacity_rps for server in servers)
    parts = []
    for server in servers:
        rate = arrivals.rate_rps * server.capacity_rps / capacity
        parts.append(ServedPart(rate, queueing.sojourn(Arrivals(rate, arrivals.scv), server)))
    return PoolSojourn(mix_parts(parts), tuple(parts))


def balance_stream(
    queueing: QueueModel,
    arrivals: Arrivals,
    servers: Sequence[BatchServer],
    largest_rps: Callable[[BatchServer, float], float],
) -> PoolSojourn:
    """Return the times in replicas with independent streams at rates that equalise their tails.

    If any split keeps every replica's tail within a time, this split does. ``largest_rps`` returns the largest rate at
    which a replica's tail is within a time in ms.
    """
    kinds = Counter(servers)

    def served_rps(limit_ms: float) -> float:
        return math.fsum(count * largest_rps(server, limit_ms) for server, count in kinds.items())

    low, high = 0.0, 1.0
    while served_rps(high) < arrivals.rate_rps and high < _LONGEST_MS:
        low, high = high, 2.0 * high
    while high - low > ROUNDING * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if served_rps(middle) >= arrivals.rate_rps else (middle, high)
    # The upper end of the bisection serves slightly more than the arrivals: rates are scaled to their sum.
    scale = arrivals.rate_rps / (served_rps(high) or 1.0)
    rates = {server: scale * largest_rps(server, high) for server in kinds}
    parts = {server: ServedPart(rate, queueing.sojourn(Arrivals(rate), server)) for server, rate in rates.items()}
    server_parts = [parts[server] for server in servers]
    return PoolSojourn(mix_parts(server_parts), tuple(server_parts))


def mix_parts(parts: Sequence[ServedPart]) -> Sojourn:
    """Return the distribution over the requests of all parts."""
    laws = [part.sojourn for part in parts]
    if all(law == laws[0] for law in laws):
        return laws[0]
    total = math.fsum(part.rate_rps for part in parts)
    weights = [part.rate_rps / total if total else 1.0 / len(parts) for part in parts]
    times = sorted({ms for law in laws for _, ms in law.quantiles_ms if math.isfinite(ms)})
    # Between adjacent times every distribution is linear, and so is the mixture.
    mixed = [
        (math.fsum(weight * law.fraction_within(ms) for weight, law in zip(weights, laws, strict=True)), ms)
        for ms in times
    ]
    if any(math.isinf(law.mean_ms) for law in laws):
        mixed.append((1.0, math.inf))
    return Sojourn(
        math.fsum(weight * law.utilization for weight, law in zip(weights, laws, strict=True)),
        math.fsum(weight * law.mean_batch for weight, law in zip(weights, laws, strict=True)),
        math.fsum(weight * law.mean_ms for weight, law in zip(weights, laws, strict=True)),
        ((0.0, mixed[0][1]), *mixed),
    )
