"""The bound of maps by queues with neighbours, against maps that just keep their SLOs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import plain_device
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import bound_process
from gpuprof.placement.optimal.alone_bound import bound_alone
from gpuprof.placement.optimal.neighbour_bound import BoundTask, NeighbourBound
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.queue_bound import _press_least, make_queue_task
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments
from tests.placement.optimal.test_neighbour_bound import SummedEstimator

_SHARES = {1: ((100,),), 2: ((40, 60), (20, 80), (40, 40)), 3: ((20, 20, 60), (20, 40, 40)), 4: ((20, 20, 20, 40),)}
_PRECISION = 1e-3
#: Seeds of problems whose bounds come nearest to what their maps take, of the first 120.
_SHARP = (0, 10, 21, 23, 34, 38, 46, 53, 58, 68, 103, 116)


def _draw_map(draw: random.Random) -> list[Workload]:
    """Return what stands on one device: one or two replicas of each of one or two models."""
    owners = [f"m{model}" for model in range(draw.randint(1, 2)) for _ in range(draw.randint(1, 2))]
    shares = list(draw.choice(_SHARES[len(owners)]))
    draw.shuffle(shares)
    return [
        Workload(owner, draw.choice((1, 2, 4, 8)), Share(float(percent)))
        for owner, percent in zip(owners, shares, strict=True)
    ]


def _make_server(estimator: SummedEstimator, standing: list[Workload], number: int) -> BatchServer:
    own, others = standing[number], standing[:number] + standing[number + 1 :]
    times_ms = (
        estimator.estimate(own.model, plain_device(), batch, own.share, others).latency_ms.value
        for batch in range(1, own.batch + 1)
    )
    return BatchServer(tuple(times_ms), own.batch, 0.0)


def _find_most_rps(servers: list[BatchServer], slo: Slo) -> float:
    """Return the largest rate that a pool answers in time."""
    queue, low, high = BatchQueue(), 0.0, sum(one.capacity_rps for one in servers)
    while high - low > _PRECISION * high:
        rate = (low + high) / 2.0
        late = queue.pool(Arrivals(rate), servers).whole.percentile(slo.percentile) > slo.latency_ms
        low, high = (low, rate) if late else (rate, high)
    return low


def _draw_problem(seed: int) -> Problem | None:
    """Return a problem that one device just serves; None where that does not serve all of its models."""
    draw = random.Random(seed)
    estimator = SummedEstimator(
        disturbance=draw.choice((0.0, 0.2, 0.6)), bend=draw.uniform(0.5, 1.0), start_ms=draw.uniform(0.0, 3.0)
    )
    standing, demands = _draw_map(draw), []
    for model in dict.fromkeys(one.model for one in standing):
        servers = [_make_server(estimator, standing, n) for n, one in enumerate(standing) if one.model == model]
        slo = Slo(servers[0].latency_ms[-1] * draw.uniform(1.2, 4.0), draw.choice((90.0, 99.0)))
        rate = _find_most_rps(servers, slo)
        if rate <= 0.0:
            return None
        demands.append(Demand(model, rate, slo))
    return Problem(tuple(demands), Fleet((FleetEntry(plain_device()),)), estimator, BatchQueue(), Options())


def _raise_bound(task: BoundTask) -> Iterator[float]:
    return NeighbourBound(task).raise_bound(Limit())


@pytest.mark.parametrize("seed", _SHARP)
def test_no_bound_is_above_a_map_that_just_keeps_its_slos(seed: int) -> None:
    given = _draw_problem(seed)
    assert given is not None
    task = make_queue_task(given, Segments(given))
    assert task is not None
    bound = max(_raise_bound(task))
    assert 0.75 < bound <= task.kinds[0].price * (1.0 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [True, False])
def test_of_many_demands_a_map_says_the_bound_with_neighbours(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    estimator = SummedEstimator(disturbance=0.6, spread=0.0)
    demands = tuple(Demand(f"m{n}", 150.0 + n, Slo(15.0)) for n in range(12))
    given = Problem(demands, Fleet((FleetEntry(plain_device()),)), estimator, BatchQueue(), Options())
    task = make_queue_task(given, Segments(given))
    assert task is not None
    alone, least = (
        math.ceil(one) for one in (bound_alone(task.kinds, task.needed, task.demands), max(_raise_bound(task)))
    )
    assert alone < least
    replica = PlacedReplica("m0", 1, 1, Share(100.0), 1.0)
    known = Placement("optimal", (PlacedGpu("plain", (PlacedPartition((replica,)),)),) * 20)
    known = replace(known, lower_bound_gpus=alone, lower_bound_cost_per_hour=float(alone))
    monkeypatch.setattr(Optimal, "_search_pooled", lambda *given: known)
    if not beside:
        monkeypatch.setattr(bound_process, "_count_cores", lambda: 1)
    assert Optimal().place(given).lower_bound_gpus == least
    fewer = replace(given, demands=demands[:-1])
    assert Optimal().place(fewer).lower_bound_gpus == alone


def test_a_replica_presses_no_more_than_the_least_of_its_batch_and_larger_ones() -> None:
    workloads = [Workload("m0", batch, Share(share)) for share in (20.0, 40.0) for batch in (1, 2, 3)]
    pressures = np.array([[3.0], [1.0], [2.0], [1.0], [2.0], [3.0]])
    assert _press_least(workloads, pressures)[:, 0].tolist() == [1.0, 1.0, 2.0, 1.0, 2.0, 3.0]
