"""Interference that acts through sums over all who run together: times of many workloads at once, for bounds."""

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
    """Times of n workloads on a device beside neighbours of which only the sums of m pressures are known."""

    @property
    def pressures(self) -> Floats:
        """What each workload adds to each sum: of shape (n, m), never negative."""

    def take(self, rows: Integers) -> Self:
        """Return the table of some of the workloads, by their numbers, each as often as it is named."""

    def least_times_ms(self, count: int, totals: Floats) -> tuple[Floats, Floats]:
        """Return what each workload takes at least for a batch, and how much of that no other batch overlaps.

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
    """An estimator whose neighbours act through sums."""

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
