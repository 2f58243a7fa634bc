from __future__ import annotations

import math
import random

import numpy as np
import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.contract import ExponentialQueue, plain_device
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.program import Columns, Program, find_violated_row
from tests.placement.drawn_problems import Key, TableEstimator


def knapsack() -> Program:
    program = Program()
    row = program.row(high=10.0)
    for value, weight in ((6.0, 5.0), (5.0, 4.0), (4.5, 4.0)):
        program.column(-value, {row: weight}, 1.0)
    return program


def test_the_best_whole_solution_is_found_and_proven() -> None:
    solution = knapsack().solve()
    assert solution is not None
    assert solution.values == (1.0, 1.0, 0.0)
    assert solution.objective == pytest.approx(-11.0)
    assert solution.bound == pytest.approx(-11.0)
    assert solution.is_proven


def test_relaxed_it_is_a_bound() -> None:
    relaxed = knapsack().solve(relaxed=True)
    assert relaxed is not None
    assert relaxed.objective == pytest.approx(-11.0 - 4.5 / 4.0)


def test_what_cannot_be_met_has_no_solution() -> None:
    program = Program()
    row = program.row(low=2.0)
    program.column(1.0, {row: 1.0}, 1.0)
    assert program.solve() is None


def test_rows_and_costs_can_be_changed_afterwards() -> None:
    program = knapsack()
    row = program.row(low=1.0)
    program.add(2, row, 1.0)
    forced = program.solve()
    assert forced is not None
    assert forced.values[2] == 1.0
    program.bound_row(row, -math.inf, math.inf)
    program.recost({0: 1.0, 1: 1.0, 2: 1.0})
    nothing = program.solve()
    assert nothing is not None
    assert nothing.values == (0.0, 0.0, 0.0)


def memory_in_bytes() -> Program:
    """Serve most of two demands on devices of 16 GiB, as the optimal policy does (the best: 700)."""
    gib = 2.0**30
    program = Program()
    devices, memory, shares = program.row(high=2.0), program.row(low=0.0), program.row(low=0.0)
    program.column(0.0, {devices: 1.0, memory: 16 * gib, shares: 100.0})
    for percent, held, rate, wanted in ((50.0, 9.1 * gib, 200.0, 1e4), (30.0, 3.3 * gib, 100.0, 1e4)):
        served = program.row(low=0.0)
        program.column(0.0, {memory: -held, shares: -percent, served: rate})
        program.column(-1.0, {served: -1.0}, wanted, integer=False)
    return program


def test_memory_in_bytes_is_kept_beside_counts_of_one() -> None:
    solution = memory_in_bytes().solve()
    assert solution is not None
    assert solution.is_proven
    # 2 devices: 200 %, 32 GiB; 6 of the second kind take 180 % and 19.8 GiB; 2 + 3 take 190 % and 28.1 GiB: 700
    assert solution.objective == pytest.approx(-700.0)
    assert solution.bound == pytest.approx(-700.0)


@pytest.mark.parametrize("seed", [1, 98])
def test_a_bound_on_the_goodput_holds_where_memory_binds(seed: int) -> None:
    problem = memory_bound_problem(seed)
    maps = [make_policy(name).place(problem) for name in ("ffd", "gslice", "optimal")]
    most = maps[-1].upper_bound_goodput_rps
    assert most is not None
    assert max(sum(plan.rates_rps().values()) for plan in maps) <= most * (1.0 + 1e-6)


def memory_bound_problem(seed: int) -> Problem:
    """Return one of the problems whose bounds were false by a third and by half while memory counted in bytes."""
    drawn = random.Random(seed)
    count, devices = drawn.randint(2, 5), drawn.randint(1, 4)
    percents = sorted(drawn.sample([10, 20, 30, 40, 50, 60, 70, 80, 90, 100], drawn.randint(2, 4)))
    rows: dict[Key, tuple[float, int]] = {}
    demands = []
    for name in (f"m{i}" for i in range(count)):
        start, each, saturated = drawn.uniform(1, 8), drawn.uniform(0.2, 3), drawn.uniform(0.3, 1)
        weights, activations = int(drawn.uniform(0.3, 5) * 2**30), int(drawn.uniform(0.01, 0.4) * 2**30)
        for percent in percents:
            for batch in (1, 2, 4, 8, 16, 32):
                time = start + each * batch / min(1, percent / 100 / saturated)
                rows["plain", name, batch, Share(float(percent))] = (time, weights + activations * batch)
        slo = Slo(drawn.uniform(2, 10) * (start + each))
        demands.append(Demand(name, drawn.uniform(50, 900) * devices / count, slo))
    fleet = Fleet((FleetEntry(plain_device(), devices),))
    options = Options(latency_budget=0.5)
    return Problem(tuple(demands), fleet, TableEstimator(rows), ExponentialQueue(), options)


def test_a_solution_that_breaks_a_row_is_told_and_rounding_is_not() -> None:
    gib = 2.0**30
    columns = Columns(
        costs=np.array([1.0]),
        highs=np.array([math.inf]),
        integer=np.array([True]),
        starts=np.array([0, 2]),
        rows=np.array([0, 1], dtype=np.int32),
        values=np.array([1.0, 3.0 * gib]),
        row_lows=np.array([1.0, 0.0]),
        row_highs=np.array([math.inf, 6.0 * gib]),
    )
    assert find_violated_row(columns, np.array([2.0])) is None
    assert find_violated_row(columns, np.array([2.0 + 1e-12])) is None
    assert find_violated_row(columns, np.array([0.0])) == 0
    assert find_violated_row(columns, np.array([2.001])) == 1
