"""An estimator that returns an end of another estimator's intervals, for the best and the worst case of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Figure, Workload, batch_times, board_work
from gpuprof.domain.share import Share


@dataclass(frozen=True, slots=True)
class IntervalEndEstimator:
    """Times and memory at an end of their intervals, without intervals; a `gpuprof.domain.estimate.Estimator`."""

    estimator: Estimator
    end: Literal["lower", "upper"]

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the wrapped estimator's estimate at this end. Raises `InputError` as it does."""
        estimate = self.estimator.estimate(model, device, batch, share, beside, processes)
        memory = None if estimate.memory_bytes is None else self._at_end(estimate.memory_bytes)
        latency = self._at_end(estimate.latency_ms)
        # In proportion: at a lower end the hidden part must stay below the time, or the throughput would be
        # meaningless.
        hidden = estimate.overlapped_ms * latency.value / estimate.latency_ms.value
        return replace(estimate, latency_ms=latency, memory_bytes=memory, overlapped_ms=hidden)

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the wrapped estimator's times at this end. Raises `InputError` as it does."""
        return tuple(map(self._at_end, batch_times(self.estimator, model, device, batches, share, processes)))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batches of the wrapped estimator."""
        return self.estimator.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares of the wrapped estimator."""
        return self.estimator.shares(model, device)

    def board_work_ms(self, model: str, device: Device) -> Figure | None:
        """Return the wrapped estimator's board work at this end."""
        work = board_work(self.estimator, model, device)
        return None if work is None else self._at_end(work)

    def _at_end(self, figure: Figure) -> Figure:
        end = figure.high if self.end == "upper" else figure.low
        return Figure(figure.value if end is None else end, figure.source)
