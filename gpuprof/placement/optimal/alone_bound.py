"""A fast lower bound: the devices demands take without interference, from tables of all workloads.

Whole replicas serve a demand, and each takes its share of a device. Their shares cost at least as much as the cheapest
shares whose replicas can serve all pieces of the demand together, and at least as much as the demand's rate under the
share with the most requests per price.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.interference_table import Floats, Integers, tabulate_interference
from gpuprof.domain.model_queues import queue_of
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import QuickQueueModel
from gpuprof.errors import InputError
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.demand_classes import group_alike
from gpuprof.placement.optimal.kind_table import KindTable
from gpuprof.placement.optimal.partition_planner import PartitionPlanner
from gpuprof.placement.optimal.waiting_bound import least_rate_within
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_bound import SLACK
from gpuprof.placement.segment import Segments

#: Pieces of a demand: replicas serving all of it have at least this many by `count_pieces`; two replicas of 49% do
#: not.
PIECES = 37
#: Negligible part of a piece; larger than the tolerance of the feasibility check for demands and rates.
_NOTHING = 1e-3
#: Relative tolerance of times beyond the tolerance of the feasibility check.
GENEROUS = 1e-8
#: Factor by which a request may exceed its SLO in a bound: pools are judged by simulation.
PATIENT = 1.05
#: Bounds under the queueing model by segments: each plan on the way to the final map needs the same bound.
_KNOWN: WeakKeyDictionary[Segments, _QueueBound] = WeakKeyDictionary()


def count_pieces(fractions: Floats) -> Integers:
    """Return the number of pieces of replicas serving parts of a demand; replicas of the whole demand have `PIECES`.

    With N = PIECES - 1, a part f has floor(N f) + 1 pieces. This is more than N f, so the parts of a whole demand have
    more than N pieces. Two parts just below a half have N pieces, which shows that they do not serve the demand.
    """
    counts = np.floor((PIECES - 1) * fractions + _NOTHING) + 1.0
    return np.where(fractions > 0.0, np.minimum(counts, PIECES), 0.0).astype(np.int64)


@dataclass(slots=True)
class LeastCosts:
    """Minimum costs of replicas by their shares of devices."""

    classes: int
    per_rps: Floats = field(init=False)  #: Cost of each request per second, by class.
    #: Cost of a replica, by class and number of pieces the replica can serve.
    of_pieces: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.per_rps = np.full(self.classes, np.inf)
        self.of_pieces = np.full((self.classes, PIECES + 1), np.inf)

    def add(self, classes: Integers, costs: Floats, rates: Floats, asked: Floats) -> None:
        """Add workloads: their classes, costs, maximum served rates, and the rate of their demand for each."""
        able = np.flatnonzero(rates > 0.0)
        classes, costs, rates, asked = classes[able], costs[able], rates[able], asked[able]
        np.minimum.at(self.per_rps, classes, costs / rates)
        np.minimum.at(self.of_pieces, (classes, count_pieces(rates / asked)), costs)

    def forget(self, number: int) -> None:
        """Remove the costs of a class."""
        self.per_rps[number] = self.of_pieces[number] = np.inf

    def bound(self, needed: Floats, demands: Floats) -> Floats:
        """Return the minimum cost of each class by its rate and number of demands; 0 where nothing serves the class."""
        # A replica serving more pieces can also serve fewer.
        costs = np.minimum.accumulate(self.of_pieces[:, :0:-1], axis=1)[:, ::-1]
        whole, _ = find_cheapest_covers(costs)
        known = np.isfinite(self.per_rps)
        totals = np.maximum(np.where(known, self.per_rps, 0.0) * needed, whole * demands)
        return np.where(np.isfinite(totals), totals, 0.0)


def bound_alone(kinds: Sequence[KindTable], needed: Floats, demands: Floats) -> float:
    """Return a lower bound on the cost of serving all demands.

    Parameters
    ----------
    kinds : sequence of KindTable
    needed : ndarray
        Requests per second, by class.
    demands : ndarray
        Number of demands, by class.
    """
    least = LeastCosts(len(needed))
    for kind in kinds:
        rates = kind.most_rps(1, np.zeros(kind.table.pressures.shape[1]))
        least.add(kind.classes, kind.price * kind.sizes / kind.space, rates, kind.rates_rps)
    return float(least.bound(needed, demands).sum())


def bound_queues_alone(problem: Problem, segments: Segments, limit: Limit) -> float:
    """Return a lower bound on the cost of a map under the queueing model; 0 where estimators give no tables.

    Only the batches in time count for a replica that forms batches up to its own size. The replica serves at most their
    rate divided by the part of the requests that must be in time (`gpuprof.placement.rate_bound.most_within_rps`).
    Under Poisson arrivals, the capacity of all replicas together must exceed the arrival rate so that few requests wait
    too long (`gpuprof.placement.optimal.waiting_bound`).

    Parameters
    ----------
    problem : Problem
        Without a latency budget.
    segments : Segments
        Of the same problem.
    limit : Limit
        Demands that are not evaluated by then add nothing to the bound; the next call evaluates them first.
    """
    if segments not in _KNOWN:
        _KNOWN[segments] = _QueueBound(problem, segments)
    return _KNOWN[segments].raise_bound(limit)


class _QueueBound:
    """The bound of one problem under the queueing model over the demands evaluated so far."""

    def __init__(self, problem: Problem, segments: Segments) -> None:
        self._problem, self._segments = problem, weakref.proxy(segments)
        self._classes = group_alike(problem, segments)
        self._least, self._waiting = LeastCosts(len(self._classes)), LeastCosts(len(self._classes))
        self._asked_rps = np.array([find_least_rps(problem, problem.demand(model)) for model in self._classes])
        self._left = list(enumerate(self._classes))
        self._planner = PartitionPlanner(problem, self._segments)
        self._tabulated: dict[object, Floats] = {}

    def raise_bound(self, limit: Limit) -> float:
        """Evaluate demands until the time is up, and return the bound."""
        while self._left and not limit.is_over:
            number, model = self._left.pop()
            try:
                told = all(self._add(number, model, entry) for entry in self._problem.fleet.entries)
            except InputError:  # a kind of device without data might serve all of the class
                self._least.forget(number)
                self._waiting.forget(number)
                continue
            if not told:
                self._left = []
                self._least, self._waiting = LeastCosts(len(self._classes)), LeastCosts(len(self._classes))
        needed = [sum(one.rate_rps for one in own) for own in self._classes.values()]
        demands = [float(len(own)) for own in self._classes.values()]
        count = np.array(demands)
        by_rates = self._least.bound(np.array(needed), count)
        by_waiting = self._waiting.bound(count * self._asked_rps, count)
        return float(np.maximum(by_rates, by_waiting).sum())

    def _add(self, number: int, model: str, entry: FleetEntry) -> bool:
        """Add all workloads of a class on a kind of device; return whether a table gives their times."""
        device, demand = entry.device, self._problem.demand(model)
        shares = self._problem.estimator.shares(model, device)
        if device.kind != "gpu" or any(share.mig is not None for share in shares):
            return False
        series = list(list_series(self._segments, entry, model, self._planner.steps(device, None, model)))
        # Services of a model usually have equal times: the times under the largest share show whether they do.
        name = (device.name, demand.source_model or model, tuple(series))
        last = _tabulate_latency(self._problem, entry, model, series[-1:])
        if last is None:
            return False
        if name not in self._tabulated or not np.array_equal(self._tabulated[name][-len(last) :], last):
            tabulated = _tabulate_latency(self._problem, entry, model, series)
            if tabulated is None:
                return False
            self._tabulated[name] = tabulated
        own = _serve_most(demand, entry, series, self._tabulated[name])
        numbers, asked = np.full(len(series), number), np.full(len(series), self._asked_rps[number])
        self._least.add(numbers, own.costs, own.served_rps, np.full(len(series), demand.rate_rps))
        if self._asked_rps[number] > 0.0:
            self._waiting.add(numbers, own.costs, np.minimum(own.in_time_rps, asked), asked)
        return True


@dataclass(frozen=True, slots=True)
class _Series:
    """The batches replicas may form under a share."""

    share: Share
    processes: int
    largest: int


def _tabulate_latency(problem: Problem, entry: FleetEntry, model: str, series: Sequence[_Series]) -> Floats | None:
    workloads = [
        Workload(model, batch, own.share, own.processes) for own in series for batch in range(1, own.largest + 1)
    ]
    table = tabulate_interference(problem.estimator, entry.device, workloads)
    return None if table is None else table.least_times_ms(1, np.zeros(table.pressures.shape[1]))[0]


@dataclass(frozen=True, slots=True)
class _MostServed:
    """Cost and maximum served rates of a demand's replicas under each share."""

    costs: Floats
    served_rps: Floats  #: All requests, for which the requests in time may stand.
    in_time_rps: Floats  #: Requests in batches that are in time.


