"""What whole devices of several kinds cost at least, against everything that could be done, and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from bench.placement_problems import TableEstimator, TooLargeError, best_of, draw_problem
from gpuprof.domain.demand import Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.share import Share
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, solve_and_check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.whole_device_bound import bound_whole_devices
from gpuprof.placement.problem import Problem

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
    return replace(listed, demands=asked, estimator=_RoundedUp(listed.estimator), options=options, alike={})


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
