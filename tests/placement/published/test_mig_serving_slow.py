"""MIG-serving's slow algorithms, which start from the fast one's map."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gpuprof.errors import InputError
from gpuprof.placement.contract import LinearEstimator, demand, problem, sliced_device, solve_and_check
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.mig_serving import MigServing

BUDGET = Options(latency_budget=0.5)


def make_problem(seed: int, models: int, count: int | None = None) -> Problem:
    random = Random(seed)
    asked = [demand(f"m{i}", random.uniform(100.0, 1200.0), random.choice([60.0, 100.0, 200.0])) for i in range(models)]
    return problem(asked, [(sliced_device(), count)], LinearEstimator(), BUDGET)


def sum_rates(placement: Placement) -> float:
    return sum(placement.rates_rps().values())


def test_they_find_a_map_with_fewer_devices() -> None:
    given = make_problem(seed=0, models=6)
    fast, _ = solve_and_check(MigServing(), given)
    slow, deployment = solve_and_check(MigServing(slow=True, rounds=1), given)
    assert len(slow.gpus) < len(fast.gpus)
    assert not slow.unplaced
    said = f"the slow algorithms: {len(slow.gpus)} devices where the fast one has {len(fast.gpus)}"
    assert deployment.planned_with.found_by == said


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_they_are_never_worse_than_the_fast_one(seed: int) -> None:
    for count in (None, 2):
        given = make_problem(seed, models=3, count=count)
        fast, _ = solve_and_check(MigServing(), given)
        slow, _ = solve_and_check(MigServing(slow=True, rounds=1), given)
        assert (sum_rates(slow), -len(slow.gpus)) >= (sum_rates(fast) - 1e-6, -len(fast.gpus))
        assert count is None or len(slow.gpus) <= count


def test_the_same_seed_gives_the_same_map() -> None:
    given = make_problem(seed=4, models=3)
    policy = MigServing(slow=True, rounds=1)
    assert policy.place(given) == policy.place(given)


def test_a_time_limit_ends_them() -> None:
    given = make_problem(seed=0, models=6)
    hurried = replace(given, options=replace(BUDGET, time_limit_s=1e-6))
    slow, _ = solve_and_check(MigServing(slow=True, rounds=1000), hurried)
    assert slow.stopped
    assert len(slow.gpus) == len(MigServing().place(given).gpus)


def test_no_service_gets_more_instances_than_it_may() -> None:
    given = make_problem(seed=5, models=3)
    limited = replace(given, demands=tuple(replace(one, max_replicas=2) for one in given.demands))
    slow, _ = solve_and_check(MigServing(slow=True, rounds=1), limited)
    for one in limited.demands:
        assert sum(replica.model == one.model for gpu in slow.gpus for replica in gpu.replicas()) <= 2


def test_by_default_the_fast_algorithm_decides_alone() -> None:
    assert make_policy("mig-serving") == MigServing(slow=False)
    assert make_policy("mig-serving", {"slow": "true", "rounds": "3"}) == MigServing(slow=True, rounds=3)
    assert MigServing().place(make_problem(seed=1, models=2)).found_by is None
    with pytest.raises(InputError, match="rounds must be at least 1 but got 0"):
        MigServing(slow=True, rounds=0).place(make_problem(seed=1, models=2))


def test_rounds_without_the_slow_algorithms_are_refused() -> None:
    with pytest.raises(InputError, match="were not asked for"):
        MigServing(rounds=3).place(make_problem(seed=1, models=2))
