"""Interference that depends only on sums over co-located workloads: times of many workloads at once, for bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimator, Workload

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class InterferenceTable(Protocol):
    """Times of n workloads on a device, given only the sums of their neighbours' m pressures."""

    @property
    def pressures(self) -> Floats:
        """Contribution of each workload to each sum, non-negative, of shape (n, m)."""

    def take(self, rows: Integers) -> Self:
        """Return the table of some of the workloads, by their numbers, each as often as it is named."""

    def least_times_ms(self, count: int, totals: Floats) -> tuple[Floats, Floats]:
        """Return a lower bound of each workload's batch time, and how much of it no other batch overlaps.

        Parameters
        ----------
        count : int
            At least so many run, the workload among them.
        totals : ndarray of shape (m,) or (m, n)
            The pressures of all that run, the workload among them, come to at least so much: the same for all, or by
            workload.

        Returns
        -------
        (ndarray of shape (n,), ndarray of shape (n,))
            Never more than ``latency_ms`` and ``latency_ms - overlapped_ms`` of `Estimator.estimate` beside any such
            neighbours; infinite for workloads of which nothing is known.
        """


@runtime_checkable
class TabulatingEstimator(Estimator, Protocol):
    """An estimator whose interference depends only on sums over the neighbours."""

    def tabulate_interference(self, device: Device, workloads: Sequence[Workload]) -> InterferenceTable | None:
        """Return the table of the workloads; None where neighbours act otherwise, or might quicken one another.

        None, too, where batches of one size take now more, now less time: ``latency_cv`` of the estimates is 0.

        Raises
        ------
        InputError
            As `estimate` for any of the models.
        """


def tabulate_interference(
    estimator: Estimator, device: Device, workloads: Sequence[Workload]
) -> InterferenceTable | None:
    """Return the table of the workloads, None where the estimator has none.

    Raises `InputError` as the estimator does for any of the models.
    """
    if not isinstance(estimator, TabulatingEstimator):
        return None
    return estimator.tabulate_interference(device, workloads)
