"""Third-party estimators, whose errors are reported in one line instead of as a bug of gpuprof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Figure, SlowingEstimator, Workload, batch_times
from gpuprof.domain.interference_table import InterferenceTable, tabulate_interference
from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError, PluginError
from gpuprof.plugins import describe_error

_Answer = TypeVar("_Answer")


class ForeignEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` by one called ``name`` that is not gpuprof's own.

    What it raises is a `PluginError`, except `GpuprofError`: that is how it says that it knows nothing of a workload.
    """

    def __init__(self, name: str, estimator: Estimator) -> None:
        self._name = name
        self._estimator = estimator

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return what the estimator says.

        Raises `InputError` as the estimator does; `PluginError` where it raises anything else or returns no estimate.
        """
        said = self._ask(lambda: self._estimator.estimate(model, device, batch, share, beside, processes))
        if not isinstance(said, Estimate):
            raise PluginError(f"the estimator {self._name!r} returned a {type(said).__name__} and no Estimate")
        return said

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the times at each of the batches. Raises as `estimate` does."""
        return self._ask(lambda: batch_times(self._estimator, model, device, batches, share, processes))

    def slow_beside_any(self, device: Device, alone: Figure) -> Figure:
        """Return a time alone as it is at least beside others, as it is where the estimator does not say."""
        estimator = self._estimator
        if not isinstance(estimator, SlowingEstimator):
            return alone
        return self._ask(lambda: estimator.slow_beside_any(device, alone))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return what the estimator says."""
        return self._ask(lambda: tuple(self._estimator.batches(model, device, share)))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return what the estimator says."""
        return self._ask(lambda: tuple(self._estimator.shares(model, device)))

    def tabulate_interference(self, device: Device, workloads: Sequence[Workload]) -> InterferenceTable | None:
        """Return the table of the estimator, None where it has none."""
        return self._ask(lambda: tabulate_interference(self._estimator, device, workloads))

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        try:
            return question()
        except GpuprofError:
            raise
        except Exception as error:  # others may raise anything
            said = describe_error(error)
            raise PluginError(f"the estimator {self._name!r} failed: {said}", "--debug shows where") from error
