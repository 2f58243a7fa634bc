"""Wraps third-party estimators: their errors are reported in one line, apart from gpuprof's own bugs."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import TypeVar

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    MOST_VARIATION,
    Estimate,
    Estimator,
    Figure,
    Workload,
    batch_times,
)
from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError, PluginError
from gpuprof.plugins import describe_failure

_Answer = TypeVar("_Answer")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not math.isnan(value)


class ForeignEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` by a third-party estimator called ``name``.

    Exceptions of the estimator become `PluginError`, except `GpuprofError`, which reports that it cannot estimate a
    workload.
    """

    def __init__(self, name: str, estimator: Estimator) -> None:
        self._name = name
        self._estimator = estimator

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the wrapped estimator's estimate.

        Raises `InputError` as the estimator does; `PluginError` for any other exception or an invalid estimate.
        """
        estimate = self._ask(lambda: self._estimator.estimate(model, device, batch, share, beside, processes))
        if not isinstance(estimate, Estimate):
            raise PluginError(f"the estimator {self._name!r} returned a {type(estimate).__name__} and no Estimate")
        workload = Workload(model, batch, share, processes)
        if estimate.workload != workload:
            raise self._wrong("workload", f"the one that was asked for, {workload},", estimate.workload)
        if estimate.device != device.name:
            raise self._wrong("device", repr(device.name), estimate.device)
        self._require_figure("latency_ms", estimate.latency_ms, above_zero=True)
        if estimate.memory_bytes is not None:
            self._require_figure("memory_bytes", estimate.memory_bytes, above_zero=False)
        for name, value in (("latency_cv", estimate.latency_cv), ("pause_cv", estimate.pause_cv)):
            is_left_out = name == "pause_cv" and value is None
            if not is_left_out and not (_is_number(value) and 0.0 <= float(value or 0.0) <= MOST_VARIATION):
                raise self._wrong(name, f"a number from 0 to {MOST_VARIATION:g}", value)
        if not _is_number(estimate.pause_factor) or not 0.0 < estimate.pause_factor < math.inf:
            raise self._wrong("pause_factor", "a number above 0", estimate.pause_factor)
        return estimate

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the times at each of the batches. Raises as `estimate` does."""
        times = self._ask(lambda: batch_times(self._estimator, model, device, batches, share, processes))
        for time in times:
            self._require_figure("latency_ms", time, above_zero=True)
        return times

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batches of the wrapped estimator."""
        sizes = self._ask(lambda: tuple(self._estimator.batches(model, device, share)))
        if wrong := [size for size in sizes if not isinstance(size, Integral) or size < 1]:
            raise self._wrong("a batch size", "a whole number from 1", wrong[0])
        return tuple(map(int, sizes))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares of the wrapped estimator."""
        shares = self._ask(lambda: tuple(self._estimator.shares(model, device)))
        if wrong := [share for share in shares if not isinstance(share, Share)]:
            raise self._wrong("a share", "a Share", wrong[0])
        return shares

    def _require_figure(self, name: str, figure: Figure, *, above_zero: bool) -> None:
        if not isinstance(figure, Figure) or not isinstance(figure.source, str):
            raise self._wrong(name, "a Figure with a source", figure)
        low, high = (figure.value if end is None else end for end in (figure.low, figure.high))
        if not all(map(_is_number, (low, figure.value, high))) or not 0.0 <= figure.value < math.inf:
            raise self._wrong(name, "a number above 0" if above_zero else "a number from 0", figure.value)
        if above_zero and figure.value == 0.0:
            raise self._wrong(name, "a number above 0", figure.value)
        if not low <= figure.value <= high:
            raise self._wrong(name, f"within its interval, {low} to {high},", figure.value)

    def _wrong(self, name: str, expected: str, value: object) -> PluginError:
        text = " ".join(reprlib.repr(value).split())
        return PluginError(f"the estimator {self._name!r} is wrong: {name} must be {expected} but is {text}")

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        try:
            return question()
        except GpuprofError:
            raise
        except Exception as error:  # plug-ins may raise anything
            raise describe_failure("estimator", self._name, self._estimator, error) from error
