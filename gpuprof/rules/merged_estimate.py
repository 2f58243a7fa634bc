"""Estimates of merged models: measured where the merged file was profiled, else the sum over its members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    EXTRAPOLATED,
    INTERPOLATED,
    MEASURED,
    PREDICTED,
    Estimate,
    Estimator,
    Figure,
    Workload,
    classify_source,
)
from gpuprof.domain.share import Share
from gpuprof.errors import InputError

#: Where the time of a merged model comes from when its file was not measured.
SUMMED = "sum of its models"
_MEASURED = (MEASURED, INTERPOLATED, EXTRAPOLATED)
#: The surest first.
_KINDS = (*_MEASURED, PREDICTED)


@dataclass(frozen=True, slots=True)
class MergedWork:
    """A merged model as an estimator sees it."""

    rates: Mapping[str, float]  #: Requests per second of each of its models.
    saved_weight_bytes: int = 0  #: What the models hold more when each has its own weights.
    path: Path | None = None  #: The merged file, if it is there to be found in the database.

    def rows(self, batch: int, first: Sequence[str] = ()) -> dict[str, int]:
        """Return how many of ``batch`` requests belong to each model, in proportion to their rates.

        Each model has a request as long as there are enough, those in ``first`` before others: models that are absent
        cost nothing, so that this is the slowest kind of batch of its size when the slowest models are first.
        """
        order = list(first) or sorted(self.rates, key=lambda name: (-self.rates[name], name))
        if batch <= len(order):
            return dict.fromkeys(order[:batch], 1)
        left, total = batch - len(order), sum(self.rates.values())
        exact = {name: left * self.rates[name] / total for name in order}
        rows = {name: 1 + int(exact[name]) for name in order}
        # What rounding down left over goes to the largest remainders, so that the rows add up to the batch.
        for name in sorted(order, key=lambda name: int(exact[name]) - exact[name])[: batch - sum(rows.values())]:
            rows[name] += 1
        return rows


def merged_works(deployment: DeploymentMap, base: Path) -> dict[str, MergedWork]:
    """Return the merged models of a map by name; ``base`` is where their files are looked for first."""
    rates = {replica.model: replica.rates() for *_, replica in deployment.places() if replica.merged}
    return {
        name: MergedWork(rates[name], merge.saved_weight_bytes, _find_file(base, merge.path))
        for name, merge in deployment.merges.items()
        if name in rates
    }


def _find_file(base: Path, path: str) -> Path | None:
    return next((found for found in (base / path, Path(path)) if found.is_file()), None)


class MergedEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` for merged models too.

    A batch of a merged model is so many requests of any of its models. A file that was profiled at batch b ran b
    requests of each. One that was not takes no longer than its models one after the other on the same share: that is
    what merging saves time against (USHER §3.4), so the sum of their times is a careful prediction. ``estimator``: of
    everything else.
    """

    def __init__(self, estimator: Estimator, works: Mapping[str, MergedWork]) -> None:
        self._estimator = estimator
        self._works = dict(works)

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict ``processes`` copies of ``model`` under ``share``, with ``beside`` running on the same device.

        Raises `InputError` when nothing can be said of the model or of one of its models.
        """
        apart = tuple(workload for other in beside for workload in self._split_merged(other))
        work = self._works.get(model)
        if work is None:
            return self._estimator.estimate(model, device, batch, share, apart, processes)
        whole = Workload(model, batch, share, processes)
        summed = self._sum_members(whole, work, device, apart)
        return self._apply_measured(summed, work, device, apart) or summed

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes worth considering for ``model``; of a merged one, those of its models together."""
        work = self._works.get(model)
        if work is None:
            return self._estimator.batches(model, device, share)
        each = [self._estimator.batches(name, device, share) for name in work.rates]
        return tuple(sorted({len(each) * batch for batches in each for batch in batches}))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares worth considering for ``model``; of a merged one, those of any of its models."""
        work = self._works.get(model)
        if work is None:
            return self._estimator.shares(model, device)
        found = {share for name in work.rates for share in self._estimator.shares(name, device)}
        return tuple(sorted(found, key=lambda share: (device.fraction(share), share.mig or "")))

    def _split_merged(self, workload: Workload) -> Iterator[Workload]:
        """Yield a merged neighbour as its models, each with its part of the share; any other as it is."""
        work = self._works.get(workload.model)
        if work is None:
            yield workload
            return
        rows = work.rows(workload.batch)
        for name, count in rows.items():
            part = Share(workload.share.sm_pct * count / workload.batch, workload.share.mig)
            yield Workload(name, count, part, workload.processes)

    def _sum_members(self, whole: Workload, work: MergedWork, device: Device, beside: Sequence[Workload]) -> Estimate:
        every = [self._estimator.estimate(name, device, 1, whole.share, beside, whole.processes) for name in work.rates]
        slowest_first = sorted(every, key=lambda batch: (-batch.latency_ms.value, batch.workload.model))
        parts = [
            self._estimator.estimate(name, device, rows, whole.share, beside, whole.processes)
            for name, rows in work.rows(whole.batch, [batch.workload.model for batch in slowest_first]).items()
        ]
        latency = _sum_figures([part.latency_ms for part in parts])
        slowest = max(parts, key=lambda part: part.latency_ms.value)
        return Estimate(
            workload=whole,
            device=device.name,
            latency_ms=replace(latency, source=f"{SUMMED}, {slowest.latency_ms.source}"),
            latency_cv=max(part.latency_cv for part in parts),
            pause_factor=max(part.pause_factor for part in parts),
            pause_cv=max(part.latency_cv if part.pause_cv is None else part.pause_cv for part in parts),
            memory_bytes=_sum_memory(parts, every, work),
            weight_bytes=_sum_weights(every, work),
            unknown_ops=tuple(sorted({op for part in parts for op in part.unknown_ops})),
        )

    def _apply_measured(
        self, summed: Estimate, work: MergedWork, device: Device, beside: Sequence[Workload]
    ) -> Estimate | None:
        """Return what was measured of the merged file, None where nothing was.

        Fewer requests than models: some are absent, which was not measured. Then it is the sum, and more where the
        merged file was slower than the sum with every model there.
        """
        if work.path is None:
            return None
        whole, models = summed.workload, len(work.rates)
        # The merged file at batch b ran b requests of each model, so these need a b of at least batch / models.
        rows = max(1, -(-whole.batch // models))
        try:
            measured = self._estimator.estimate(str(work.path), device, rows, whole.share, beside, whole.processes)
        except InputError:
            return None
        if classify_source(measured.latency_ms.source) not in _MEASURED:
            return None
        if whole.batch >= models:
            return replace(measured, workload=whole)
        everyone = self._sum_members(replace(whole, batch=models), work, device, beside)
        slower = max(1.0, measured.latency_ms.value / everyone.latency_ms.value)
        return replace(measured, workload=whole, latency_ms=summed.latency_ms.scale_by(slower))


def _sum_figures(figures: Sequence[Figure]) -> Figure:
    """Return the sum; the ends of its interval are the sums of the ends, known only if all are."""
    low = None if any(f.low is None for f in figures) else sum(f.low or 0.0 for f in figures)
    high = None if any(f.high is None for f in figures) else sum(f.high or 0.0 for f in figures)
    return Figure(sum(figure.value for figure in figures), figures[0].source, low, high)


def _sum_memory(parts: Sequence[Estimate], every: Sequence[Estimate], work: MergedWork) -> Figure | None:
    """Return the memory of all models, those without a request included, less the weights that they share."""
    held = {estimate.workload.model: estimate.memory_bytes for estimate in (*every, *parts)}
    figures = [figure for figure in held.values() if figure is not None]
    if len(figures) < len(held):
        return None
    largest = max(figure.value for figure in figures)
    least_sure = max(figures, key=lambda figure: _KINDS.index(classify_source(figure.source)))
    # Estimates may be too low for the weights that are taken off: the merged model still holds its largest member.
    together = max(largest, sum(f.value for f in figures) - work.saved_weight_bytes)
    return Figure(together, f"{SUMMED}, {least_sure.source}")


def _sum_weights(every: Sequence[Estimate], work: MergedWork) -> int | None:
    known = [estimate.weight_bytes for estimate in every if estimate.weight_bytes is not None]
    return sum(known) - work.saved_weight_bytes if len(known) == len(every) else None
