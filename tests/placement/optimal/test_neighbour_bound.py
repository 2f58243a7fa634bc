from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import numpy as np
import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.interference_table import Floats, Integers
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import ExponentialQueue, plain_device, sliced_device
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import neighbour_bound
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.class_bound import bound_classes
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.optimal.minimise_cost import bound_relaxed
from gpuprof.placement.optimal.neighbour_bound import bound_with_neighbours
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.program import Program
from gpuprof.placement.segment import Segments
from tests.placement.curved import CurvedEstimator

PERCENTS = (20.0, 40.0, 60.0, 80.0, 100.0)
BATCHES = (1, 4)


@dataclass(frozen=True, slots=True)
class SummedTable:
    """What a neighbour takes is its fraction of the device times log2(1 + batch): one pressure."""

    alone_ms: Floats
    pressures: Floats
    disturbance: float

    def take(self, rows: Integers) -> SummedTable:
        return SummedTable(self.alone_ms[rows], self.pressures[rows], self.disturbance)

    def least_times_ms(self, count: int, totals: Floats) -> tuple[Floats, Floats]:
        times = self.alone_ms * (1.0 + self.disturbance * np.maximum(totals[0] - self.pressures[:, 0], 0.0))
        return times, times


class SummedEstimator(CurvedEstimator):
    """The curved one, which knows no shares between those that it lists, and says that its neighbours act by sums."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        if share.sm_pct not in PERCENTS:
            raise InputError(f"nothing is known of {share}")
        return super().estimate(model, device, batch, share, beside, processes)

    def tabulate_interference(self, device: Device, workloads: Sequence[Workload]) -> SummedTable:
        alone = [
            self.estimate(one.model, device, one.batch, one.share, (), one.processes).latency_ms.value
            if one.share.sm_pct in PERCENTS
            else math.inf
            for one in workloads
        ]
        taken = [[device.fraction(one.share) * math.log2(1 + one.batch)] for one in workloads]
        return SummedTable(np.array(alone), np.array(taken), self.disturbance)


def problem(seed: int, *, kinds: int = 1, copies: int = 12, disturbed: bool = True) -> Problem:
    draw = random.Random(seed)
    classes = [(draw.uniform(50.0, 500.0), draw.uniform(20.0, 80.0)) for _ in range(2)]
    disturbance = draw.uniform(0.1, 0.6) if disturbed else 0.0
    estimator = SummedEstimator(disturbance=disturbance, spread=0.0, gaps=False, sizes=BATCHES, interval=0.0)
    demands = tuple(Demand(f"m{number}", rate, Slo(slo)) for number, (rate, slo) in enumerate(classes * copies))
    devices = [plain_device("first", 1.0), plain_device("second", 0.7)][:kinds]
    if kinds == 2:
        devices[1] = replace(devices[1], compute_units=60)
    entries = tuple(FleetEntry(one) for one in devices)
    return Problem(demands, Fleet(entries), estimator, ExponentialQueue(), Options(latency_budget=0.5))


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
def test_the_bound_lies_between_what_it_is_without_neighbours_and_the_program_over_every_set_of_replicas(
    seed: int, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbour_bound, "_MOST_ROUNDS", 25)
    given = problem(seed, kinds=kinds)
    segments = Segments(given)
    fractions = solve_over_all_patterns(given, segments, whole=False)
    best = solve_over_all_patterns(given, segments, whole=True)
    bound = bound_with_neighbours(given, segments, (), Limit())
    calm = problem(seed, kinds=kinds, disturbed=False)
    alone = bound_with_neighbours(calm, Segments(calm), (), Limit())
    assert alone < bound <= best * (1.0 + 1e-6)  # whose pieces are rounded down
    assert bound > fractions - 0.5 * (fractions - alone)


@pytest.mark.parametrize("seed", range(3))
def test_a_map_is_bounded_by_what_neighbours_cost_and_no_map_is_cheaper(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbour_bound, "_MOST_ROUNDS", 10)
    given = problem(seed)
    segments = Segments(given)
    map_of_igniter = make_policy("igniter").place(given)
    assert not map_of_igniter.unplaced
    bounded = bound_classes(given, segments, map_of_igniter, Limit())
    offers = CandidateSegments(given, segments)
    offers.work_out_all()
    alone = bound_relaxed(given, given.demands, offers, Limit())
    bound = bounded.lower_bound_cost_per_hour
    assert bound is not None
    assert alone <= bound <= len(bounded.gpus)
    assert bounded.lower_bound_gpus == round(bound)
    known = bound_with_neighbours(given, segments, map_of_igniter.gpus, Limit())
    assert bound == math.ceil(max(alone, known) - 1e-6)  # devices are whole


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


def test_a_bound_that_was_given_no_time_says_nothing() -> None:
    given = problem(0)
    assert bound_with_neighbours(given, Segments(given), (), Limit(0.0)) == 0.0


def test_nothing_is_said_where_neighbours_are_not_known_to_act_by_sums_or_stand_in_instances() -> None:
    given = problem(0)
    curved = replace(given, estimator=CurvedEstimator(disturbance=0.3))
    assert bound_with_neighbours(curved, Segments(curved), (), Limit()) == 0.0
    sliced = replace(given, fleet=Fleet((FleetEntry(sliced_device()),)))
    assert bound_with_neighbours(sliced, Segments(sliced), (), Limit()) == 0.0