def _serve_most(demand: Demand, entry: FleetEntry, series: Sequence[_Series], latency: Floats) -> _MostServed:
    """Return the maximum rates of a demand's replicas under each share, from the times of all batches."""
    begins = np.cumsum([0, *(own.largest for own in series[:-1])])
    requests = np.concatenate([own.processes * np.arange(1, own.largest + 1) for own in series])
    served = 1000.0 * requests / latency
    exact, patient = (
        np.maximum.reduceat(np.where(latency <= demand.slo.latency_ms * part, served, 0.0), begins)
        for part in (1.0 + GENEROUS, PATIENT)
    )
    answered = exact / (demand.slo.percentile / 100.0 - SLACK)
    most = np.minimum(np.minimum(np.maximum.reduceat(served, begins), answered), demand.rate_rps)
    costs = [entry.price_per_hour * entry.device.fraction(own.share) for own in series]
    return _MostServed(np.array(costs), most * (1.0 + GENEROUS), patient * (1.0 + GENEROUS))


def find_least_rps(problem: Problem, demand: Demand) -> float:
    """Return the minimum capacity of all replicas of a demand; 0.0 where arrivals are not Poisson."""
    with suppress(InputError):
        if isinstance(queue_of(problem.queueing, demand.model), QuickQueueModel):
            late = 1.0 - demand.slo.percentile / 100.0 + SLACK
            return 1000.0 * least_rate_within(demand.rate_rps / 1000.0, demand.slo.latency_ms * PATIENT, late)
    return 0.0


