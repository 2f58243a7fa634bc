"""A fast lower bound: the devices that demands take without interference, by tables of all workloads.

A demand is served by whole replicas, each of which takes its share of a device: no less than the cheapest shares whose
replicas can serve all of its pieces together, and no less than its rate takes where a share does most for its price.
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

#: Pieces of a demand: replicas that serve it have at least so many by `count_pieces`; two of 49% do not.
PIECES = 37
#: Part of a piece that counts for nothing; more than the check of a map lets demands and rates be missed by.
_NOTHING = 1e-3
#: Relative tolerance of times beyond that of the check of a map.
GENEROUS = 1e-8
#: Pools are simulated, and judged by that: for a bound a request may exceed its SLO by this factor.
PATIENT = 1.05
#: Bounds by queues, by what they were worked out from: each plan on the way to the last asks for the same.
_KNOWN: WeakKeyDictionary[Segments, _QueueBound] = WeakKeyDictionary()


def count_pieces(fractions: Floats) -> Integers:
    """Return how many pieces replicas count for that serve parts of a demand: those that serve all of it `PIECES`.

    With N = PIECES - 1, a part f counts for floor(N f) + 1, which is more than N f, so that parts that make a demand
    count for more than N. Two that are just below a half count for N, and show that they make none.
    """
    counts = np.floor((PIECES - 1) * fractions + _NOTHING) + 1.0
    return np.where(fractions > 0.0, np.minimum(counts, PIECES), 0.0).astype(np.int64)


@dataclass(slots=True)
class LeastCosts:
    """What replicas cost at least by their shares of devices."""

    classes: int
    per_rps: Floats = field(init=False)  #: By class: of each request per second.
    of_pieces: Floats = field(init=False)  #: By class and number of pieces: of a replica that can serve so many.

    def __post_init__(self) -> None:
        self.per_rps = np.full(self.classes, np.inf)
        self.of_pieces = np.full((self.classes, PIECES + 1), np.inf)

    def add(self, classes: Integers, costs: Floats, rates: Floats, asked: Floats) -> None:
        """Take workloads in: their classes, costs, what they serve at most, what their demands ask for each."""
        able = np.flatnonzero(rates > 0.0)
        classes, costs, rates, asked = classes[able], costs[able], rates[able], asked[able]
        np.minimum.at(self.per_rps, classes, costs / rates)
        np.minimum.at(self.of_pieces, (classes, count_pieces(rates / asked)), costs)

    def forget(self, number: int) -> None:
        """Take all of a class out again."""
        self.per_rps[number] = self.of_pieces[number] = np.inf

    def bound(self, needed: Floats, demands: Floats) -> Floats:
        """Return what each class costs at least by its rate and number of demands; 0 where nothing serves it."""
        # A replica that serves more pieces can serve fewer.
        costs = np.minimum.accumulate(self.of_pieces[:, :0:-1], axis=1)[:, ::-1]
        whole, _ = find_cheapest_covers(costs)
        known = np.isfinite(self.per_rps)
        totals = np.maximum(np.where(known, self.per_rps, 0.0) * needed, whole * demands)
        return np.where(np.isfinite(totals), totals, 0.0)


def bound_alone(kinds: Sequence[KindTable], needed: Floats, demands: Floats) -> float:
    """Return what no way to serve all demands costs less than.

    Parameters
    ----------
    kinds : sequence of KindTable
    needed : ndarray
        Requests per second, by class.
    demands : ndarray
        How many there are, by class.
    """
    least = LeastCosts(len(needed))
    for kind in kinds:
        rates = kind.most_rps(1, np.zeros(kind.table.pressures.shape[1]))
        least.add(kind.classes, kind.price * kind.sizes / kind.space, rates, kind.rates_rps)
    return float(least.bound(needed, demands).sum())


def bound_queues_alone(problem: Problem, segments: Segments, limit: Limit) -> float:
    """Return what no map for these queues costs less than; 0 where estimators tell no tables.

    Of a replica that forms batches up to its own only those in time count, and it stands for no more than these over
    the part of the requests that must be in time (`gpuprof.placement.rate_bound.most_within_rps`). Of Poisson
    requests all replicas together must be able to serve more than come, so that few wait for too long
    (`gpuprof.placement.optimal.waiting_bound`).

    Parameters
    ----------
    problem : Problem
        Without a latency budget.
    segments : Segments
        Of the same problem.
    limit : Limit
        What demands cost that were not looked at by then is left out; the next time they are looked at first.
    """
    if segments not in _KNOWN:
        _KNOWN[segments] = _QueueBound(problem, segments)
    return _KNOWN[segments].raise_bound(limit)


class _QueueBound:
    """The bound of one problem by queues, as far as demands were looked at."""

    def __init__(self, problem: Problem, segments: Segments) -> None:
        self._problem, self._segments = problem, weakref.proxy(segments)
        self._classes = group_alike(problem, segments)
        self._least, self._waiting = LeastCosts(len(self._classes)), LeastCosts(len(self._classes))
        self._asked_rps = np.array([find_least_rps(problem, problem.demand(model)) for model in self._classes])
        self._left = list(enumerate(self._classes))
        self._planner = PartitionPlanner(problem, self._segments)
        self._tabulated: dict[object, Floats] = {}

    def raise_bound(self, limit: Limit) -> float:
        """Look at demands until the time is up, and return the bound."""
        while self._left and not limit.is_over:
            number, model = self._left.pop()
            try:
                told = all(self._add(number, model, entry) for entry in self._problem.fleet.entries)
            except InputError:  # of some kind of device nothing is known, which might do all
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
        """Take in all that may run of a class on a kind of device; whether a table tells it."""
        device, demand = entry.device, self._problem.demand(model)
        shares = self._problem.estimator.shares(model, device)
        if device.kind != "gpu" or any(share.mig is not None for share in shares):
            return False
        series = list(list_series(self._segments, entry, model, self._planner.steps(device, None, model)))
        # Services of one model take the same times: that of the largest share tells whether they do.
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
    """The batches that replicas may form under one share."""

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
    """What replicas of a demand cost under each share, and serve at most."""

    costs: Floats
    served_rps: Floats  #: Of all requests, for which those in time may stand.
    in_time_rps: Floats  #: In batches that are in time.


def _serve_most(demand: Demand, entry: FleetEntry, series: Sequence[_Series], latency: Floats) -> _MostServed:
    """Return what a demand's replicas serve at most under each share, by the times of all batches."""
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
    """Return what all replicas of a demand must be able to serve at least, 0.0 where requests are not Poisson's."""
    with suppress(InputError):
        if isinstance(queue_of(problem.queueing, demand.model), QuickQueueModel):
            late = 1.0 - demand.slo.percentile / 100.0 + SLACK
            return 1000.0 * least_rate_within(demand.rate_rps / 1000.0, demand.slo.latency_ms * PATIENT, late)
    return 0.0


def list_series(segments: Segments, entry: FleetEntry, model: str, steps: Sequence[float]) -> Iterator[_Series]:
    """Yield for each share and number of processes which batches a replica may form."""
    for percent in steps:
        share = Share(percent)
        largest = max(segments.search_space.listed_batches(model, entry.device, share), default=0)
        for processes in segments.search_space.processes(share) if largest else ():
            yield _Series(share, processes, largest)


def find_cheapest_covers(costs: Floats) -> tuple[Floats, Integers]:
    """Return the least costs of pieces that make whole demands, and how often each number of pieces is taken.

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
