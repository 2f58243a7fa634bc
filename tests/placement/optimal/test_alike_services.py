"""One model as N services: devices grow with N, and no bound exceeds what joined maps of fewer services reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.share import Share
from gpuprof.placement.contract import LinearEstimator, demand, problem, solve_and_check
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Options


@dataclass(frozen=True, slots=True)
class LaunchBound(LinearEstimator):
    """Times that no share changes, as of a model whose launches take longer than its kernels."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time under the whole device."""
        whole = LinearEstimator.estimate(self, model, device, batch, replace(share, sm_pct=100.0), beside, processes)
        return replace(whole, workload=Workload(model, batch, share, processes))


def _place(count: int, options: Options) -> Placement:
    estimator = LaunchBound(
        start_ms=0.5, each_ms=0.1, memory_bytes=700 * 2**20, percents=(10.0, 25.0, 50.0, 100.0), sizes=(1, 4, 16)
    )
    services = [demand(f"s{i}", 20.0, 50.0) for i in range(count)]
    placement, _ = solve_and_check(Optimal(), problem(services, estimator=estimator, options=options))
    assert placement.unplaced == ()
    return placement


@pytest.mark.parametrize(
    ("options", "counts"),
    [(Options(latency_budget=0.5), (1, 23, 24, 40, 41, 60, 82, 200)), (Options(time_limit_s=5.0), (20, 41, 60))],
    ids=["latency budget", "queues"],
)
def test_devices_grow_with_the_services_and_no_bound_exceeds_joined_maps(
    options: Options, counts: tuple[int, ...]
) -> None:
    """Sixteen GiB hold 23 replicas of 700 MiB, and a fortieth of a device is share enough for each."""
    devices: dict[int, int] = {}
    for count in counts:
        placement = _place(count, options)
        devices[count] = len(placement.gpus)
        fewer = [(count_a, count - count_a) for count_a in devices if count - count_a in devices]
        joined = min((devices[count_a] + devices[count_b] for count_a, count_b in fewer), default=-(-count // 23))
        assert (placement.lower_bound_gpus or 0) <= min(joined, -(-count // 23))
        assert len(placement.gpus) <= joined
    assert list(devices.values()) == sorted(devices.values())
