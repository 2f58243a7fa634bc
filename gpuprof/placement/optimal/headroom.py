"""Headroom for interference: plans with times that are longer than alone by a factor.

The program counts with what replicas do alone. Told that each is slower by some factor it chooses other shares and
batches, which still keep their SLOs beside neighbours that cost no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Figure, Workload, batch_times
from gpuprof.domain.share import Share
from gpuprof.placement.problem import Problem


@dataclass(frozen=True, slots=True)
class SlowedEstimator:
    """An estimator whose times are at least ``factor`` times those alone, and at least those beside the neighbours."""

    estimator: Estimator
    factor: float  #: At least 1.

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return what is known of the workload beside the others, or longer times where it is alone."""
        known = self.estimator.estimate(model, device, batch, share, beside, processes)
        return known if beside else replace(known, latency_ms=known.latency_ms.scale_by(self.factor))

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return longer times."""
        known = batch_times(self.estimator, model, device, batches, share, processes)
        return tuple(one.scale_by(self.factor) for one in known)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batches that are listed."""
        return self.estimator.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares that are listed."""
        return self.estimator.shares(model, device)


def slow_down(problem: Problem, factor: float) -> Problem:
    """Return the problem with every workload ``factor`` times as slow while it is alone."""
    return replace(problem, estimator=SlowedEstimator(problem.estimator, factor))
