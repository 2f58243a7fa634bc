"""Kinds of devices that are left out could not have made a map cheaper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.fleet import Fleet
from gpuprof.domain.share import Share
from gpuprof.placement.contract import demand, plain_device, problem, sliced_device, solve_and_check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import fleet_pruning, optimal
from gpuprof.placement.optimal.fleet_pruning import PrunedFleet, prune_fleet
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.portfolio import QuickPolicies
from gpuprof.placement.optimal.quick_plan import make_quick_plan
from gpuprof.placement.optimal.whole_device_bound import WholeDeviceBound
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments
from tests.placement.curved import CurvedEstimator

PRICES = {"old": 0.5, "middle": 2.0, "large": 7.0}
_SPEED = {"old": 0.3, "middle": 1.5, "large": 4.0}


@dataclass(frozen=True, slots=True)
class _ByDevice(CurvedEstimator):
    """Devices are the quicker, the dearer they are."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        found = CurvedEstimator.estimate(self, model, device, batch, share, beside, processes)
        return replace(found, latency_ms=found.latency_ms.scale_by(1.0 / _SPEED[device.name]))


def _make_problem(demands: list[tuple[float, float]], prices: Mapping[str, float] = PRICES) -> Problem:
    asked = [demand(f"m{i}", rate, slo) for i, (rate, slo) in enumerate(demands)]
    fleet = [(plain_device(name, price), None) for name, price in prices.items()]
    estimator = _ByDevice(disturbance=0.05, sizes=(1, 4), percents=(50.0, 100.0))
    return problem(asked, fleet, estimator, Options())  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [[(60.0, 40.0)], [(5.0, 100.0), (20.0, 60.0)], [(900.0, 30.0)]])
def test_leaving_kinds_out_loses_no_cheaper_map_and_no_bound(
    asked: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    posed = _make_problem(asked)
    found, mapped = solve_and_check(Optimal(), posed)
    monkeypatch.setattr(optimal, "prune_fleet", lambda problem, limit: PrunedFleet(problem))
    whole, other = solve_and_check(Optimal(), posed)
    assert not whole.unplaced
    cost, cheapest = mapped.predicted.cost_per_hour, other.predicted.cost_per_hour
    assert cost is not None and cheapest is not None
    assert cost <= cheapest * (1.0 + 1e-9)
    assert (found.lower_bound_cost_per_hour or 0.0) <= cheapest * (1.0 + 1e-9)
    assert (found.lower_bound_gpus or 0) <= len(whole.gpus)


def test_a_kind_of_which_one_costs_more_than_a_known_map_is_left_out_and_bounds_the_cost() -> None:
    pruned = prune_fleet(_make_problem([(5.0, 300.0)]), Limit())
    assert [entry.device.name for entry in pruned.problem.fleet.entries] == ["old"]
    assert pruned.known is not None and not pruned.known.unplaced
    assert pruned.least_price == PRICES["middle"]
    dear = replace(pruned.known, lower_bound_gpus=9, lower_bound_cost_per_hour=9.0, gpus=pruned.known.gpus * 9)
    restored = pruned.restore(dear)
    assert restored.gpus == pruned.known.gpus
    assert (restored.lower_bound_cost_per_hour, restored.lower_bound_gpus) == (PRICES["old"], 1)


def test_one_device_of_a_kind_that_is_left_out_may_do_the_work_of_many() -> None:
    pruned = prune_fleet(_make_problem([(400.0, 300.0)]), Limit())
    assert pruned.known is not None and len(pruned.known.gpus) > 1 and math.isfinite(pruned.least_price)
    restored = pruned.restore(replace(pruned.known, lower_bound_gpus=2, lower_bound_cost_per_hour=1.0))
    assert restored.lower_bound_gpus == 1


def test_a_map_as_cheap_as_the_cheapest_device_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimal, "_place_split", None)  # not to be called
    found = Optimal().place(_make_problem([(5.0, 300.0)]))
    assert [gpu.device for gpu in found.gpus] == ["old"]
    assert found.lower_bound_cost_per_hour == PRICES["old"]
    assert not found.stopped


def test_a_short_time_limit_begins_with_the_kind_that_is_cheapest_by_itself() -> None:
    posed = _make_problem([(900.0, 30.0)])
    alone = {name: _cost_alone(posed, position) for position, name in enumerate(PRICES)}
    quick = replace(posed, options=Options(time_limit_s=0.01))
    found = Optimal().place(quick)
    assert found.stopped and not found.unplaced
    assert math.fsum(PRICES[gpu.device] for gpu in found.gpus) <= min(alone.values()) * (1.0 + 1e-9)


def test_with_a_limit_quick_policies_are_not_run_on_kinds_that_cannot_be_cheaper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def record_kinds(_: QuickPolicies, problem: Problem, limit: Limit, known: Placement | None) -> None:
        assert known is not None and not known.unplaced
        asked.append({entry.device.name for entry in problem.fleet.entries})

    monkeypatch.setattr(QuickPolicies, "find_predicted", record_kinds)
    posed = _make_problem([(400.0, 300.0)])
    kept = {entry.device.name for entry in prune_fleet(posed, Limit()).problem.fleet.entries}
    assert kept < set(PRICES)
    Optimal().place(replace(posed, options=Options(time_limit_s=2.0)))
    assert asked == [kept]


