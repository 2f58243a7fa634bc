from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import ExponentialQueue, plain_device, sliced_device
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.pooled_segment import BoundingSegments
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments
from tests.placement.drawn_problems import Key, TableEstimator


def test_parts_of_an_instance_that_do_as_much_as_the_whole_are_in_the_bound_however_large_the_rate() -> None:
    device, whole, half = sliced_device(price=1.0), Share(100.0, "7g.80gb"), Share(50.0, "7g.80gb")
    rows: dict[Key, tuple[float, int]] = {(device.name, "m", 1, share): (10.0, 2**30) for share in (whole, half)}
    demands = (Demand("m", 400.0, Slo(40.0)),)
    options = Options(latency_budget=0.5)
    problem = Problem(demands, Fleet((FleetEntry(device),)), TableEstimator(rows), ExponentialQueue(), options)
    replica = PlacedReplica("m", 1, 1, half, 100.0, memory_bytes=2**30)
    gpu = PlacedGpu(device.name, (PlacedPartition((replica, replica), "7g.80gb", 0),))
    bounded = with_cost_bound(problem, Segments(problem), Placement("test", (gpu, gpu)), Limit())
    assert bounded.lower_bound_gpus == 2


@dataclass(frozen=True)
class _SlowEstimator(TableEstimator):
    """Takes longer for an answer than a bound may take at least, but of the first model."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        if model != "a":
            time.sleep(0.6)
        return super().estimate(model, device, batch, share, beside, processes)


@pytest.mark.parametrize(("limit", "possible"), [(Limit(), (4,)), (Limit(0.0), (1, 2))])
def test_of_a_bound_what_there_is_no_time_for_is_left_out(limit: Limit, possible: tuple[int, ...]) -> None:
    """Each of two demands takes two devices at least; one device stands for what was not looked at."""
    device, names = plain_device(), ("a", "b")
    times_ms = {Share(100.0): 10.0, Share(50.0): 20.0}
    rows: dict[Key, tuple[float, int]] = {
        (device.name, name, 1, share): (time_ms, 2**30) for name in names for share, time_ms in times_ms.items()
    }
    demands = (Demand("a", 200.0, Slo(40.0)), Demand("b", 199.0, Slo(41.0)))
    problem = Problem(
        demands, Fleet((FleetEntry(device),)), _SlowEstimator(rows), ExponentialQueue(), Options(latency_budget=0.5)
    )
    replicas = [PlacedReplica(name, 1, 1, Share(100.0), 100.0, memory_bytes=2**30) for name in names for _ in range(2)]
    gpus = tuple(PlacedGpu(device.name, (PlacedPartition((replica,)),)) for replica in replicas)
    bounded = with_cost_bound(problem, Segments(problem), Placement("test", gpus), limit)
    assert bounded.lower_bound_gpus in possible


@dataclass(frozen=True)
class _VaryingEstimator(TableEstimator):
    """Of batches whose times vary by a twelfth."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        return replace(super().estimate(model, device, batch, share, beside, processes), latency_cv=1 / 12)


@pytest.mark.slow
def test_a_share_under_which_a_batch_is_hardly_ever_in_time_is_no_candidate() -> None:
    """Bounds allow it 1e-48 requests/s, and programs cannot count how many of it a demand takes."""
    device, whole, small = plain_device(), Share(100.0), Share(2.5)
    rows: dict[Key, tuple[float, int]] = {
        (device.name, "m", 1, whole): (20.0, 2**30),
        (device.name, "m", 1, small): (544.0, 2**30),
    }
    demands = (Demand("m", 100.0, Slo(137.0)),)
    problem = Problem(demands, Fleet((FleetEntry(device, 1),)), _VaryingEstimator(rows), BatchQueue(), Options())
    offered = CandidateSegments(problem, BoundingSegments(problem)).optimistic_segments(demands)
    assert {segment.share for segment in offered["m"]} == {whole}
    found = make_policy("optimal").place(problem)
    assert 30.0 < found.rates_rps()["m"] < 50.0 and found.upper_bound_goodput_rps is not None
