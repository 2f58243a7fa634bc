"""Published policies, corrected for the queue that all replicas of a model have in common."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.map_sources import summarize_map
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import LinearEstimator, plain_device, solve_and_check
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem

#: Tight for what a batch takes, so that streams of their own need many replicas.
TIGHT = (Demand("a", 900.0, Slo(12.0)), Demand("b", 400.0, Slo(20.0)))


def make_problem(count: int | None = None) -> Problem:
    return Problem(TIGHT, Fleet((FleetEntry(plain_device(), count),)), LinearEstimator(), BatchQueue())


def test_the_same_policy_needs_fewer_devices_where_replicas_share_their_queue() -> None:
    given = make_problem()
    split, split_map = solve_and_check(make_policy("gpulet"), given)
    pooled, deployment = solve_and_check(make_policy("gpulet", {"pooled": "true"}), given)
    assert pooled.policy == split.policy
    assert len(pooled.gpus) < len(split.gpus)
    assert not pooled.unplaced
    note = f"pooled queues: {len(pooled.gpus)} devices where gpulet has {len(split.gpus)} for split streams"
    assert deployment.planned_with.found_by == note
    assert note in summarize_map(deployment)
    assert split_map.planned_with.found_by is None


def test_on_a_full_fleet_the_pools_serve_more() -> None:
    given = make_problem(count=2)
    split, _ = solve_and_check(make_policy("ffd"), given)
    pooled, _ = solve_and_check(make_policy("ffd", {"pooled": "true"}), given)
    assert split.unplaced
    assert sum(pooled.rates_rps().values()) > 1.05 * sum(split.rates_rps().values())


def test_a_map_that_needs_every_replica_is_the_policys_own() -> None:
    given = replace(make_problem(), demands=(Demand("a", 5.0, Slo(100.0)),))
    split, _ = solve_and_check(make_policy("ffd"), given)
    assert make_policy("ffd", {"pooled": "true"}).place(given) == split


def test_pooled_is_refused_where_there_are_no_queues_and_where_it_says_nothing() -> None:
    with pytest.raises(InputError, match="counts waiting"):
        make_policy("ffd", {"pooled": "true"}).place(replace(make_problem(), options=Options(latency_budget=0.5)))
    with pytest.raises(InputError, match="pooled queues anyway"):
        make_policy("optimal", {"pooled": "true"})
    with pytest.raises(InputError, match="true or false"):
        make_policy("ffd", {"pooled": "perhaps"})
