"""The largest rate of a replica, or of a pool, within an SLO, found by solving as few queues as possible.

Results are cached across the policies that work on a problem. A rate below a rate in time is in time, and a rate above
a late rate is late, so most queries are answered from earlier ones. The search is a bisection with guessed cells:
between two rates of known tails the time grows nearly in proportion to ``1 / (1 - load)``, so interpolation predicts
the last cell of the bisection, and only the ends of that cell are evaluated. The result equals the bisection's own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpuprof.domain.demand import Slo
from gpuprof.domain.sojourn import LAST_LOAD, Arrivals, BatchServer, QueueModel, ShapedQueue, grid_to_load, load_to_grid
from gpuprof.placement.limit import Limit, TimeUpError

#: Relative precision, from below, at which the search for a replica's largest rate stops.
RATE_PRECISION = 0.01
#: Part of its throughput at which a replica is nearly idle. A replica keeping the SLO only below it is not offered
#: for more, since hundreds of them would do the work of a better replica.
NEARLY_IDLE = RATE_PRECISION
#: Maximum relative error of the tail of a coarse simulation of Poisson requests: tails nearer to the limit are
#: simulated finely. The largest error over 200 replicas was 7.5%.
_COARSE_ERROR = 0.2
#: Tolerance of probabilities: a bound must also hold for maps that keep a percentile up to rounding.
SLACK = 1e-5
#: Least coefficient of variation of times that are not treated as constant.
LEAST_CV = 1e-3
#: Ratio of two loads between which a tail is interpolated.
_CLOSE = 1.1
#: Number of steps between bisections: guesses may converge from one side only.
HALVED = 3


@dataclass(slots=True)
class _KnownRates:
    """Known rates of a replica under an SLO: the largest in time, the smallest late, and their tails."""

    passes_rps: float = 0.0
    passes_ms: float = 0.0
    fails_rps: float = math.inf
    fails_ms: float = math.inf
    most_rps: float = math.inf  #: Upper bound of the rates in time, by the replica's times alone.


@dataclass(slots=True)
class RateLimits:
    """Caches the largest rates of replicas; a single object serves all policies on the same problem."""

    _known: dict[tuple[int, frozenset[tuple[BatchServer, int]], Slo], _KnownRates] = field(default_factory=dict)
    _models: dict[int, QueueModel] = field(default_factory=dict)
    _limit: Limit = field(default_factory=Limit)

    @contextmanager
    def until(self, limit: Limit) -> Iterator[None]:
        """Within the context, let queries of any policy raise `TimeUpError` once the time is up."""
        before, self._limit = self._limit, limit
        try:
            yield
        finally:
            self._limit = before

    def check_time(self) -> None:
        """Raise `TimeUpError` when the time for queries is up."""
        if self._limit.is_over:
            raise TimeUpError

    def in_time(self, queueing: QueueModel, servers: Collection[BatchServer], slo: Slo, rate_rps: float) -> bool:
        """Return whether replicas with a common stream answer ``rate_rps`` within the SLO."""
        limits = self._of(queueing, servers, slo)
        if rate_rps <= limits.passes_rps or rate_rps >= limits.fails_rps:
            return rate_rps <= limits.passes_rps
        return self._ask(queueing, servers, slo, rate_rps, limits)

    def largest_rps(
        self,
        queueing: QueueModel,
        servers: Collection[BatchServer],
        slo: Slo,
        idle_rps: float,
        wanted_rps: float,
        precision: float = RATE_PRECISION,
    ) -> float:
        """Return the largest rate of replicas with a common stream within the SLO, rounded down to ``precision``.

        ``idle_rps``: the result is 0.0 where this rate is late; ``wanted_rps``: upper limit of the search.
        """
        if self.in_time(queueing, servers, slo, wanted_rps):
            return wanted_rps
        if idle_rps >= wanted_rps or not self.in_time(queueing, servers, slo, idle_rps):
            return 0.0
        capacity_rps = math.fsum(server.capacity_rps for server in servers)
        limits, count = self._of(queueing, servers, slo), 0
        while True:
            halve = count % HALVED == HALVED - 1
            guess = None if halve else _guess(limits, capacity_rps, slo.latency_ms)
            below, above = _cell(idle_rps, wanted_rps, limits, guess, precision)
            if below > limits.passes_rps:
                self._ask(queueing, servers, slo, below, limits)
            elif above < limits.fails_rps:
                self._ask(queueing, servers, slo, above, limits)
            else:
                return below
            count += 1

    def bound_rps(self, queueing: QueueModel, server: BatchServer, slo: Slo) -> float:
        """Return a rate above which batch times alone make a replica late; infinite if only queueing is limiting."""
        return self._of(queueing, (server,), slo).most_rps

    def _ask(
        self,
        queueing: QueueModel,
        servers: Collection[BatchServer],
        slo: Slo,
        rate_rps: float,
        limits: _KnownRates,
    ) -> bool:
        """Evaluate a rate between the known rates, record the result, and return whether it is within the SLO."""
        tail = math.inf if rate_rps > limits.most_rps else _find_tail_ms(queueing, tuple(servers), slo, rate_rps)
        passes = tail <= slo.latency_ms
        if passes:
            limits.passes_rps, limits.passes_ms = rate_rps, tail
        else:
            limits.fails_rps, limits.fails_ms = rate_rps, tail
        return passes

    def _of(self, queueing: QueueModel, servers: Collection[BatchServer], slo: Slo) -> _KnownRates:
        self.check_time()
        key = (self._number(queueing), frozenset(Counter(servers).items()), slo)
        limits = self._known.get(key)
        if limits is None:
            limits = self._known[key] = _KnownRates()
            # Other models may be rules of thumb, which allow more than batches can do.
            if getattr(queueing, "is_analytic", False):
                bounds = (most_within_rps(server, slo.latency_ms, slo.percentile) for server in servers)
                limits.most_rps = (1.0 + RATE_PRECISION) * math.fsum(bounds)
        return limits

    def _number(self, queueing: QueueModel) -> int:
        self._models.setdefault(id(queueing), queueing)  # kept, so that its id stays unique
        return id(queueing)


def _find_tail_ms(queueing: QueueModel, servers: Sequence[BatchServer], slo: Slo, rate_rps: float) -> float:
    """Return the time at the SLO's percentile, only as precise as its comparison with the SLO needs."""
    if rate_rps >= math.fsum(server.capacity_rps for server in servers):
        return math.inf
    arrivals = Arrivals(rate_rps)
    if _is_simulated(queueing, servers):
        coarse = queueing.pool(arrivals, servers, coarse=True).whole.percentile(slo.percentile)
        if coarse > (1.0 + _COARSE_ERROR) * slo.latency_ms:
            return coarse
        # The error of a coarse tail depends on the shape: with waves of an hour it may have seen none of them.
        if coarse < (1.0 - _COARSE_ERROR) * slo.latency_ms and not isinstance(queueing, ShapedQueue):
            return coarse
    if len(servers) == 1:
        return queueing.sojourn(arrivals, servers[0]).percentile(slo.percentile)
    return queueing.pool(arrivals, servers).whole.percentile(slo.percentile)


