"""An estimator that refuses what the database knows to fail, whatever the one inside says."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Workload
from gpuprof.domain.share import Share
from gpuprof.estimators.measured.failures import require_no_failure
from gpuprof.estimators.measured.measured import read_measured
from gpuprof.kernel_db.store import KernelDb


class FailureAwareEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` by another one, without what failed.

    Parameters
    ----------
    estimator : Estimator
    db : KernelDb
    """

    def __init__(self, estimator: Estimator, db: KernelDb) -> None:
        self._estimator = estimator
        self._models = read_measured(db)

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return what the estimator says.

        Raises
        ------
        InputError
            As the estimator does, and where a failure rules the workload out.
        """
        known, workload = self._models.get(model), Workload(model, batch, share, processes)
        if known is not None and not known.has_run(device.name, workload):
            require_no_failure(device, workload, known.failures.get(device.name, ()))
        return self._estimator.estimate(model, device, batch, share, beside, processes)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return what the estimator says."""
        return self._estimator.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return what the estimator says."""
        return self._estimator.shares(model, device)
