import random

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.contract import ExponentialQueue, plain_device
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.program import Program
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
