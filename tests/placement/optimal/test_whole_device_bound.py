"""What whole devices of several kinds cost at least, against everything that could be done, and by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product

import pytest

from gpuprof.domain.demand import Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, Sojourn
from gpuprof.errors import InputError
from gpuprof.placement.contract import ExponentialQueue, LinearEstimator, demand, plain_device, problem, solve_and_check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.whole_device_bound import bound_whole_devices
from gpuprof.placement.problem import Problem
from tests.placement.drawn_problems import TableEstimator, TooLargeError, best_of, draw_problem

_SPEED = {"small": 1.0, "large": 5.0}


@dataclass(frozen=True, slots=True)
class _ByKind(LinearEstimator):
    """Large devices are five times as fast as small ones."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        found = LinearEstimator.estimate(self, model, device, batch, share, beside, processes)
        return replace(found, latency_ms=found.latency_ms.scale_by(1.0 / _SPEED[device.name]))


@dataclass(frozen=True, slots=True)
class _RoundedUp:
    """Batches that no row has take as long as the next that one has."""

    known: TableEstimator

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        larger = min((one for one in self.batches(model, device, share) if one >= batch), default=batch)
        found = self.known.estimate(model, device, larger, share, beside, processes)
        return replace(found, workload=replace(found.workload, batch=batch))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return self.known.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return self.known.shares(model, device)


@dataclass(frozen=True, slots=True)
class _NoWait(ExponentialQueue):
    """A request takes the time of a full batch as long as the replicas have the capacity: the papers' rule."""

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        load, full = arrivals.rate_rps / server.capacity_rps, server.latency_ms[-1]
        return Sojourn(load, float(server.batch), full, ((0.0, full), (1.0, full)))


def _pose(rates: Sequence[float], prices: Sequence[float]) -> Problem:
    asked = [demand(f"m{number}", rate, 100.0) for number, rate in enumerate(rates)]
    fleet = [(plain_device(name, price), None) for name, price in zip(_SPEED, prices, strict=True)]
    return problem(asked, fleet, _ByKind(sizes=(8,), percents=(50.0, 100.0)))


def _ask_for_queues(listed: Problem) -> Problem:
    """Return a problem of the papers' rule with the same batches in time, by queues."""
    budget = listed.options.latency_budget or 1.0
    asked = tuple(replace(one, slo=Slo(one.slo.latency_ms * budget)) for one in listed.demands)
    assert isinstance(listed.estimator, TableEstimator)
    options = replace(listed.options, latency_budget=None)
    known = _RoundedUp(listed.estimator)
    return replace(listed, demands=asked, estimator=known, queueing=_NoWait(), options=options, alike={})


@pytest.mark.slow
def test_no_map_of_all_that_there_are_costs_less() -> None:
    compared = tight = 0
    for seed in range(8):
        listed = draw_problem("priced", seed)
        try:
            best = best_of(listed).cost_per_hour
        except TooLargeError:
            continue
        if best is None:
            continue
        bound = bound_whole_devices(_ask_for_queues(listed), Limit()).cost_per_hour
        assert bound <= best * (1.0 + 1e-6), seed
        compared += 1
        tight += bound > min(entry.price_per_hour for entry in listed.fleet.entries) * (1.0 + 1e-6)
    assert compared >= 4
    assert tight >= compared / 3


@pytest.mark.parametrize(
    ("rates", "prices", "cost", "kinds"),
    [
        # A batch of 8 takes 10 ms on a small device and 2 ms on a large one: 800 and 4000 requests/s.
        ((500.0, 500.0), (1.0, 9.0), 2.0, ("small",)),
        ((500.0, 500.0), (1.0, 1.5), 1.5, ("large",)),
        ((3900.0, 3900.0, 300.0), (1.0, 3.0), 7.0, ("small", "large")),
    ],
)
def test_devices_are_whole_and_demands_may_be_divided(
    rates: Sequence[float], prices: Sequence[float], cost: float, kinds: tuple[str, ...]
) -> None:
    found = bound_whole_devices(_pose(rates, prices), Limit())
    assert found.cost_per_hour == pytest.approx(cost)
    assert found.kinds == kinds


def test_where_nothing_is_in_time_on_any_kind_the_bound_is_infinite() -> None:
    posed = _pose((500.0,), (1.0, 9.0))
    hasty = replace(posed, demands=(replace(posed.demands[0], slo=Slo(0.1)),), alike={})
    assert math.isinf(bound_whole_devices(hasty, Limit()).cost_per_hour)


def test_without_time_the_bound_is_one_cheapest_device() -> None:
    assert bound_whole_devices(_pose((3900.0, 3900.0), (1.0, 3.0)), Limit(0.0)).cost_per_hour == pytest.approx(1.0)


def test_a_map_among_several_kinds_says_more_than_the_cheapest_device() -> None:
    posed = _pose((3900.0, 3900.0), (1.0, 3.0))
    found, mapped = solve_and_check(Optimal(), replace(posed, options=replace(posed.options, time_limit_s=0.01)))
    assert found.lower_bound_cost_per_hour is not None
    assert 6.0 - 1e-6 <= found.lower_bound_cost_per_hour <= (mapped.predicted.cost_per_hour or 0.0) + 1e-9


