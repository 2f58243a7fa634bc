"""Estimates corrected by how long batches took where they were served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Workload
from gpuprof.domain.share import Share


@dataclass(frozen=True, slots=True)
class CorrectedEstimator:
    """Another estimator whose latencies of some models are multiplied by a factor.

    Attributes
    ----------
    estimator : Estimator
    factors : mapping of str to float
        By model: measured over estimated time of a batch.
    """

    estimator: Estimator
    factors: Mapping[str, float]

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the other's estimate, latency and its interval times the model's factor."""
        said = self.estimator.estimate(model, device, batch, share, beside, processes)
        factor = self.factors.get(model)
        if factor is None:
            return said
        latency = replace(said.latency_ms.scale_by(factor), source=f"{said.latency_ms.source}, corrected by serving")
        return replace(said, latency_ms=latency, overlapped_ms=factor * said.overlapped_ms)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return what the other does."""
        return self.estimator.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return what the other does."""
        return self.estimator.shares(model, device)
