from __future__ import annotations

from bench.placement_problems import Key, TableEstimator
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.contract import ExponentialQueue, sliced_device
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments


def test_parts_of_an_instance_that_do_as_much_as_the_whole_are_in_the_bound_however_large_the_rate() -> None:
    device, whole, half = sliced_device(price=1.0), Share(100.0, "7g.80gb"), Share(50.0, "7g.80gb")
    rows: dict[Key, tuple[float, int]] = {(device.name, "m", 1, share): (10.0, 2**30) for share in (whole, half)}
    demands = (Demand("m", 400.0, Slo(40.0)),)
    options = Options(latency_budget=0.5)
    problem = Problem(demands, Fleet((FleetEntry(device),)), TableEstimator(rows), ExponentialQueue(), options)
    replica = PlacedReplica("m", 1, 1, half, 100.0, memory_bytes=2**30)
    gpu = PlacedGpu(device.name, (PlacedPartition((replica, replica), "7g.80gb", 0),))
    bounded = with_cost_bound(problem, Segments(problem), Placement("test", (gpu, gpu)))
    assert bounded.lower_bound_gpus == 2
