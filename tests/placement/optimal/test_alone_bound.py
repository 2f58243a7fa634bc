"""The bound that shares alone give, against programs over every set of replicas and against maps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest

from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.contract import sliced_device
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.alone_bound import PIECES as WHOLE
from gpuprof.placement.optimal.alone_bound import bound_alone, bound_queues_alone, count_pieces
from gpuprof.placement.optimal.class_bound import bound_classes
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.optimal.demand_classes import group_alike
from gpuprof.placement.optimal.kind_table import tabulate_kinds
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.program import Program
from gpuprof.placement.segment import Segments
from tests.placement.curved import CurvedEstimator
from tests.placement.optimal.summed import BATCHES, PERCENTS, SummedEstimator, problem


def bound_shares(given: Problem) -> float:
    segments = Segments(given)
    classes = group_alike(given, segments).values()
    needed = np.array([sum(one.rate_rps for one in own) for own in classes])
    return bound_alone(tabulate_kinds(given, segments), needed, np.array([float(len(own)) for own in classes]))


#: Into so many pieces, rounded down, a reference divides what replicas serve of a demand.
PIECES = 12


def solve_over_all_patterns(given: Problem, segments: Segments, *, whole: bool) -> float:
    """Return the program's optimum over every set of workloads that a device holds, each by the estimator's answer.

    With whole demands each is split into replicas that serve all of its pieces; else rates are added up.
    """
    program, firsts = Program(), list(dict.fromkeys(segments.first_alike(one.model) for one in given.demands))
    own = {model: [one for one in given.demands if segments.first_alike(one.model) == model] for model in firsts}
    rows = {model: [program.row(low=0.0) for _ in range(PIECES + 1)] for model in firsts}
    for model in firsts:
        if whole:
            row = program.row(low=len(own[model]))
            for split in splits(PIECES, PIECES):
                takes = {rows[model][size]: -float(count) for size, count in Counter(split).items()}
                program.column(0.0, {row: 1.0, **takes}, integer=False)
        else:
            program.bound_row(rows[model][0], low=sum(one.rate_rps for one in own[model]))
    for entry in given.fleet.entries:
        workloads = [Workload(model, b, Share(pct)) for model in firsts for b in BATCHES for pct in PERCENTS]
        for count in range(1, 6):
            for together in combinations_with_replacement(workloads, count):
                if sum(one.share.sm_pct for one in together) > 100.0:
                    continue
                entries: dict[int, float] = {}
                for position, one in enumerate(together):
                    beside = (*together[:position], *together[position + 1 :])
                    demand = given.demand(one.model)
                    segment = segments.make(demand, entry.device, one, beside)
                    if segment is not None:
                        pieces = math.floor(PIECES * segment.capacity_rps / demand.rate_rps + 1e-9) if whole else 0
                        row = rows[one.model][min(pieces, PIECES)]
                        entries[row] = entries.get(row, 0.0) + (1.0 if whole else segment.capacity_rps)
                program.column(entry.price_per_hour, entries, integer=False)
    solution = program.solve(relaxed=True)
    assert solution is not None
    return solution.objective


def splits(total: int, most: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for size in range(min(total, most), 0, -1):
        for rest in splits(total - size, size):
            yield (size, *rest)


@pytest.mark.parametrize(("seed", "kinds"), [(0, 1), (0, 2), (1, 1)])
def test_the_bound_of_shares_alone_is_no_more_than_the_program_over_every_set_of_replicas(
    seed: int, kinds: int
) -> None:
    given = problem(seed, kinds=kinds)
    best = solve_over_all_patterns(given, Segments(given), whole=True)
    calm = problem(seed, kinds=kinds, disturbed=False)
    assert 0.0 < bound_shares(given) == pytest.approx(bound_shares(calm))
    assert bound_shares(given) <= best * (1.0 + 1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_of_classes_is_whole_devices_and_no_more_than_a_map(seed: int) -> None:
    given = problem(seed)
    segments, quick = Segments(given), make_policy("igniter").place(given)
    assert not quick.unplaced
    bounded = bound_classes(given, segments, quick, Limit())
    bound = bounded.lower_bound_cost_per_hour
    assert bound is not None and bound_shares(given) <= bound <= len(bounded.gpus)
    assert bounded.lower_bound_gpus == round(bound)


def test_a_map_whose_bounds_had_no_time_has_one_all_the_same() -> None:
    given = problem(0)
    segments = Segments(given)
    placement = make_policy("igniter").place(given)
    assert (bound_classes(given, segments, placement, Limit(0.0)).lower_bound_gpus or 0) > 1
    curved = replace(problem(0, copies=48), estimator=CurvedEstimator(spread=0.0, disturbance=0.3))
    segments = Segments(curved)
    placement = make_policy("igniter").place(curved)
    loose = with_cost_bound(curved, segments, placement, Limit()).lower_bound_gpus
    assert loose is not None
    assert loose > 1
    assert bound_classes(curved, segments, placement, Limit(0.0)).lower_bound_gpus == loose


def test_shares_alone_bound_a_demand_that_one_replica_serves_and_one_that_takes_two_unequal_ones() -> None:
    given = problem(0, copies=1)
    for one in given.demands:
        single = replace(given, demands=(one,))
        (kind,) = tabulate_kinds(single, Segments(single))
        rates = kind.most_rps(1, np.zeros(1))
        # By listing all pairs and single replicas of what may run.
        options = list(zip(rates.tolist(), (kind.sizes / kind.space).tolist(), strict=True))
        pairs = [(a + c, b + d) for (a, b), (c, d) in combinations_with_replacement([*options, (0.0, 0.0)], 2)]
        best = min((cost for rate, cost in pairs if rate >= one.rate_rps * (1.0 - 1e-9)), default=math.inf)
        assert 0.0 < bound_shares(single) <= best + 1e-9
        assert math.isinf(best) or bound_shares(single) > 0.8 * best


@pytest.mark.parametrize("missed", [0.0, 2e-6])
def test_parts_that_make_a_demand_count_for_all_its_pieces_however_it_is_split(missed: float) -> None:
    draw = np.random.default_rng(0)
    for number in range(1, 30):
        parts = draw.dirichlet(np.full(number, draw.uniform(0.1, 5.0)), 200)
        assert count_pieces(np.full(number, (1.0 - missed) / number)).sum() >= WHOLE
        assert count_pieces(parts * (1.0 - missed)).sum(axis=1).min() >= WHOLE


def test_equal_parts_that_make_no_demand_count_for_fewer_pieces_than_it_has() -> None:
    for number in (1, 2, 3, 4, 6, 12):
        assert count_pieces(np.full(number, 0.999 / number)).sum() < WHOLE
    assert count_pieces(np.array([0.0, 1e-9, 1.0])).tolist() == [0, 1, WHOLE]


@pytest.mark.parametrize("seed", range(4))
def test_what_shares_take_by_queues_is_no_more_than_a_map_takes_and_more_than_full_batches_do(seed: int) -> None:
    told = SummedEstimator(disturbance=0.3, spread=0.0, sizes=BATCHES, interval=0.0)
    given = replace(problem(seed, copies=3), options=Options(), estimator=told)
    segments = Segments(given)
    bound = bound_queues_alone(given, segments, Limit())
    placement = Optimal().place(given)
    assert not placement.unplaced
    assert 1.0 < bound <= len(placement.gpus)
    untold = replace(given, estimator=CurvedEstimator(disturbance=0.3, spread=0.0, sizes=BATCHES))
    assert bound_queues_alone(untold, Segments(untold), Limit()) == 0.0


def test_no_tables_are_made_where_neighbours_do_not_act_through_sums_or_stand_in_instances() -> None:
    given = problem(0)
    for other in (
        replace(given, estimator=CurvedEstimator(disturbance=0.3)),
        replace(given, fleet=Fleet((FleetEntry(sliced_device()),))),
    ):
        assert not tabulate_kinds(other, Segments(other))
