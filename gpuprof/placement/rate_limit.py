"""The largest rate that a replica serves within an SLO, found by solving as few queues as possible.

Answers are remembered across the policies that work on one problem. A rate below one that is in time is in time, one
above another that is not is not; so most questions are answered by what was asked before. The search is a bisection
whose cells are guessed: between two rates of known tails the time grows nearly in proportion to ``1 / (1 - load)``, so
interpolation says where the bisection would end, and only the ends of that cell are asked for. The first guess is the
load that replicas much alike bore. The answer is the bisection's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import cast

from gpuprof.domain.demand import Slo
from gpuprof.domain.model_queues import ShapedQueue
from gpuprof.domain.sojourn import Arrivals, BatchServer, QueueModel, QuickQueueModel, Sojourn
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.load_search import find_load
from gpuprof.placement.rate_bound import most_within_rps
from gpuprof.placement.sustained_loads import SustainedLoads

#: The search for the largest rate that a replica can serve stops when it is known this well, from below.
RATE_PRECISION = 0.01
#: Part of its throughput at which a replica is nearly idle: one that keeps the SLO only below it is not offered for
#: more than that, since hundreds of them would do the work of one.
NEARLY_IDLE = 0.01
#: Steps after which one bisects: guesses may converge from one side only.
_HALVED = 3
#: Where the search for a load begins of which nothing is known.
_LIKELY_LOAD = 0.8
#: The tail of a coarse simulation of Poisson requests is at most this part off below the load given, beyond it the
#: other part; what is nearer to the limit is simulated finely. Of 200 replicas the largest was 7.5% below and 5.3%
#: beyond.
_LOW_LOAD, _LOW_LOAD_ERROR, _COARSE_ERROR = 0.8, 0.1, 0.2
#: How much quick answers may be off: from a load on, in parts of the SLO and of what is late. Of 31,000 random replicas
#: none was on another side than its queue.
_QUICK_ERRORS = ((0.5, 0.006, 0.05), (0.0, 0.012, 0.1))
#: Parts of the SLO at which the tail is asked for as well, for the next guess of a rate.
_FAR_BELOW, _FAR_ABOVE = 0.6, 1.7
#: So many queues are solved before quick answers are asked for, unless one was simulated: both need machine code, which
#: takes long to load. Of so many demands that many queues would be solved in any case.
_FEW_SOLVED, _MANY_DEMANDS = 160, 60
_LEAST_PART = 1e-12
#: Rates above what times allow by this factor are late whatever rounding does; nearer ones are asked for.
_CLEARLY_MORE = 1.01


@dataclass(slots=True)
class _KnownRates:
    """What is known of one replica under one SLO: the largest rate in time, the smallest that is not, their tails."""

    passes_rps: float = 0.0
    passes_ms: float = 0.0
    fails_rps: float = math.inf
    fails_ms: float = math.inf
    most_rps: float = math.inf  #: No rate above it is in time, by the replica's times alone.


@dataclass(slots=True)
class RateLimits:
    """Caches the largest rates of replicas; one object serves all policies on the same problem."""

    _known: dict[tuple[int, BatchServer, Slo], _KnownRates] = field(default_factory=dict)
    _models: dict[int, QueueModel] = field(default_factory=dict)
    _limit: Limit = field(default_factory=Limit)
    _sustained: SustainedLoads = field(default_factory=SustainedLoads)
    _solved: int = 0
    _has_code: bool = False  #: Whether machine code is loaded, or will be.

    @contextmanager
    def until(self, limit: Limit) -> Iterator[None]:
        """Within, let questions raise `TimeUpError` once the time is up, whichever policy asks them."""
        before, self._limit = self._limit, limit
        try:
            yield
        finally:
            self._limit = before

    def expect_demands(self, count: int) -> None:
        """Prepare for questions about so many demands."""
        self._has_code = self._has_code or count >= _MANY_DEMANDS

    def check_time(self) -> None:
        """Raise `TimeUpError` when the time for questions is up."""
        if self._limit.is_over:
            raise TimeUpError

    def in_time(self, queueing: QueueModel, server: BatchServer, slo: Slo, rate_rps: float) -> bool:
        """Whether a replica answers ``rate_rps`` within the SLO."""
        known = self._of(queueing, server, slo)
        if rate_rps <= known.passes_rps or rate_rps >= known.fails_rps:
            return rate_rps <= known.passes_rps
        return self._ask(queueing, server, slo, rate_rps, known)

    def largest_rps(
        self, queueing: QueueModel, server: BatchServer, slo: Slo, idle_rps: float, wanted_rps: float
    ) -> float:
        """Return the largest rate within the SLO, to `RATE_PRECISION` from below.

        ``idle_rps``: where not even this rate is in time the answer is 0.0; ``wanted_rps``: more than this is not
        looked for.
        """
        if self.in_time(queueing, server, slo, wanted_rps):
            return wanted_rps
        if idle_rps >= wanted_rps or not self.in_time(queueing, server, slo, idle_rps):
            return 0.0
        known, asked = self._of(queueing, server, slo), 0
        first = (self._sustained.load(server, slo) or _guess_load(queueing, server, slo)) * server.capacity_rps
        while True:
            halve = asked % _HALVED == _HALVED - 1
            guess = None if halve else _guess(known, server.capacity_rps, slo.latency_ms)
            if asked == 0 and known.passes_rps < first < known.fails_rps:
                guess = first
            below, above = _cell(idle_rps, wanted_rps, known, guess)
            if below > known.passes_rps:
                self._ask(queueing, server, slo, below, known)
            elif above < known.fails_rps:
                self._ask(queueing, server, slo, above, known)
            else:
                self._sustained.add(server, slo, below / server.capacity_rps)
                return below
            asked += 1

    def bound_rps(self, queueing: QueueModel, server: BatchServer, slo: Slo) -> float:
        """Return a rate above which a replica is late by its times alone, infinite where the queue decides it all."""
        return self._of(queueing, server, slo).most_rps

    def _ask(self, queueing: QueueModel, server: BatchServer, slo: Slo, rate_rps: float, known: _KnownRates) -> bool:
        """Evaluate one rate between those known, store the result, and return whether it is in time."""
        tail = math.inf if rate_rps > known.most_rps else None
        if tail is None and (self._has_code or self._solved >= _FEW_SOLVED):
            tail = _tail_at_once(queueing, server, slo, rate_rps)
        if tail is None:
            tail = _tail_ms(queueing, server, slo, rate_rps)
            self._solved += 1
            self._has_code = self._has_code or _is_simulated(queueing, server)
        passes = tail <= slo.latency_ms
        if passes:
            known.passes_rps, known.passes_ms = rate_rps, tail
        else:
            known.fails_rps, known.fails_ms = rate_rps, tail
        return passes

    def _of(self, queueing: QueueModel, server: BatchServer, slo: Slo) -> _KnownRates:
        self.check_time()
        key = (self._number(queueing), server, slo)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _KnownRates()
            if _is_quick(type(queueing)):  # else it may be a rule of thumb, which allows more than batches can do
                known.most_rps = _CLEARLY_MORE * most_within_rps(server, slo.latency_ms, slo.percentile)
        return known

    def _number(self, queueing: QueueModel) -> int:
        self._models.setdefault(id(queueing), queueing)  # kept, so that its number stays its own
        return id(queueing)


def _tail_ms(queueing: QueueModel, server: BatchServer, slo: Slo, rate_rps: float) -> float:
    """Return the time at the SLO's percentile, only as precisely as is needed to tell it from the SLO."""
    if rate_rps >= server.capacity_rps:
        return math.inf
    arrivals = Arrivals(rate_rps)
    if _is_simulated(queueing, server):
        coarse = _finite_tail_ms(queueing.pool(arrivals, (server,), coarse=True).whole, slo)
        off = _LOW_LOAD_ERROR if rate_rps < _LOW_LOAD * server.capacity_rps else _COARSE_ERROR
        if coarse > (1.0 + off) * slo.latency_ms:
            return coarse
        # How far a coarse tail is too short depends on the shape: one of waves of an hour may have seen none of them.
        if coarse < (1.0 - off) * slo.latency_ms and not isinstance(queueing, ShapedQueue):
            return coarse
    return _finite_tail_ms(queueing.sojourn(arrivals, server), slo)


