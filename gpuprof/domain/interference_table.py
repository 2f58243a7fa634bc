"""Interference as a function of sums over co-located workloads, tabulated for lower bounds."""

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
    """Times of n workloads on a device as functions of the sums of m pressures."""

    @property
    def pressures(self) -> Floats:
        """Contribution of each workload to each sum, non-negative, of shape (n, m)."""

    def take(self, rows: Integers) -> Self:
        """Return the table of the workloads at these indexes, repetitions included."""

    def least_times_ms(self, count: int, totals: Floats) -> tuple[Floats, Floats]:
        """Return lower bounds of each workload's batch time and of its part without overlap.

        Parameters
        ----------
        count : int
            Least number of running workloads, the workload itself included.
        totals : ndarray of shape (m,) or (m, n)
            Least sums of the pressures of all running workloads, the workload itself included: the same for all, or by
            workload.

        Returns
        -------
        (ndarray of shape (n,), ndarray of shape (n,))
            At most ``latency_ms`` and ``latency_ms - overlapped_ms`` of `Estimator.estimate` with any such neighbours;
            infinite for unknown workloads.
        """


@runtime_checkable
class TabulatingEstimator(Estimator, Protocol):
    """An estimator whose interference depends only on sums over the neighbours."""

    def tabulate_interference(self, device: Device, workloads: Sequence[Workload]) -> InterferenceTable | None:
        """Return the table of the workloads; None where interference has another form, or may shorten times.

        With a table, ``latency_cv`` of the estimates is 0: None where the times of equal batches vary.

        Raises
        ------
        InputError
            As `estimate` for any of the models.
        """


def tabulate_interference(
    estimator: Estimator, device: Device, workloads: Sequence[Workload]
) -> InterferenceTable | None:
    """Return the table of the workloads, None where the estimator has no table.

    Raises `InputError` as the estimator for any of the models.
    """
    if not isinstance(estimator, TabulatingEstimator):
        return None
    return estimator.tabulate_interference(device, workloads)