def _is_simulated(queueing: QueueModel, servers: Sequence[BatchServer]) -> bool:
    """Return whether a queue must be simulated, as under non-Poisson requests: a coarse answer is cheaper."""
    server = servers[0]
    is_single = len(servers) == 1 and server.processes == 1 and server.pause_cv in (None, server.latency_cv)
    return isinstance(queueing, ShapedQueue) or not is_single


def _guess(limits: _KnownRates, capacity_rps: float, limit_ms: float) -> float:
    """Return the approximate rate at which the tail reaches the limit, linear in 1 / (1 - load) between known rates."""

    def stretch(rate_rps: float) -> float:
        return 1.0 / max(1e-9, 1.0 - rate_rps / capacity_rps)

    first = stretch(limits.passes_rps)
    if math.isinf(limits.fails_ms):
        # The queue grows without bound there; until a finite tail is known, the tail is assumed to double as the load
        # halves its distance from one.
        target = first * max(1.0, limit_ms / limits.passes_ms)
    else:
        slope = (stretch(limits.fails_rps) - first) / (limits.fails_ms - limits.passes_ms)
        target = first + slope * (limit_ms - limits.passes_ms)
    return capacity_rps * (1.0 - 1.0 / target)


def _cell(low: float, high: float, limits: _KnownRates, guess: float | None, precision: float) -> tuple[float, float]:
    """Return the last cell of a bisection that ends at ``guess``; without a guess, the next half to examine."""
    while high - low > precision * low:
        middle = (low + high) / 2.0
        if limits.passes_rps < middle < limits.fails_rps and guess is None:
            return middle, high
        if middle <= limits.passes_rps or (guess is not None and middle < limits.fails_rps and middle <= guess):
            low = middle
        else:
            high = middle
    return low, high


