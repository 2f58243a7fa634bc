"""The search space of every policy: batch sizes, numbers of processes and shares of a replica.

All policies obey the same rule, so a bound over the search space bounds every policy's result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import EXTRAPOLATED, PredictedRequirements, classify_source
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.problem import Problem

#: Default maximum of processes inside a MIG instance; ParvaGPU (SC'24 §III) stops at three.
MIG_PROCESSES = 3
#: Ratio below which neighbouring listed batches are thinned out where each batch takes a solved queue.
_APART = 1.2
#: Percent; iGniter allots shares in such units, and finer steps are within every estimate's error.
SHARE_STEP = 2.5
#: Percent of an instance several models may share: tenths and quarters.
PARTS = tuple(sorted({*(10.0 * n for n in range(1, 10)), 25.0, 75.0}))
#: Maximum devices of a demand at full load. Policies evaluate replicas with neighbours, so times grow faster.
MOST_DEVICES = 2000


@dataclass(slots=True)
class SearchSpace:
    """The batches, processes and shares of a problem.

    With a latency budget, all batches up to the largest listed batch are allowed where the estimator answers for them
    without extrapolation.
    Under the queueing model, only batches listed for the share or for the whole device are; where these are many, only
    some of them, each a fifth larger than the last.
    """

    problem: Problem
    _listed: dict[tuple[str, str, Share], tuple[int, ...]] = field(default_factory=dict)
    _dense: dict[tuple[str, str, Share], bool] = field(default_factory=dict)
    _steps: dict[tuple[str, str, str | None], tuple[float, ...]] = field(default_factory=dict)

    def listed_batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the allowed batches listed for the share or the whole device, rising."""
        key = (model, device.name, share)
        if key not in self._listed:
            full_share_batches = () if share.mig is not None else self._batches_asked_for(model, device, Share())
            self._listed[key] = tuple(sorted({*self._batches_asked_for(model, device, share), *full_share_batches}))
        return self._listed[key]

    def sizes(self, model: str, device: Device, share: Share) -> Sequence[int]:
        """Return all batches that may run under ``share``, rising."""
        batches = self.listed_batches(model, device, share)
        return range(1, batches[-1] + 1) if self.is_dense(model, device, share) else batches

    def is_dense(self, model: str, device: Device, share: Share) -> bool:
        """Return whether batches between the listed batches may run too."""
        if self.problem.options.latency_budget is None:
            return False
        batches = self.listed_batches(model, device, share)
        gap = next((batch for batch in range(1, max(batches, default=1)) if batch not in batches), None)
        key = (model, device.name, share)
        if gap is not None and key not in self._dense:
            try:
                latency = self.problem.estimator.estimate(model, device, gap, share).latency_ms
                self._dense[key] = classify_source(latency.source) != EXTRAPOLATED
            except InputError:
                self._dense[key] = False
        return gap is not None and self._dense[key]

    def processes(self, share: Share) -> range:
        """Return the allowed numbers of processes of a replica under ``share``."""
        most = self.problem.options.max_processes
        return range(1, 1 + (most if most is not None else MIG_PROCESSES if share.mig is not None else 1))

    def steps(self, model: str, device: Device, mig: str | None) -> tuple[float, ...]:
        """Return the unlisted percentages of a partition that replicas may have, ascending."""
        if device.kind != "gpu":
            return ()
        key = (model, device.name, mig)
        if key not in self._steps:
            if mig is None:
                self._steps[key] = tuple(self._between(model, device))
            else:
                is_known = any(self._is_part_known(model, device, Share(percent, mig)) for percent in PARTS[::-1])
                self._steps[key] = PARTS if is_known else ()
        return self._steps[key]

    def _is_part_known(self, model: str, device: Device, part: Share) -> bool:
        return self._is_known(model, device, min(self.listed_batches(model, device, part), default=1), part)

    def _batches_asked_for(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        most = self.problem.options.max_batch
        batches = sorted({batch for batch in self.problem.estimator.batches(model, device, share) if batch <= most})
        return tuple(batches if self.problem.options.latency_budget is not None else _space_apart(batches))

    def _is_known(self, model: str, device: Device, batch: int, share: Share) -> bool:
        try:
            self.problem.estimator.estimate(model, device, batch, share)
        except InputError:
            return False
        return True

    def _between(self, model: str, device: Device) -> list[float]:
        """Return SM percentages between the listed ones: USHER's requirements, and regular steps if estimates exist."""
        percents = {share.sm_pct for share in self.problem.estimator.shares(model, device) if share.mig is None}
        if not percents:
            return []
        required = map(Share, self._required_shares(model, device))
        steps = {share.sm_pct for share in required if self._is_part_known(model, device, share)}
        # An estimator that answers for an unlisted share, such as 13%, answers for all between the listed shares. Where
        # shares make no difference to the time, small shares matter most: more replicas fit on a device.
        if self._is_known(model, device, max(self.listed_batches(model, device, Share()), default=1), Share(13.0)):
            steps |= {SHARE_STEP * n for n in range(1, round(100.0 / SHARE_STEP))}
        return sorted(steps - percents)

    def _required_shares(self, model: str, device: Device) -> set[float]:
        """Return the profiled requirements by any metric at any batch, which USHER gives as shares.

        Predicted requirements are in whole steps.
        """
        shares: set[float] = set()
        for batch in self.listed_batches(model, device, Share()):
            try:
                creq = self.problem.estimator.estimate(model, device, batch, Share()).creq_pct
            except InputError:
                continue
            if isinstance(creq, PredictedRequirements):
                continue
            values = {figure.value for _, figure in creq if figure.is_observed and math.isfinite(figure.value)}
            shares |= {value for value in values if 0.0 < value < 100.0}
        return shares


def _space_apart(batches: Iterable[int]) -> Iterable[int]:
    spaced: list[int] = []
    last = 0
    for last in batches:
        if not spaced or last >= _APART * spaced[-1]:
            spaced.append(last)
    return {*spaced, last} - {0}


def refuse_oversized(problem: Problem) -> None:
    """Refuse demands that need too many devices, even of the fastest kind and with full batches.

    Only devices of unlimited count matter: a fixed count limits the plan itself. Raises `InputError` when a demand
    needs more than `MOST_DEVICES`.
    """
    endless = [entry.device for entry in problem.fleet.entries if entry.count is None or entry.count > MOST_DEVICES]
    search_space = SearchSpace(problem)
    for demand in problem.demands:
        # Every device serves a request a second.
        if demand.rate_rps <= MOST_DEVICES or not endless:
            continue
        most_rps = max(_most_rps(problem, search_space, demand, device) for device in endless)
        if most_rps > 0.0 and demand.rate_rps / most_rps > MOST_DEVICES:
            raise InputError(
                f"{demand.rate_rps:,.0f} requests/s of {demand.model} would take at least "
                f"{math.ceil(demand.rate_rps / most_rps):,} devices, and a plan has at most {MOST_DEVICES:,}",
                "correct rate_rps, name quicker devices with --gpus, or plan a part of the rate several times over",
            )


def _most_rps(problem: Problem, search_space: SearchSpace, demand: Demand, device: Device) -> float:
    """Return the maximum rate of the device with full batches, divided into equal shares of any one kind."""
    most = 0.0
    for share in problem.estimator.shares(demand.model, device):
        copies = 100.0 / share.sm_pct * (1 if share.mig is None else device.mig_profile(share.mig).max_count)
        for batch in search_space.listed_batches(demand.model, device, share):
            with suppress(InputError):
                estimate = problem.estimator.estimate(demand.model, device, batch, share)
                most = max(most, copies * 1000.0 * batch / planned_ms(estimate.latency_ms, problem.options.confidence))
    return most
