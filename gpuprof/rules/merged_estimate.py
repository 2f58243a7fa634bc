"""Estimates of merged models: measurements of the merged file, else sums over its members."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuprof.domain.deployment import ModelFile
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    EXTRAPOLATED,
    INTERPOLATED,
    MEASURED,
    SOURCE_KINDS,
    Estimate,
    Estimator,
    Figure,
    Workload,
    classify_source,
)
from gpuprof.domain.share import Share
from gpuprof.errors import InputError

#: Source of a merged model's time where its file was not measured.
SUMMED = "sum of its models"
_MEASURED = (MEASURED, INTERPOLATED, EXTRAPOLATED)
#: Classes of sources, the most certain first.


@dataclass(frozen=True, slots=True)
class MergedWork:
    """A merged model as estimators see it: its members' rates, the saved weight bytes, and its file."""

    rates: Mapping[str, float]  #: Requests per second of each member.
    saved_weight_bytes: int = 0  #: Additional bytes of separate weights for each member.
    path: Path | None = None  #: The merged file, if present, for look-ups in the database.

    def rows(self, batch: int, first: Sequence[str] = ()) -> dict[str, int]:
        """Return the number of requests of each model in a batch of ``batch``, in proportion to the rates.

        Each model has at least a request if there are enough, models in ``first`` before others. Absent models cost
        nothing, so with the slowest models first this is the slowest batch of its size.
        """
        order = list(first) or sorted(self.rates, key=lambda name: (-self.rates[name], name))
        if batch <= len(order):
            return dict.fromkeys(order[:batch], 1)
        remainder, total = batch - len(order), sum(self.rates.values())
        exact = {name: remainder * self.rates[name] / total for name in order}
        rows = {name: 1 + int(exact[name]) for name in order}
        # The rest after rounding down goes to the largest remainders, so that the rows add up to the batch.
        for name in sorted(order, key=lambda name: int(exact[name]) - exact[name])[: batch - sum(rows.values())]:
            rows[name] += 1
        return rows


def estimate_merged(estimator: Estimator, files: Mapping[str, ModelFile]) -> Estimator:
    """Return ``estimator``, with estimates of the merged models among ``files`` if there are any."""
    works = {
        name: MergedWork(
            {member: request.rate_rps for member, request in model.members.items()},
            model.saved_weight_bytes,
            None if model.path is None else Path(model.path),
        )
        for name, model in files.items()
        if model.members
    }
    return MergedEstimator(estimator, works) if works else estimator


class MergedEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` for merged models too.

    A batch of a merged model holds requests of any of its members. A file profiled at batch b ran b requests of each
    member. An unprofiled file is predicted by the sum of its members' times on the same share. The sum is conservative:
    merging saves time over sequential execution (USHER §3.4). ``estimator``: estimator of all other models.
    """

    def __init__(self, estimator: Estimator, works: Mapping[str, MergedWork]) -> None:
        self._estimator = estimator
        self._works = dict(works)

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict ``processes`` copies of ``model`` under ``share``, with neighbours ``beside`` on the same device.

        Raises `InputError` when the model or a member has no possible estimate.
        """
        neighbours = tuple(workload for neighbour in beside for workload in self._split_merged(neighbour))
        work = self._works.get(model)
        if work is None:
            return self._estimator.estimate(model, device, batch, share, neighbours, processes)
        whole = Workload(model, batch, share, processes)
        summed = self._sum_members(whole, work, device, neighbours)
        return self._apply_measured(summed, work, device, neighbours) or summed

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the candidate batch sizes for ``model``; for a merged model, its members' sizes times their number."""
        work = self._works.get(model)
        if work is None:
            return self._estimator.batches(model, device, share)
        member_batches = [self._estimator.batches(name, device, share) for name in work.rates]
        return tuple(sorted({len(member_batches) * batch for batches in member_batches for batch in batches}))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the candidate shares for ``model``; for a merged model, the shares of any member."""
        work = self._works.get(model)
        if work is None:
            return self._estimator.shares(model, device)
        shares = {share for name in work.rates for share in self._estimator.shares(name, device)}
        return tuple(sorted(shares, key=lambda share: (device.fraction(share), share.mig or "")))

    def _split_merged(self, workload: Workload) -> Iterator[Workload]:
        """Yield the members of a merged neighbour, each with its part of the share; other neighbours unchanged."""
        work = self._works.get(workload.model)
        if work is None:
            yield workload
            return
        rows = work.rows(workload.batch)
        for name, count in rows.items():
            part = Share(workload.share.sm_pct * count / workload.batch, workload.share.mig)
            yield Workload(name, count, part, workload.processes)

    def _sum_members(self, whole: Workload, work: MergedWork, device: Device, beside: Sequence[Workload]) -> Estimate:
        items = [self._estimator.estimate(name, device, 1, whole.share, beside, whole.processes) for name in work.rates]
        slowest_first = sorted(items, key=lambda batch: (-batch.latency_ms.value, batch.workload.model))
        parts = [
            self._estimator.estimate(name, device, rows, whole.share, beside, whole.processes)
            for name, rows in work.rows(whole.batch, [batch.workload.model for batch in slowest_first]).items()
        ]
        ends = [(part.latency_ms.low, part.latency_ms.high) for part in parts]
        low, high = (
            None if None in side else math.fsum(end or 0.0 for end in side) for side in zip(*ends, strict=True)
        )
        weights = [part.weight_bytes for part in items if part.weight_bytes is not None]
        slowest = max(parts, key=lambda part: part.latency_ms.value)
        return Estimate(
            workload=whole,
            device=device.name,
            latency_ms=Figure(
                math.fsum(part.latency_ms.value for part in parts), f"{SUMMED}, {slowest.latency_ms.source}", low, high
            ),
            latency_cv=max(part.latency_cv for part in parts),
            pause_factor=max(part.pause_factor for part in parts),
            pause_cv=max(part.latency_cv if part.pause_cv is None else part.pause_cv for part in parts),
            memory_bytes=_sum_memory(parts, items, work),
            weight_bytes=sum(weights) - work.saved_weight_bytes if len(weights) == len(items) else None,
            unknown_ops=tuple(sorted({op for part in parts for op in part.unknown_ops})),
        )

    def _apply_measured(
        self, summed: Estimate, work: MergedWork, device: Device, beside: Sequence[Workload]
    ) -> Estimate | None:
        """Return the estimate from measurements of the merged file, None without measurements.

        Batches with fewer requests than models take at most the time of one request of each.
        """
        if work.path is None:
            return None
        # The merged file at batch b ran b requests of each model, so b must be at least batch / models.
        whole = summed.workload
        rows = -(-whole.batch // len(work.rates))
        try:
            measured = self._estimator.estimate(str(work.path), device, rows, whole.share, beside, whole.processes)
        except InputError:
            return None
        if classify_source(measured.latency_ms.source) not in _MEASURED:
            return None
        return replace(measured, workload=whole)


def _sum_memory(parts: Sequence[Estimate], items: Sequence[Estimate], work: MergedWork) -> Figure | None:
    """Return the memory of all members, including those without a request, minus their shared weights."""
    memory_by_model = {estimate.workload.model: estimate.memory_bytes for estimate in (*items, *parts)}
    figures = [figure for figure in memory_by_model.values() if figure is not None]
    if len(figures) < len(memory_by_model):
        return None
    largest = max(figure.value for figure in figures)
    least_sure = max(figures, key=lambda figure: SOURCE_KINDS.index(classify_source(figure.source)))
    # Underestimates less the saved weights could be too small: the merged model holds at least its largest member.
    total_bytes = max(largest, sum(f.value for f in figures) - work.saved_weight_bytes)
    return Figure(total_bytes, f"{SUMMED}, {least_sure.source}")
