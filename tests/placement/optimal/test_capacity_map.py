"""Maps of the devices on which the bound with interference rests."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest

from gpuprof.domain.fleet import Fleet
from gpuprof.placement.contract import evidence
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import bound_process, capacity_program, class_maps
from gpuprof.placement.optimal.bound_process import BoundProcess, start_bound_process
from gpuprof.placement.optimal.capacity_map import place_by_capacities
from gpuprof.placement.optimal.capacity_program import WHOLE, CapacityColumns, choose_columns
from gpuprof.placement.optimal.class_bound import bound_classes, improve_by_classes, make_bound_task
from gpuprof.placement.optimal.class_maps import search_class_maps
from gpuprof.placement.optimal.class_search import ClassSearch
from gpuprof.placement.optimal.cover_kernel import find_cover
from gpuprof.placement.optimal.neighbour_bound import NeighbourBound
from gpuprof.placement.placement import PlacedGpu, Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments
from tests.placement.optimal.test_neighbour_bound import problem


def find_columns(given: Problem, segments: Segments) -> tuple[CapacityColumns, float]:
    """Return what maps may be made of, and the bound."""
    task = make_bound_task(given, segments, make_policy("igniter").place(given).gpus)
    assert task is not None and task.for_maps
    bound = NeighbourBound(task)
    cost = max(bound.raise_bound(Limit()))
    columns = choose_columns(task.kinds, task.demands, bound.rank_patterns(), Limit())
    assert columns is not None
    return columns, cost


class SilentProcess(BoundProcess):
    """One that never says what maps are made of."""

    def __init__(self) -> None:
        self.enough: list[float] = []

    def has_columns(self) -> bool:
        return False

    def take_columns(self, limit: Limit, enough: float) -> CapacityColumns | None:
        self.enough.append(enough)
        return None


def price(given: Problem, gpus: tuple[PlacedGpu, ...]) -> float:
    return sum(given.entry(one.device).price_per_hour for one in gpus)


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_map_of_the_bounds_devices_is_sound_serves_everybody_and_costs_little_more_than_the_bound(
    seed: int, kinds: int
) -> None:
    given = problem(seed, kinds=kinds)
    segments = Segments(given)
    columns, bound = find_columns(given, segments)
    gpus = place_by_capacities(given, segments, columns, Limit())
    assert gpus is not None
    placement = Placement("optimal", gpus)
    assert check(to_map(given, placement), evidence(given)) == ()
    served = placement.rates_rps()
    assert all(served[one.model] == pytest.approx(one.rate_rps) for one in given.demands)
    assert bound - 1e-6 <= price(given, gpus) <= 1.05 * bound + max(one.price_per_hour for one in given.fleet.entries)


def test_splits_make_whole_demands_of_parts_that_some_device_serves_and_patterns_count_no_more_than_they_serve() -> (
    None
):
    given = problem(2)
    segments = Segments(given)
    columns, _ = find_columns(given, segments)
    task = make_bound_task(given, segments, ())
    assert task is not None
    (kind,) = task.kinds
    listed = set()
    for one in columns.patterns:
        rates = kind.most_rps(len(one.items), kind.sum_pressures(one.items), np.array(one.items))
        asked = kind.rates_rps[list(one.items)]
        assert (np.array(one.parts) / WHOLE * asked <= rates * (1.0 + 1e-9)).all()
        listed |= set(zip(one.classes, one.parts, strict=True))
    assert {one.number for one in columns.splits} == {0, 1}
    assert all(sum(one.parts) >= WHOLE and sum(one.parts[:-1]) < WHOLE for one in columns.splits)
    assert any({(one.number, part) for part in one.parts} <= listed for one in columns.splits)


def test_the_cheapest_cover_is_that_of_all_combinations() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        parts = np.sort(draw.choice(np.arange(3, 12), 4, replace=False)).astype(np.int64)
        costs, chosen = draw.uniform(0.1, 2.0, 4), np.zeros(13, dtype=np.int64)
        every = (one for count in range(1, 6) for one in combinations_with_replacement(range(4), count))
        best = min(costs[list(one)].sum() for one in every if parts[list(one)].sum() >= 12)
        assert find_cover(parts, costs, 12, chosen) == pytest.approx(best)
        taken, left = 0.0, 12
        while left > 0:
            taken += costs[chosen[left]]
            left -= int(parts[chosen[left]])
        assert taken == pytest.approx(best)


def test_what_a_fleet_or_a_demand_does_not_allow_is_not_in_the_map() -> None:
    given = problem(1)
    segments = Segments(given)
    columns, _ = find_columns(given, segments)
    gpus = place_by_capacities(given, segments, columns, Limit())
    assert gpus is not None
    few = replace(given, fleet=Fleet((replace(given.fleet.entries[0], count=len(gpus) - 1),)))
    assert place_by_capacities(few, Segments(few), columns, Limit()) is None
    whole = replace(given, demands=tuple(replace(one, max_replicas=1) for one in given.demands))
    single = place_by_capacities(whole, Segments(whole), columns, Limit())
    if single is not None:
        counts = [one.model for gpu in single for one in gpu.replicas()]
        assert len(counts) == len(set(counts))
    assert any(len(one.parts) > 1 for one in columns.splits)


def test_devices_whose_replicas_would_miss_their_slos_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(1)
    segments = Segments(given)
    columns, _ = find_columns(given, segments)
    monkeypatch.setattr(Segments, "holds", lambda *asked: False)
    assert place_by_capacities(given, segments, columns, Limit()) is None


def test_without_devices_that_serve_all_classes_there_is_nothing_to_choose_from() -> None:
    given = problem(0)
    task = make_bound_task(given, Segments(given), ())
    assert task is not None
    assert NeighbourBound(task).rank_patterns() == []
    assert choose_columns(task.kinds, task.demands, [], Limit()) is None


def test_devices_that_serve_a_class_are_looked_at_however_little_they_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(0)
    segments = Segments(given)
    columns, _ = find_columns(given, segments)
    task = make_bound_task(given, segments, ())
    assert task is not None
    monkeypatch.setattr(capacity_program, "_MOST_PATTERNS", 1)
    chosen = choose_columns(task.kinds, task.demands, columns.patterns, Limit())
    assert chosen is not None
    assert {number for one in chosen.patterns for number in one.classes} == {0, 1}


def test_the_process_of_the_bound_says_what_maps_are_made_of_which_ends_the_search_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bound_process, "_count_cores", lambda: 2)
    given = problem(3)
    segments, known = Segments(given), make_policy("igniter").place(given).gpus
    task = make_bound_task(given, segments, known)
    assert task is not None
    searched: list[bool] = []

    def search(own: ClassSearch, maps: object) -> None:
        while not own.limit.is_over:  # until the process has said it
            pass
        searched.append(own.limit.is_interrupted)

    monkeypatch.setattr(ClassSearch, "search", search)
    with start_bound_process(wanted=True) as process:
        assert process is not None
        assert not process.has_columns()
        assert process.begin(task, Limit(30.0))
        gpus = min(search_class_maps(given, segments, known, Limit(30.0), process), key=lambda one: price(given, one))
    assert searched == [True]
    assert price(given, gpus) <= price(given, known)
    placed = place_by_capacities(given, segments, find_columns(given, segments)[0], Limit())
    assert placed is not None and math.isclose(price(given, placed), price(given, gpus), rel_tol=0.1)


def test_a_map_that_was_found_before_the_process_said_anything_is_not_searched_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = problem(3)
    known, searched = make_policy("igniter").place(given).gpus, list[object]()

    def search(own: ClassSearch, maps: object) -> tuple[PlacedGpu, ...]:
        searched.append(maps)
        return known

    monkeypatch.setattr(ClassSearch, "search", search)
    process = SilentProcess()
    assert list(search_class_maps(given, Segments(given), known, Limit(60.0), process)) == [known]
    assert len(searched) == 1 and process.enough == [pytest.approx(price(given, known))]


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_without_a_process_the_devices_on_which_the_bound_rests_make_a_better_map_too(seconds: float | None) -> None:
    given = problem(3)
    segments, first = Segments(given), make_policy("igniter").place(given)
    known = replace(first, gpus=first.gpus * 2)  # twice as dear
    better = bound_classes(given, segments, known, Limit(seconds))
    assert better.found_by == "patterns of classes" and price(given, better.gpus) <= price(given, first.gpus)
    assert 0.0 < (better.lower_bound_cost_per_hour or 0.0) <= price(given, better.gpus)
    improved = improve_by_classes(given, segments, replace(known, lower_bound_cost_per_hour=1.0))
    assert price(given, improved.gpus) == pytest.approx(price(given, better.gpus), rel=0.1)


def test_where_the_bounds_devices_make_no_map_the_search_for_others_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_process, "_count_cores", lambda: 2)
    monkeypatch.setattr(class_maps, "place_by_capacities", lambda *given: None)
    given = problem(3)
    segments, known = Segments(given), make_policy("igniter").place(given).gpus
    task = make_bound_task(given, segments, known)
    assert task is not None
    monkeypatch.setattr(ClassSearch, "search", lambda own, maps: None if own.limit.is_interrupted else known)
    with start_bound_process(wanted=True) as process:
        assert process is not None and process.begin(task, Limit(120.0))
        while not process.has_columns():
            pass
        assert list(search_class_maps(given, segments, known, Limit(120.0), process)) == [known]