_SLOWER, _SIZES, _PERCENTS = 1.35, (2, 8), (25.0, 50.0, 100.0)


@dataclass(frozen=True, slots=True)
class _AnyNeighbour(_ByKind):
    """The upper end of a time beside others is so many times that alone, whoever they are."""

    slower: float = _SLOWER

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        if share.sm_pct not in self.percents:
            raise InputError(f"nothing is known of {share.sm_pct}%")
        found = _ByKind.estimate(self, model, device, batch, share, (), processes)
        return replace(found, latency_ms=self.slow_beside_any(device, found.latency_ms)) if beside else found

    def slow_beside_any(self, device: Device, alone: Figure) -> Figure:
        return replace(alone, high=self.slower * alone.upper())


@dataclass(frozen=True, slots=True)
class _Held:
    """What a device holds of a demand."""

    replicas: int = 0
    most_rps: float = 0.0
    serves_all: bool = False  #: One of the replicas does.

    def __add__(self, other: _Held) -> _Held:
        return _Held(
            self.replicas + other.replicas, self.most_rps + other.most_rps, self.serves_all or other.serves_all
        )


def _draw_crowd(seed: int) -> Problem:
    drawn = random.Random(seed)
    posed = _pose([drawn.uniform(20.0, 700.0) for _ in range(2)], (1.0, drawn.choice((1.3, 1.7, 2.6))))
    asked = tuple(replace(one, slo=Slo(drawn.uniform(20.0, 120.0))) for one in posed.demands)
    known = _AnyNeighbour(sizes=_SIZES, percents=_PERCENTS, source="predicted")
    return replace(posed, demands=asked, estimator=known, alike={})


def _hold_replica(posed: Problem, device: Device, number: int, percent: float, slower: float) -> _Held:
    """Return the best replica of a demand, by the throughput of its batches in time and by its own queue."""
    asked, most, serves_all = posed.demands[number], 0.0, False
    for size in _SIZES:
        estimates = (posed.estimator.estimate(asked.model, device, n, Share(percent)) for n in range(1, size + 1))
        server = BatchServer(tuple(slower * one.latency_ms.upper() for one in estimates), size, 0.0)
        rates = [(1000.0 * n / ms, ms) for n, ms in enumerate(server.latency_ms, 1)]
        in_time = max([0.0, *(rate for rate, ms in rates if ms <= asked.slo.latency_ms)])
        # What a bound may count on: requests in time are 99% of those served, and all are served.
        most = max(most, min(in_time / (0.99 - 1e-5), max(rates)[0]))
        if asked.rate_rps < server.capacity_rps:
            whole = posed.queueing.pool(Arrivals(asked.rate_rps), (server,)).whole
            serves_all |= whole.percentile(asked.slo.percentile) <= asked.slo.latency_ms
    return _Held(1, most, serves_all)


def _list_contents(posed: Problem, device: Device) -> set[tuple[_Held, ...]]:
    """Return all that one device may hold of the demands: one replica alone, or several that slow one another down."""
    numbers, contents = range(len(posed.demands)), {tuple(_Held() for _ in posed.demands)}
    kinds = list(product(numbers, _PERCENTS))
    for count in range(1, 5):
        for chosen in combinations_with_replacement(kinds, count):
            if sum(percent for _, percent in chosen) <= 100.0:
                held = [_Held() for _ in numbers]
                for number, percent in chosen:
                    held[number] += _hold_replica(posed, device, number, percent, _SLOWER if count > 1 else 1.0)
                contents.add(tuple(held))
    return contents


def _find_least_cost(posed: Problem, most_devices: int) -> float:
    """Return what the cheapest devices cost that may serve everything; infinite where so many do not."""
    able = [
        (entry.price_per_hour, held) for entry in posed.fleet.entries for held in _list_contents(posed, entry.device)
    ]
    least = math.inf
    for chosen in combinations_with_replacement(able, most_devices):
        cost = sum(price for price, held in chosen if any(one.replicas for one in held))
        if cost < least and all(_is_served(posed, number, [held for _, held in chosen]) for number in (0, 1)):
            least = cost
    return least


def _is_served(posed: Problem, number: int, contents: Sequence[tuple[_Held, ...]]) -> bool:
    together = sum((held[number] for held in contents), _Held())
    enough = together.most_rps >= posed.demands[number].rate_rps
    return together.serves_all or (together.replicas > 1 and enough)


def test_where_neighbours_slow_one_another_no_map_of_all_that_there_are_costs_less() -> None:
    higher = tight = 0
    for seed in range(16):
        posed = _draw_crowd(seed)
        best = _find_least_cost(posed, 2)
        found = bound_whole_devices(posed, Limit()).cost_per_hour
        assert found <= best * (1.0 + 1e-6) or best > 2.0 * max(one.price_per_hour for one in posed.fleet.entries), seed
        calm = _AnyNeighbour(sizes=_SIZES, percents=_PERCENTS, source="predicted", slower=1.0)
        unaware = replace(posed, estimator=calm, alike={})
        higher += found > bound_whole_devices(unaware, Limit()).cost_per_hour * (1.0 + 1e-6)
        tight += found >= best * (1.0 - 1e-6)
    assert higher >= 2, higher
    assert tight >= 8, tight
