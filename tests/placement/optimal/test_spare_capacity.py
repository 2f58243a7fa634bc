from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.share import Share
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, sliced_device, solve_and_check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.spare_capacity import SpareCapacity
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments


@dataclass(frozen=True, slots=True)
class Unsure(LinearEstimator):
    """As the linear one, with an interval of its own for the models that are unsure."""

    unsure: tuple[str, ...] = ("unsure",)

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        estimate = LinearEstimator.estimate(self, model, device, batch, share, beside, processes)
        value, width = estimate.latency_ms.value, 0.6 if model in self.unsure else 0.0
        return replace(
            estimate, latency_ms=replace(estimate.latency_ms, low=value * (1 - width), high=value * (1 + width))
        )


def make_problem(*models: str, device: Device | None = None, slo_ms: float = 100.0) -> Problem:
    fleet = [(device or plain_device(), None)]
    demands = [demand(model, 20.0, slo_ms) for model in models]
    return problem(demands, fleet, Unsure(), Options(latency_budget=0.9))


def shares(gpus: Sequence[PlacedGpu]) -> dict[str, tuple[float, str | None]]:
    return {replica.model: (replica.share.sm_pct, replica.share.mig) for gpu in gpus for replica in gpu.replicas()}


def distribute(case: Problem, gpu: PlacedGpu) -> dict[str, tuple[float, str | None]]:
    return shares(SpareCapacity(case, Segments(case), Limit()).distribute([gpu]))


def replica(model: str, pct: float, mig: str | None = None) -> PlacedReplica:
    return PlacedReplica(model, 1, 1, Share(pct, mig), 20.0)


def test_what_is_left_of_a_device_goes_to_the_replica_that_is_least_sure() -> None:
    together = PlacedGpu("plain", (PlacedPartition((replica("sure", 25.0), replica("unsure", 25.0))),))
    assert distribute(make_problem("sure", "unsure"), together) == {"sure": (25.0, None), "unsure": (75.0, None)}


def test_an_instance_grows_into_free_slices_and_stays_beside_the_others() -> None:
    cut = PlacedGpu(
        "sliced",
        (
            PlacedPartition((replica("unsure", 100.0, "1g.10gb"),), "1g.10gb", 0),
            PlacedPartition((replica("sure", 100.0, "3g.40gb"),), "3g.40gb", 4),
        ),
    )
    grown = distribute(make_problem("sure", "unsure", device=sliced_device()), cut)
    assert grown == {"sure": (100.0, "3g.40gb"), "unsure": (100.0, "4g.40gb")}


def test_sure_estimates_leave_the_rest_free() -> None:
    alone = PlacedGpu("plain", (PlacedPartition((replica("sure", 25.0),)),))
    assert distribute(make_problem("sure"), alone) == {"sure": (25.0, None)}


def test_nobody_grows_where_that_breaks_anothers_slo() -> None:
    case = make_problem("sure", "unsure")
    slowed = replace(case, estimator=Unsure(slowdown=50.0))
    together = PlacedGpu("plain", (PlacedPartition((replica("sure", 25.0), replica("unsure", 25.0))),))
    assert distribute(slowed, together) == {"sure": (25.0, None), "unsure": (25.0, None)}


def test_spreading_changes_neither_devices_nor_cost() -> None:
    case = make_problem("sure", "unsure", "other", device=sliced_device())
    placement, _ = solve_and_check(Optimal(), case)
    assert len(placement.gpus) == placement.lower_bound_gpus == 1
