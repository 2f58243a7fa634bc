"""Maps by the queueing model, beside neighbours: no worse than maps made by hand or by another policy."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gpuprof.domain.demand import Slo
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import LinearEstimator, demand, problem, solve_and_check
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.igniter import Igniter
from gpuprof.placement.segment import Segments

_PERCENTS = (10.0, 20.0, 30.0, 50.0, 70.0, 80.0, 100.0)


def _make_problem(rates: tuple[float, ...], slos_ms: tuple[float, ...]) -> Problem:
    estimator = LinearEstimator(start_ms=0.2, each_ms=0.15, percents=_PERCENTS, sizes=(1, 2, 4, 8), slowdown=0.15)
    demands = [demand(f"m{i}", rate, slo_ms) for i, (rate, slo_ms) in enumerate(zip(rates, slos_ms, strict=True))]
    given = problem(demands, estimator=estimator, options=Options(time_limit_s=10.0, isolate=True))
    strict = tuple(replace(item, slo=Slo(item.slo.latency_ms, 99.5)) for item in given.demands)
    return replace(given, demands=strict, queueing=BatchQueue())


def _fits_one_gpu(given: Problem) -> bool:
    """Whether some shares, in batches of two or four, keep every SLO on one GPU."""
    segments, device = Segments(given), given.fleet.entries[0].device
    for percents in itertools.product(_PERCENTS, repeat=len(given.demands)):
        if sum(percents) > 100.0:
            continue
        for batches in itertools.product((2, 4), repeat=len(percents)):
            shares = zip(given.demands, percents, batches, strict=True)
            replicas = tuple(PlacedReplica(d.model, b, 1, Share(pct), d.rate_rps) for d, pct, b in shares)
            partition = PlacedPartition(replicas)
            try:
                alone = all(
                    segments.meets(d, device, Workload(d.model, o.batch, o.share), d.rate_rps, partition.beside(o))
                    for d, o in zip(given.demands, replicas, strict=True)
                )
            except InputError:
                continue
            if alone:
                return True
    return False


@pytest.mark.parametrize(
    ("rates", "slos_ms"),
    [
        ((200.0, 200.0, 100.0), (9.0, 57.0, 30.0)),
        ((150.0, 60.0), (12.0, 40.0)),
        ((300.0, 100.0, 20.0), (20.0, 15.0, 60.0)),
    ],
)
def test_no_other_map_takes_fewer_devices(rates: tuple[float, ...], slos_ms: tuple[float, ...]) -> None:
    given = _make_problem(rates, slos_ms)
    placement, _ = solve_and_check(Optimal(), given)
    assert placement.unplaced == ()
    for policy in (FirstFitDecreasing(), Igniter()):
        other = policy.place(given)
        assert other.unplaced or len(placement.gpus) <= len(other.gpus)
    if _fits_one_gpu(given):
        assert len(placement.gpus) == 1
