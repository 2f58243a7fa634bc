"""Plans on measured figures alone, which take precedence over unmeasured shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Figure, Workload, batch_times
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments


@dataclass(frozen=True, slots=True)
class MeasuredOnly:
    """An estimator that refuses figures that are neither measured nor interpolated."""

    estimator: Estimator

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the estimate; raises `InputError` where its time was extrapolated or predicted."""
        estimate = self.estimator.estimate(model, device, batch, share, beside, processes)
        if not estimate.latency_ms.is_observed:
            raise InputError(f"{model} was not measured at batch {batch} under {share} of {device.name}")
        return estimate

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the times; raises `InputError` where any was extrapolated or predicted."""
        times = batch_times(self.estimator, model, device, batches, share, processes)
        if not all(time.is_observed for time in times):
            raise InputError(f"{model} was not measured under {share} of {device.name}")
        return times

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the listed batches."""
        return self.estimator.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the listed shares."""
        return self.estimator.shares(model, device)


def restrict_to_measured(problem: Problem) -> Problem | None:
    """Return the problem on measured figures alone; None where all figures, or none of some demand, were measured."""
    segments, is_partial = Segments(problem), False
    for demand in problem.demands:
        if segments.first_alike(demand.model) != demand.model:
            continue
        observations = list(_list_observed(problem, segments, demand.model, between=False))
        if not any(observations):
            return None
        is_partial = is_partial or not all(observations) or not all(_list_observed(problem, segments, demand.model))
    if not is_partial:
        return None
    return replace(problem, estimator=MeasuredOnly(problem.estimator), previous=None, alike={})


def _list_observed(problem: Problem, segments: Segments, model: str, *, between: bool = True) -> Iterator[bool]:
    """Yield whether each listed share, or the least share between them in each partition, has a measured time."""
    for entry in problem.fleet.entries:
        with suppress(InputError):
            shares = problem.estimator.shares(model, entry.device)
            if between:
                partitions = dict.fromkeys(share.mig for share in shares)
                steps = {mig: segments.search_space.steps(model, entry.device, mig) for mig in partitions}
                shares = tuple(Share(percents[0], mig) for mig, percents in steps.items() if percents)
            for share in shares:
                with suppress(InputError):
                    batch = min(problem.estimator.batches(model, entry.device, share), default=1)
                    yield segments.estimate(entry.device, Workload(model, batch, share)).latency_ms.is_observed
