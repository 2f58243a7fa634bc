"""A fleet of USHER's scale: 6,000 GPUs of four kinds and 15 million requests/s over the models of its Table 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.published_measurements import thesis_estimator
from gpuprof.domain.catalogue import device, v100_profiles
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share

#: Models of USHER's Table 1 with their SLOs (ms), as far as the catalogue has profiles of them.
_SLO_MS = {
    "resnet50": 108.0,
    "resnext50_32x4d": 116.0,
    "mobilenet_v2": 64.0,
    "densenet121": 202.0,
    "inception_v3": 116.0,
    "efficientnet_b7": 217.0,
    "bert": 35.0,
    "gpt2": 140.0,
}
_FLEET = {"h100": 3000, "a100-80": 1500, "v100": 1000, "l4": 500}
_RATE_RPS = 15e6


class ScaledEstimator:
    """The V100's profiles, scaled to another GPU by the ratio of float32 peaks: a stand-in for profiles of it."""

    def __init__(self) -> None:
        self._v100 = thesis_estimator()

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes measured on the V100."""
        return self._v100.batches(model, _V100, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares measured on the V100."""
        return self._v100.shares(model, _V100)

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the row of the table, scaled; memory as measured."""
        base = self._v100.estimate(model, _V100, batch, share, beside, processes)
        ratio = _V100.flops_per_s["float32"] / device.flops_per_s["float32"]
        return replace(base, device=device.name, latency_ms=base.latency_ms.scale_by(ratio))


_V100 = device(v100_profiles().device)


def fleet() -> Fleet:
    """Return the 6,000 GPUs."""
    return Fleet(tuple(FleetEntry(device(name), count) for name, count in _FLEET.items()))


def demands() -> tuple[Demand, ...]:
    """Return 15 million requests/s, shared out so that every model takes about as much of the fleet."""
    best: dict[str, float] = {}
    for row in v100_profiles().rows:
        if row.model in _SLO_MS and row.throughput_rps is not None:
            best[row.model] = max(best.get(row.model, 0.0), row.throughput_rps)
    whole = sum(best.values())
    return tuple(Demand(model, _RATE_RPS * best[model] / whole, Slo(slo)) for model, slo in _SLO_MS.items())