def list_series(segments: Segments, entry: FleetEntry, model: str, steps: Sequence[float]) -> Iterator[_Series]:
    """Yield the batches a replica may form, for each share and number of processes."""
    for percent in steps:
        share = Share(percent)
        largest = max(segments.search_space.listed_batches(model, entry.device, share), default=0)
        for processes in segments.search_space.processes(share) if largest else ():
            yield _Series(share, processes, largest)


def find_cheapest_covers(costs: Floats) -> tuple[Floats, Integers]:
    """Return the least costs of pieces that make whole demands, and the multiplicity of each number of pieces.

    Parameters
    ----------
    costs : (n, p) ndarray
        By demand, of 1, 2, … pieces.

    Returns
    -------
    (n,) ndarray, (n, p) ndarray
    """
    demands, most = costs.shape
    every, sizes = np.arange(demands), np.arange(1, most + 1)
    least, chosen = np.zeros((demands, PIECES + 1)), np.zeros((demands, PIECES + 1), dtype=np.int64)
    for total in range(1, PIECES + 1):
        reached = least[:, np.maximum(total - sizes, 0)] + costs
        best = chosen[:, total] = reached.argmin(axis=1)
        least[:, total] = reached[every, best]
    counts, left = np.zeros((demands, most), dtype=np.int64), np.full(demands, PIECES)
    while np.any(left > 0):
        taken = chosen[every, left]
        counts[every, taken] += left > 0
        left = np.maximum(left - sizes[taken], 0)
    return least[:, PIECES], counts
