"""The program of a few devices finds what patterns of a relaxation do not add up to."""

from __future__ import annotations

import pytest

from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.contract import plain_device, solve_and_check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.compact_program import find_cheaper, is_compact
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.restricted_master import group_demands
from gpuprof.placement.segment import Segments
from tests.placement.drawn_problems import Kind, best_of, draw_problem, loss_of


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [("priority", 20242), ("fixed", 20096)])
def test_the_most_is_served_where_the_best_patterns_of_a_relaxation_serve_up_to_a_quarter_less(
    kind: Kind, seed: int
) -> None:
    problem = draw_problem(kind, seed)
    placement, _ = solve_and_check(Optimal(), problem)
    assert loss_of(problem, placement, best_of(problem)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("seed", "cost"), [(510014, 1.0), (510151, 1.7)])
def test_one_device_is_found_that_holds_everything_though_its_memory_is_full(seed: int, cost: float) -> None:
    problem = draw_problem("priced", seed)
    placement, _ = solve_and_check(Optimal(), problem)
    paid = sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
    assert paid == pytest.approx(cost)
    assert placement.lower_bound_cost_per_hour == pytest.approx(paid)


def test_nothing_that_costs_as_much_is_called_cheaper() -> None:
    problem = draw_problem("priced", 510002)  # two devices together, each of which would cost less
    offers = CandidateSegments(problem, Segments(problem))
    offers.resolve_all_guesses()
    classes = group_demands(problem.demands, offers.known_segments())
    assert find_cheaper(problem, classes, 3.3 * 1.01, Limit()) is not None
    assert find_cheaper(problem, classes, 3.3, Limit()) is None


def test_it_is_for_a_few_devices_that_are_counted_and_shared_whole() -> None:
    problem = draw_problem("fixed", 20096)
    offers = CandidateSegments(problem, Segments(problem)).known_segments()
    classes = group_demands(problem.demands, offers)
    assert all(segment.share == Share(segment.share.sm_pct) for own in offers.values() for segment in own)
    assert is_compact(problem.fleet.entries, classes)
    assert not is_compact((FleetEntry(plain_device()),), classes)
    assert not is_compact((FleetEntry(plain_device(), 5),), classes)
    cut = draw_problem("mig-parts", 1)
    instances = CandidateSegments(cut, Segments(cut)).known_segments()
    assert not is_compact((FleetEntry(plain_device(), 1),), group_demands(cut.demands, instances))
