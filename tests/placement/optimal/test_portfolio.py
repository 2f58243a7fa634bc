from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.placement_problems import KINDS, Kind, draw_problem
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import evidence, plain_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.optimal import portfolio
from gpuprof.placement.optimal.incumbent import objective_value
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from tests.placement.curved import CurvedEstimator
from tests.placement.optimal.test_neighbour_bound import SummedTable

#: Policies that take milliseconds for the problems here.
QUICK = ("igniter", "parvagpu", "gslice", "gpulet", "ffd", "mig-serving", "alpaserve", "paris-elsa", "shepherd")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 4])
def test_however_short_the_limit_no_quick_policy_has_a_better_map(kind: Kind, seed: int) -> None:
    given = draw_problem(kind, seed)
    limited = replace(given, options=replace(given.options, time_limit_s=1e-3))
    found = objective_value(given, Optimal().place(limited))
    for name in QUICK:
        try:
            other = objective_value(given, make_policy(name).place(given))
        except GpuprofError:
            continue  # not made for such a fleet
        assert found <= other, name


class _AnyShareEstimator(CurvedEstimator):
    """The curved one, which says that its neighbours act by sums."""

    def tabulate_interference(self, device: Device, workloads: Sequence[Workload]) -> SummedTable:
        alone = [self.estimate(w.model, device, w.batch, w.share).latency_ms.value for w in workloads]
        taken = [[device.fraction(one.share) * math.log2(1 + one.batch)] for one in workloads]
        return SummedTable(np.array(alone), np.array(taken), self.disturbance)


def queued_problem(seed: int, count: int, most_rps: float, limit_s: float | None) -> Problem:
    """Return demands of models that are as quick as one another, judged by queues."""
    draw = random.Random(seed)
    demands = tuple(
        Demand(f"m{number}", draw.uniform(5.0, most_rps), Slo(draw.uniform(30.0, 150.0))) for number in range(count)
    )
    estimator = _AnyShareEstimator(spread=0.0, disturbance=0.6, interval=0.0, sizes=(1, 4))
    fleet = Fleet((FleetEntry(plain_device()),))
    return Problem(demands, fleet, estimator, BatchQueue(), Options(time_limit_s=limit_s))


@pytest.mark.parametrize(
    ("seed", "count"), [*(pytest.param(seed, 50, marks=pytest.mark.slow) for seed in (0, 1)), (2, 12), (3, 35)]
)
def test_of_many_demands_by_queues_whose_neighbours_act_through_sums_igniter_has_no_better_map(
    monkeypatch: pytest.MonkeyPatch, seed: int, count: int
) -> None:
    given = queued_problem(seed, count, 500.0, 1e-3)
    monkeypatch.setattr(portfolio, "_FEW_LOOKED_UP", 0)
    quick, found = make_policy("igniter").place(given), Optimal().place(given)
    assert not quick.unplaced
    assert objective_value(given, found) <= objective_value(given, quick)
    assert check(to_map(given, found), evidence(given)) == ()


class _NoBatchEstimator(CurvedEstimator):
    """The curved one, which says that no batch fits."""

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return ()


def test_where_no_batch_fits_nothing_is_placed_with_a_limit_as_without() -> None:
    given = replace(queued_problem(3, 2, 40.0, 2.0), estimator=_NoBatchEstimator())
    assert [one.model for one in Optimal().place(given).unplaced] == ["m0", "m1"]