@cache
def _is_quick(model: type[QueueModel]) -> bool:
    return issubclass(model, QuickQueueModel)  # which takes as long as an answer does


def _tail_at_once(queueing: QueueModel, server: BatchServer, slo: Slo, rate_rps: float) -> float | None:
    """Return about the time at the SLO's percentile, None where it is too near to the SLO or a queue must be solved."""
    if not _is_quick(type(queueing)):
        return None
    load = rate_rps / server.capacity_rps
    off, clearly = next(errors for least, *errors in _QUICK_ERRORS if load >= least)
    limits = (_FAR_BELOW, 1.0 - off, 1.0 + off, _FAR_ABOVE)
    late = cast(QuickQueueModel, queueing).late_parts(rate_rps, server, [part * slo.latency_ms for part in limits])
    if late is None:
        return None
    allowed = 1.0 - slo.percentile / 100.0
    if late[1] > (1.0 - clearly) * allowed and late[2] <= (1.0 + clearly) * allowed:
        return None
    place = next((number for number, part in enumerate(late) if part <= allowed), len(limits))
    if place in (0, len(limits)):
        return limits[min(place, len(limits) - 1)] * slo.latency_ms
    # Tails fall by the same factor over equal times.
    above, below = (math.log(max(one, _LEAST_PART)) for one in late[place - 1 : place + 1])
    part = (above - math.log(max(allowed, _LEAST_PART))) / max(above - below, _LEAST_PART)
    return slo.latency_ms * (limits[place - 1] + (limits[place] - limits[place - 1]) * min(max(part, 0.0), 1.0))


