from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import EXTRAPOLATED, Estimate, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError, InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import ExponentialQueue, evidence, plain_device, sliced_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import portfolio
from gpuprof.placement.optimal.budget_plan import BudgetPlans
from gpuprof.placement.optimal.incumbent import objective_value
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.portfolio import QuickPolicies
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments
from tests.placement.curved import CurvedEstimator
from tests.placement.drawn_problems import KINDS, Kind, draw_problem
from tests.placement.optimal.summed import SummedTable

#: Policies that take milliseconds for the problems here.
QUICK = ("igniter", "parvagpu", "gslice", "gpulet", "ffd")


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


class _InstanceEstimator(CurvedEstimator):
    """The curved one, which has measured MIG instances alone: all else is extrapolated."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        found = super().estimate(model, device, batch, share, beside, processes)
        source = found.latency_ms.source if share.mig is not None else EXTRAPOLATED
        return replace(found, latency_ms=replace(found.latency_ms, source=source))


@pytest.mark.parametrize("seed", [0, 4, 10])
def test_where_instances_were_measured_a_limit_that_ends_all_policies_gives_no_worse_map_than_those_for_instances(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    demands = tuple(
        Demand(f"m{number}", draw.uniform(20.0, 900.0), Slo(draw.uniform(15.0, 100.0))) for number in range(6)
    )
    fleet = Fleet((FleetEntry(sliced_device(price=1.0)),))
    given = Problem(demands, fleet, _InstanceEstimator(interval=0.5), ExponentialQueue(), Options())
    monkeypatch.setattr(portfolio.QuickPolicies, "run", lambda *_: iter(()))
    found = Optimal().place(replace(given, options=Options(time_limit_s=1e-3)))
    for name in ("parvagpu", "ffd"):
        assert objective_value(given, found) <= objective_value(given, make_policy(name).place(given)), name
    assert check(to_map(given, found), evidence(given)) == ()


class _GapEstimator(CurvedEstimator):
    """The curved one, which refuses batches that are not listed, as where a smaller one failed."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        if batch not in self.sizes:
            raise InputError(f"{model} at batch {batch} is ruled out")
        return super().estimate(model, device, batch, share, beside, processes)


def test_a_replica_is_late_where_batches_that_are_not_full_are_refused() -> None:
    given = replace(queued_problem(3, 2, 400.0, None), estimator=_GapEstimator(interval=0.0))
    rejected = BudgetPlans(given, Segments(given), "ffd")
    assert rejected.find_cheapest(Limit()) is None


class _NoBatchEstimator(CurvedEstimator):
    """The curved one, which says that no batch fits."""

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return ()


def test_where_no_batch_fits_nothing_is_placed_with_a_limit_as_without() -> None:
    given = replace(queued_problem(3, 2, 40.0, 2.0), estimator=_NoBatchEstimator())
    assert [one.model for one in Optimal().place(given).unplaced] == ["m0", "m1"]


def test_beside_a_known_map_quick_policies_have_less_time_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    least: list[float] = []

    def record(_: QuickPolicies, problem: Problem, limit: Limit) -> tuple[()]:
        least.append(limit.least_cpu_s)
        return ()

    monkeypatch.setattr(QuickPolicies, "run", record)
    monkeypatch.setattr(portfolio, "_are_figures_measured", lambda _: False)
    posed = queued_problem(0, 2, 100.0, 1.0)
    for known in (None, Placement("optimal", ())):
        QuickPolicies().find_predicted(posed, Limit(1.0), known)
    assert 0.0 < least[1] < least[0]
