from __future__ import annotations

import math
import os
import random
import signal
import subprocess
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
from gpuprof.placement.optimal import bound_process, neighbour_bound
from gpuprof.placement.optimal.alone_bound import bound_alone, bound_queues_alone
from gpuprof.placement.optimal.bound_process import BoundProcess, start_bound_process
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.class_bound import bound_classes, make_bound_task
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.optimal.minimise_cost import bound_relaxed
from gpuprof.placement.optimal.neighbour_bound import BoundTask, NeighbourBound
from gpuprof.placement.optimal.neighbour_box import PIECES as WHOLE
from gpuprof.placement.optimal.neighbour_box import count_pieces
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu
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


def make_task(given: Problem, gpus: Sequence[PlacedGpu] = ()) -> BoundTask:
    task = make_bound_task(given, Segments(given), gpus)
    assert task is not None
    return task


def bound_with_neighbours(given: Problem, gpus: Sequence[PlacedGpu] = ()) -> float:
    return max(NeighbourBound(make_task(given, gpus)).raise_bound(Limit()))


def bound_of(task: BoundTask) -> float:
    return bound_alone(task.kinds, task.needed, task.demands)


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
    bound = bound_with_neighbours(given)
    calm = problem(seed, kinds=kinds, disturbed=False)
    alone = bound_with_neighbours(calm)
    assert 0.0 < bound_of(make_task(given)) == pytest.approx(bound_of(make_task(calm)))
    assert bound_of(make_task(calm)) <= alone * (1.0 + 1e-6)
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
    offers.resolve_all_guesses()
    alone = bound_relaxed(given, given.demands, offers, Limit())
    bound = bounded.lower_bound_cost_per_hour
    assert bound is not None
    assert alone <= bound <= len(bounded.gpus)
    assert bounded.lower_bound_gpus == round(bound)
    known = bound_with_neighbours(given, map_of_igniter.gpus)
    assert bound == math.ceil(max(alone, known) - 1e-6)  # devices are whole


class EndedProcess(BoundProcess):
    """One that found next to nothing."""

    def __init__(self) -> None:
        self.asked = 0

    def wait(self, limit: Limit, enough: float) -> float:
        self.asked += 1
        return 0.5


def test_a_bound_on_which_a_process_gets_no_further_is_raised_from_the_map_that_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, process, tasks = problem(1), EndedProcess(), list[BoundTask]()
    segments, placement = Segments(given), make_policy("igniter").place(given)

    def raise_bound(own: NeighbourBound, limit: Limit) -> Iterator[float]:
        tasks.append(own.task)
        yield len(placement.gpus) - 1.0

    monkeypatch.setattr(NeighbourBound, "raise_bound", raise_bound)
    assert bound_classes(given, segments, placement, Limit(), process).lower_bound_gpus == len(placement.gpus) - 1
    assert process.asked == 1 and tasks[0].known


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


def test_a_search_for_bounds_that_was_given_no_time_finds_none() -> None:
    assert not list(NeighbourBound(make_task(problem(0))).raise_bound(Limit(0.0)))


def test_shares_alone_bound_a_demand_that_one_replica_serves_and_one_that_takes_two_unequal_ones() -> None:
    given = problem(0, copies=1)
    for one in given.demands:
        single = replace(given, demands=(one,))
        task = make_task(single)
        (kind,) = task.kinds
        rates = kind.most_rps(1, np.zeros(1))
        # By listing all pairs and single replicas of what may run.
        options = list(zip(rates.tolist(), (kind.sizes / kind.space).tolist(), strict=True))
        pairs = [(a + c, b + d) for (a, b), (c, d) in combinations_with_replacement([*options, (0.0, 0.0)], 2)]
        best = min((cost for rate, cost in pairs if rate >= one.rate_rps * (1.0 - 1e-9)), default=math.inf)
        assert 0.0 < bound_of(task) <= best + 1e-9
        assert math.isinf(best) or bound_of(task) > 0.8 * best


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


@pytest.mark.parametrize("seed", range(10, 12))
def test_few_demands_are_bounded_by_no_more_than_the_best_map_takes(seed: int) -> None:
    given = problem(seed, copies=2)
    placement = Optimal().place(given)
    assert not placement.unplaced
    assert 0.0 < bound_with_neighbours(given, placement.gpus) <= len(placement.gpus) * (1.0 + 1e-6)


def test_a_process_beside_the_search_finds_a_bound_above_that_of_shares_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_process, "_count_cores", lambda: 2)
    given = problem(0)
    task, best = make_task(given), bound_with_neighbours(given)
    with start_bound_process(wanted=True) as process:
        assert process is not None
        assert process.begin(task, Limit(120.0))
        found = process.wait(Limit(120.0), enough=bound_of(task))
    assert bound_of(task) <= found <= best * (1.0 + 1e-6)


def test_a_process_that_still_compiles_is_left_to_end_by_itself_one_that_has_done_so_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bound_process, "_count_cores", lambda: 2)
    killed: list[object] = []

    def kill(process: subprocess.Popen[bytes]) -> None:
        killed.append(process)
        os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    with start_bound_process(wanted=True):
        pass  # numba takes longer to import than this
    assert not killed
    with start_bound_process(wanted=True) as process:
        assert process is not None
        assert process.begin(make_task(problem(0)), Limit(120.0))
        assert process.wait(Limit(120.0), enough=1.0) >= 1.0
    assert len(killed) == 1


class LocalFloats(int):
    """Cannot be sent to another process."""

    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


def test_without_a_second_core_or_with_a_table_that_cannot_be_sent_no_process_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bound_process, "_count_cores", lambda: 1)
    with start_bound_process(wanted=True) as process:
        assert process is None
    monkeypatch.setattr(bound_process, "_count_cores", lambda: 2)
    with start_bound_process(wanted=False) as process:
        assert process is None

    task = make_task(problem(0))
    (kind,) = task.kinds
    local = SummedTable(LocalFloats(3), kind.table.pressures, 0.0)  # type: ignore[arg-type]
    with start_bound_process(wanted=True) as process:
        assert process is not None
        assert not process.begin(replace(task, kinds=[replace(kind, table=local)]), Limit(60.0))
        assert process.wait(Limit(60.0), enough=1.0) == 0.0


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


def test_nothing_is_said_where_neighbours_are_not_known_to_act_by_sums_or_stand_in_instances() -> None:
    given = problem(0)
    for other in (
        replace(given, estimator=CurvedEstimator(disturbance=0.3)),
        replace(given, fleet=Fleet((FleetEntry(sliced_device()),))),
    ):
        assert make_bound_task(other, Segments(other), ()) is None