def most_within_rps(server: BatchServer, limit_ms: float, percent: float) -> float:
    """Return an upper bound of a replica's rate, with any neighbours, when ``percent`` of the requests are in time.

    All replicas together answer ``percent`` of the requests in time, so each stands for at most its rate in time
    divided by that part; and none serves more than its full batches.
    """
    throughput = max(1000.0 * n * server.processes / ms for n, ms in enumerate(server.latency_ms, 1))
    return min(throughput, most_in_time_rps(server, limit_ms) / (percent / 100.0 - SLACK))


def most_in_time_rps(server: BatchServer, limit_ms: float) -> float:
    """Return an upper bound of the requests a second that a replica answers in time.

    A batch of n whose time S is at most the limit answers n requests in time; by the renewal-reward theorem a process
    answers at most n P(S <= limit) / E[S] of them.
    """
    throughputs = (1000.0 * n * server.processes / ms for n, ms in enumerate(server.latency_ms, 1))
    return max(rate * part for rate, part in zip(throughputs, parts_in_time(server, limit_ms), strict=True))


def parts_in_time(server: BatchServer, limit_ms: float) -> list[float]:
    """Return the parts of the batches of 1, 2, … requests within the limit."""
    left_ms, cv = limit_ms - server.overhead_ms, server.latency_cv
    if cv < LEAST_CV:
        return [float(ms <= left_ms) for ms in server.latency_ms]
    from scipy.special import gammainc  # the import takes a third of a second, and most times do not vary

    return [float(gammainc(cv**-2, max(0.0, left_ms / ms) * cv**-2)) for ms in server.latency_ms]


def find_load(tail_ms: Callable[[float], float], limit_ms: float, guess: float) -> float:
    """Return the largest load in time; 0.0 where the least load of the grid is late.

    Loads of `gpuprof.domain.sojourn.grid_to_load` are solved, and among the least of them, which are far apart, loads
    between; between the last load in time and the next, the tail is assumed linear in 1 / (1 - load), which also gives
    the next load to solve. ``tail_ms``: load, a part of the capacity → time that must not exceed the limit; rises with
    the load; ``guess``: initial load.

    Examples
    --------
    Where a tail is 10 ms / (1 - load), 50 ms are reached at a load of 0.8:

    >>> round(find_load(lambda load: 10.0 / (1.0 - load), limit_ms=50.0, guess=0.5), 6)
    0.8
    """
    tails: dict[int, float] = {}
    low, high = -1, LAST_LOAD  # the last load is assumed late
    index = round(load_to_grid(min(max(guess, 0.0), 0.99)))
    while high - low > 1:
        index = min(max(index, low + 1), high - 1)
        tails[index] = tail_ms(grid_to_load(index))
        if tails[index] > limit_ms:
            high = index
        else:
            low = index
        index = (low + high) // 2 if len(tails) % HALVED == 0 else _guess_index(tails, low, high, limit_ms)
    if low < 0:
        return 0.0
    if high == LAST_LOAD:
        return grid_to_load(low)
    first, last = (grid_to_load(low), tails[low]), (grid_to_load(high), tails[high])
    while last[0] > _CLOSE * first[0]:
        load = math.sqrt(first[0] * last[0])
        solved = load, tail_ms(load)
        first, last = (solved, last) if solved[1] <= limit_ms else (first, solved)
    return _interpolate_crossing(first, last, limit_ms)


def _guess_index(tails: Mapping[int, float], low: int, high: int, limit_ms: float) -> int:
    """Return the index of the load up to which the tail is likely in time."""
    if low in tails and high in tails:
        if math.isinf(tails[high]):
            return low + 1
        first, last = (grid_to_load(low), tails[low]), (grid_to_load(high), tails[high])
        return int(load_to_grid(_interpolate_crossing(first, last, limit_ms)))
    index = low if low in tails else high
    if math.isinf(tails[index]) or tails[index] <= 0.0:
        return (low + high) // 2
    stretch = max(1.0, limit_ms / tails[index] / (1.0 - grid_to_load(index)))
    return int(load_to_grid(min(1.0 - 1.0 / stretch, grid_to_load(LAST_LOAD))))


def _interpolate_crossing(low: tuple[float, float], high: tuple[float, float], limit_ms: float) -> float:
    """Return the load between two solved loads, each with its tail, at which the tail reaches the limit."""
    first, last = (1.0 / (1.0 - load) for load, _ in (low, high))
    part = (limit_ms - low[1]) / (high[1] - low[1])
    return 1.0 - 1.0 / (first + (last - first) * part)
