"""An estimator of listed shares only."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from tests.placement.curved import CurvedEstimator

PERCENTS = (20.0, 40.0, 60.0, 80.0, 100.0)
BATCHES = (1, 4)


class SummedEstimator(CurvedEstimator):
    """The curved one, which knows no shares between those that it lists."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        if share.sm_pct not in PERCENTS:
            raise InputError(f"nothing is known of {share}")
        return super().estimate(model, device, batch, share, beside, processes)