def _guess_load(queueing: QueueModel, server: BatchServer, slo: Slo) -> float:
    """Return about the load that a replica sustains by coarse simulations, 0.0 where its queue is analysed."""
    if not _is_simulated(queueing, server):
        return 0.0

    def tail_ms(load: float) -> float:
        arrivals = Arrivals(load * server.capacity_rps)
        return _finite_tail_ms(queueing.pool(arrivals, (server,), coarse=True).whole, slo)

    return find_load(tail_ms, slo.latency_ms, _LIKELY_LOAD)


def _is_simulated(queueing: QueueModel, server: BatchServer) -> bool:
    """Whether a queue is beyond analysis, as under other than Poisson requests: a coarse answer is cheaper."""
    return isinstance(queueing, ShapedQueue) or server.processes > 1 or server.pause_cv not in (None, server.latency_cv)


def _finite_tail_ms(sojourn: Sojourn, slo: Slo) -> float:
    return sojourn.percentile(slo.percentile) if sojourn.utilization < 1.0 else math.inf


def _guess(known: _KnownRates, capacity_rps: float, limit_ms: float) -> float:
    """Return about where the tail reaches the limit: linear in 1 / (1 - load) between the two rates known."""

    def stretch(rate_rps: float) -> float:
        return 1.0 / max(1e-9, 1.0 - rate_rps / capacity_rps)

    first = stretch(known.passes_rps)
    if math.isinf(known.fails_ms):
        # The queue grows for ever there; until a finite tail is known, it is taken to double as the load halves its
        # distance from one.
        wanted = first * max(1.0, limit_ms / known.passes_ms)
    else:
        slope = (stretch(known.fails_rps) - first) / (known.fails_ms - known.passes_ms)
        wanted = first + slope * (limit_ms - known.passes_ms)
    return capacity_rps * (1.0 - 1.0 / wanted)


def _cell(low: float, high: float, known: _KnownRates, guess: float | None) -> tuple[float, float]:
    """Return the cell at which bisection ends if the limit is at ``guess``; without one, its next undecided half."""
    while high - low > RATE_PRECISION * low:
        middle = (low + high) / 2.0
        if known.passes_rps < middle < known.fails_rps and guess is None:
            return middle, high
        if middle <= known.passes_rps or (guess is not None and middle < known.fails_rps and middle <= guess):
            low = middle
        else:
            high = middle
    return low, high
