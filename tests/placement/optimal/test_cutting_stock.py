"""Maps of classes whose neighbours act through sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpuprof.domain.fleet import Fleet
from gpuprof.placement.contract import evidence
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.cutting_stock import place_classes
from gpuprof.placement.optimal.demand_classes import is_of_few_classes, number_classes
from gpuprof.placement.optimal.kind_table import tabulate_kinds
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.table_pricing import DemandPart, make_table_pricing
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments
from tests.placement.curved import CurvedEstimator
from tests.placement.optimal.summed import problem


def cost(given: Problem, gpus: Sequence[PlacedGpu]) -> float:
    return sum(given.entry(gpu.device).price_per_hour for gpu in gpus)


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_map_of_classes_is_sound_serves_everybody_and_costs_no_more_than_a_quick_policys(
    seed: int, kinds: int
) -> None:
    given = problem(seed, kinds=kinds)
    quick = make_policy("igniter").place(given)
    gpus = place_classes(given, Segments(given), quick.gpus, Limit())
    assert gpus is not None
    placement = Placement("optimal", gpus)
    assert check(to_map(given, placement), evidence(given)) == ()
    served = placement.rates_rps()
    assert all(served[one.model] == pytest.approx(one.rate_rps) for one in given.demands)
    assert quick.unplaced or cost(given, gpus) <= cost(given, quick.gpus) + 1e-9


def test_a_fleet_that_is_too_small_and_neighbours_that_do_not_act_through_sums_have_no_such_map() -> None:
    given = problem(0)
    few = replace(given, fleet=Fleet(tuple(replace(entry, count=2) for entry in given.fleet.entries)))
    assert place_classes(few, Segments(few), (), Limit()) is None
    untold = replace(given, estimator=CurvedEstimator(disturbance=0.3))
    assert place_classes(untold, Segments(untold), (), Limit()) is None


def test_optimal_uses_classes_however_short_its_limit_and_prints_a_bound_that_holds() -> None:
    given = problem(1)
    assert is_of_few_classes(given, Segments(given))
    placement = Optimal().place(replace(given, options=replace(given.options, time_limit_s=5.0)))
    assert not placement.unplaced
    assert len(placement.gpus) <= len(make_policy("igniter").place(given).gpus)
    assert 0 < (placement.lower_bound_gpus or 0) <= len(placement.gpus)


def test_demands_that_are_all_different_are_no_classes() -> None:
    given = problem(0, copies=1)
    assert not is_of_few_classes(given, Segments(given))


def test_parts_that_are_priced_together_keep_their_slos_and_are_worth_more_than_asked_for_most_first() -> None:
    given = problem(3)
    segments, device = Segments(given), given.fleet.entries[0].device
    kind = tabulate_kinds(given, segments)[0]
    numbers = number_classes(given, segments)
    parts = [DemandPart(model, divisor) for model in numbers for divisor in (1, 4)]
    worths = {part: 1.0 / part.divisor for part in parts}
    classes = [numbers[part.model] for part in parts]
    found = list(make_table_pricing(segments, device, kind, parts, classes).price(worths, 0.8, Limit()))
    assert any(len(one.parts) > 1 for one in found)
    assert [one.worth for one in found] == sorted((one.worth for one in found), reverse=True)
    for one in found:
        assert one.worth == pytest.approx(sum(worths[part] for part in one.parts)) and one.worth > 0.8
        rates = [given.demand(part.model).rate_rps / part.divisor for part in one.parts]
        pairs = zip(one.workloads, rates, strict=True)
        replicas = tuple(PlacedReplica(w.model, w.batch, w.processes, w.share, rate) for w, rate in pairs)
        assert sum(w.share.sm_pct for w in one.workloads) <= 100.0
        assert segments.holds(device, PlacedPartition(replicas))