def test_a_poor_map_of_the_first_kind_is_not_the_last_however_short_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    posed = _make_problem([(400.0, 300.0)])
    dearest_first = [(1.0, one) for one in sorted(posed.fleet.entries, key=lambda one: -one.price_per_hour)]
    monkeypatch.setattr(fleet_pruning, "_guess_costs", lambda _: dearest_first)
    monkeypatch.setattr(fleet_pruning, "bound_whole_devices", lambda *_: WholeDeviceBound(0.1))
    found = prune_fleet(posed, Limit(1e-6)).known
    assert found is not None and not found.unplaced
    assert {gpu.device for gpu in found.gpus} == {"old"}


@pytest.mark.parametrize(("times", "tried"), [(1.9, {"large", "middle", "old"}), (2.1, {"large"})])
def test_kinds_that_are_guessed_to_cost_far_more_than_the_first_map_are_not_tried(
    times: float, tried: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    posed = _make_problem([(400.0, 300.0)])
    asked: set[str] = set()
    entries = sorted(posed.fleet.entries, key=lambda one: -one.price_per_hour)
    guesses = [(times * entries[0].price_per_hour, one) for one in entries]
    monkeypatch.setattr(fleet_pruning, "_guess_costs", lambda _: guesses)
    monkeypatch.setattr(fleet_pruning, "bound_whole_devices", lambda *_: WholeDeviceBound(0.1))
    make = fleet_pruning._quick_maps

    def record(problem: Problem, *more: Any, **named: Any) -> Iterator[Placement]:
        asked.update(entry.device.name for entry in problem.fleet.entries)
        return make(problem, *more, **named)

    monkeypatch.setattr(fleet_pruning, "_quick_maps", record)
    prune_fleet(posed, Limit())
    assert asked == tried


def test_what_stands_alone_on_a_device_is_moved_to_a_cheaper_kind() -> None:
    pruned = prune_fleet(
        _make_problem([(1200.0, 30.0), (20.0, 100.0)], {"old": 0.9, "middle": 2.0, "large": 7.0}), Limit()
    )
    assert pruned.known is not None and not pruned.known.unplaced
    assert sorted(gpu.device for gpu in pruned.known.gpus) == ["middle", "old"]
    assert str(pruned.known.found_by).endswith("cheaper kinds")


def test_of_many_kinds_those_that_another_surpasses_by_the_data_sheet_for_less_are_not_asked_about() -> None:
    asked: set[str] = set()

    class RecordingByDevice(_ByDevice):
        def estimate(self, model: str, device: Device, *more: object, **named: object) -> Estimate:
            asked.add(device.name)
            return replace(CurvedEstimator.estimate(self, model, device, *more, **named))  # type: ignore[arg-type]

    rates = {"dear": 1.0, "wide": 3.0, **{f"kind{number}": 2.0 for number in range(6)}}
    prices = {"dear": 1.05, "wide": 1.1, **{f"kind{number}": 1.0 for number in range(6)}}
    fleet = [(replace(plain_device(name, prices[name]), flops_per_s={"float32": rates[name]}), None) for name in rates]
    posed = problem([demand("m0", 5.0, 300.0)], fleet, RecordingByDevice(), Options())  # type: ignore[arg-type]
    assert prune_fleet(posed, Limit()).known is not None
    assert "wide" in asked
    assert "dear" not in asked


def _cost_alone(posed: Problem, position: int) -> float:
    own = replace(posed, fleet=Fleet((posed.fleet.entries[position],)), alike={})
    placed = make_quick_plan(own, Segments(own), Limit())
    return math.inf if placed.unplaced else math.fsum(PRICES[gpu.device] for gpu in placed.gpus)


def test_demands_that_no_kind_serves_leave_the_fleet_as_it_is() -> None:
    posed = _make_problem([(5.0, 0.1)])
    assert prune_fleet(posed, Limit()).problem is posed


def test_segments_of_instances_and_of_the_whole_that_do_as_much_are_compared() -> None:
    asked = [demand("m0", 90_000.0, 50.0)]  # more than any share serves, so that the most efficient is looked for
    posed = problem(asked, [(sliced_device(), None)], _Alike())  # type: ignore[arg-type]
    assert make_quick_plan(posed, Segments(posed), Limit()).gpus


class _Alike(CurvedEstimator):
    """What shares do is in proportion to their units, whether they are of instances or not."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        found = CurvedEstimator.estimate(self, model, device, batch, Share(), (), 1)
        workload = Workload(model, batch, share, processes)
        return replace(
            found,
            workload=workload,
            latency_ms=replace(found.latency_ms, value=2.0 * processes / device.fraction(share), low=None, high=None),
        )
