"""Maps of equal replicas, and devices that others can do without, under pooled queues with neighbours."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import evidence, plain_device, sliced_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.equal_replicas import EqualReplicas
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import Placement
from gpuprof.placement.pool import Pools
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments
from tests.placement.curved import CurvedEstimator

SIZES = (1, 4, 16)


def draw(seed: int, *, count: int = 2, sliced: bool = False, most_rps: float = 900.0) -> Problem:
    chosen = random.Random(seed)
    demands = tuple(
        Demand(f"m{number}", chosen.uniform(20.0, most_rps), Slo(chosen.uniform(25.0, 120.0)))
        for number in range(count)
    )
    estimator = CurvedEstimator(disturbance=0.3, spread=0.0, interval=0.0, sizes=SIZES)
    fleet = Fleet((FleetEntry(sliced_device() if sliced else plain_device()),))
    return Problem(demands, fleet, estimator, BatchQueue(), Options(time_limit_s=20.0))


def search(given: Problem) -> EqualReplicas:
    segments = Segments(given)
    return EqualReplicas(given, segments, Pools(given, segments), Limit())


def count_devices(given: Problem, demand: Demand) -> int:
    """Return the fewest devices of equal replicas for one demand, by trying every share, batch and count."""
    segments, (entry,) = Segments(given), given.fleet.entries
    best = 40
    for share in given.estimator.shares(demand.model, entry.device):
        fit = int(100.0 / share.sm_pct + 1e-9)
        for size in SIZES:
            own = Workload(demand.model, size, share)
            server = segments.server(entry.device, own, (own,) * (fit - 1))
            for gpus in range(1, best):
                pools = Pools(given, segments)
                if pools.keeps(demand, Counter({server: gpus * fit}), demand.rate_rps):
                    best = gpus
                    break
    return best


@pytest.mark.parametrize("seed", range(3))
def test_a_map_of_equal_replicas_is_sound_and_no_other_such_map_has_fewer_devices(seed: int) -> None:
    given = draw(seed)
    gpus = search(given).place()
    assert gpus is not None
    assert check(to_map(given, Placement("optimal", gpus)), evidence(given)) == ()
    assert len(gpus) == sum(count_devices(given, one) for one in given.demands)


def test_instances_are_filled_with_equal_replicas_at_legal_starts() -> None:
    given = draw(1, sliced=True, most_rps=3000.0)
    gpus = search(given).place()
    assert gpus is not None
    assert check(to_map(given, Placement("optimal", gpus)), evidence(given)) == ()


def test_light_models_share_a_device_and_all_keep_their_slos_beside_one_another() -> None:
    given = draw(4, count=3, most_rps=40.0)
    equal = search(given)
    gpus = equal.place()
    assert gpus is not None and len(gpus) == 3
    fewer = equal.drop_devices(gpus)
    assert len(fewer) < 3
    placement = Placement("optimal", equal.pools.rerate(fewer, {one.model: one.rate_rps for one in given.demands}))
    assert check(to_map(given, placement), evidence(given)) == ()


def test_a_fleet_that_is_too_small_has_no_such_map() -> None:
    given = draw(0, most_rps=5000.0)
    few = replace(given, fleet=Fleet((FleetEntry(plain_device(), 1),)))
    assert search(few).place() is None


@pytest.mark.parametrize("seed", range(5, 8))
def test_optimal_never_takes_more_devices_than_equal_replicas(seed: int) -> None:
    given = draw(seed)
    equal, found = search(given).place(), Optimal().place(given)
    assert equal is not None and not found.unplaced
    assert len(found.gpus) <= len(equal)
    assert (found.lower_bound_gpus or 0) <= len(found.gpus)
    assert math.isclose(sum(found.rates_rps().values()), sum(one.rate_rps for one in given.demands))
