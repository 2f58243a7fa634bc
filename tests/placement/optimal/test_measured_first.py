"""Plans on measured figures before shares that nobody measured, and rates raised to what replicas serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from gpuprof.domain.deployment import Unplaced
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import EXTRAPOLATED, Estimate, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import (
    LinearEstimator,
    demand,
    plain_device,
    problem,
    sliced_device,
    solve_and_check,
)
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.judge import Judge
from gpuprof.placement.optimal.optimal import MeasuredOnly, Optimal, restrict_to_measured
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Options
from gpuprof.placement.segment import Segments

BUDGET = Options(latency_budget=0.5, max_processes=1)


@dataclass(frozen=True, slots=True)
class ListedOnly(LinearEstimator):
    """Times that were measured under the listed shares alone; others are extrapolated and up to twice as long."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time, with its source."""
        made = LinearEstimator.estimate(self, model, device, batch, share, beside, processes)
        if share in self.shares(model, device) and not beside:
            return made
        wide = replace(made.latency_ms, source=EXTRAPOLATED, high=2.0 * made.latency_ms.value)
        return replace(made, latency_ms=wide)


@dataclass(frozen=True, slots=True)
class SmallBatchesOnly(LinearEstimator):
    """Times that were measured in batches of up to 4; larger batches are extrapolated."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time, with its source."""
        estimate = LinearEstimator.estimate(self, model, device, batch, share, beside, processes)
        if batch <= 4:
            return estimate
        return replace(estimate, latency_ms=replace(estimate.latency_ms, source=EXTRAPOLATED))


def test_extrapolated_batches_under_a_measured_share_are_refused() -> None:
    measured = MeasuredOnly(SmallBatchesOnly(sizes=(1, 4, 8)))
    assert measured.estimate("m", plain_device(), 4, Share()).latency_ms.is_observed
    with pytest.raises(InputError, match="was not measured at batch 8"):
        measured.estimate("m", plain_device(), 8, Share())


def test_the_map_of_measured_instances_is_proven_and_no_replica_has_an_extrapolated_share() -> None:
    services = [demand(f"m{i}", 120.0, 60.0) for i in range(7)]
    given = problem(services, [(sliced_device(), None)], ListedOnly(percents=()), BUDGET)
    placement, _ = solve_and_check(Optimal(), given)
    assert placement.unplaced == () and not placement.stopped
    assert placement.lower_bound_gpus == len(placement.gpus)
    listed = set(given.estimator.shares("m0", sliced_device()))
    assert {replica.share for gpu in placement.gpus for replica in gpu.replicas()} <= listed


def test_extrapolated_shares_are_taken_where_they_save_a_device() -> None:
    services = [demand(f"m{i}", 5.0, 400.0) for i in range(4)]
    given = problem(services, estimator=ListedOnly(percents=(100.0,)), options=BUDGET)
    placement, _ = solve_and_check(Optimal(), given)
    assert len(placement.gpus) == 1


def test_only_a_problem_of_which_some_figures_were_measured_is_restricted() -> None:
    mixed = problem([demand()], [(sliced_device(), None)], ListedOnly(percents=()))
    restricted = restrict_to_measured(mixed)
    assert restricted is not None and isinstance(restricted.estimator, MeasuredOnly)
    device = sliced_device()
    whole = Share(100.0, "1g.10gb")
    assert restricted.estimator.estimate("m", device, 1, whole) == mixed.estimator.estimate("m", device, 1, whole)
    with pytest.raises(InputError):
        restricted.estimator.estimate("m", device, 1, Share(50.0, "1g.10gb"))
    for source in ("measured", EXTRAPOLATED):
        assert restrict_to_measured(problem([demand()], estimator=LinearEstimator(source=source))) is None


def test_replicas_of_a_demand_that_is_not_met_are_raised_to_what_they_serve_and_no_further() -> None:
    given = problem([demand("m", 500.0), demand("n", 40.0)], [(plain_device(), 1)], options=BUDGET)
    judge, half = Judge(given, Segments(given), Limit()), Share(50.0)
    replicas = tuple(PlacedReplica(model, 8, 1, half, 30.0) for model in ("m", "n"))
    missing = tuple(Unplaced(model=model, rate_rps=rate, reason="full") for model, rate in (("m", 470.0), ("n", 10.0)))
    before = Placement("optimal", (PlacedGpu("plain", (PlacedPartition(replicas),)),), missing)
    (gpu,) = judge.raise_rates(before).gpus
    rates = {replica.model: replica.rate_rps for replica in gpu.replicas()}
    assert rates == {"m": pytest.approx(400.0), "n": pytest.approx(40.0)}  # 8 requests in 20 ms
