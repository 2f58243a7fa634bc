"""Estimates for services: several services may run one model, each with its own rate, SLO, priority and sizes.

The requests of a service may have several sizes. The router keeps different sizes in separate batches, so ``b``
requests form a batch for each size among them. Their time is taken as the sum of these batches, one after another: an
upper bound for the router, which under load fills each batch with a single size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    Estimate,
    Estimator,
    Figure,
    TriedRuns,
    Workload,
    batch_times,
    board_work,
    rename_workloads,
)
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import name_parts
from gpuprof.estimators.measured.surface import blend_figures


class ServiceEstimator:
    """Estimates services by an estimator of their models.

    ``sources``: service → name of its model, followed by sizes or their distribution
    (`gpuprof.domain.sizes.mixed_name`); other names are models themselves.
    """

    def __init__(self, models: Estimator, sources: Mapping[str, str]) -> None:
        self._models = models
        self._sources = dict(sources)

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict a service; see `gpuprof.domain.estimate.Estimator`.

        Raises `InputError` for a model, batch or share without an estimate.
        """
        neighbours = sorted(
            replace(neighbour, model=_largest_part(self.source_of(neighbour.model))) for neighbour in beside
        )
        parts = name_parts(self.source_of(model))
        if len(parts) == 1:
            estimate = self._models.estimate(parts[0][0], device, batch, share, neighbours, processes)
        else:

            def at(name: str, rows: int) -> Estimate:
                return self._models.estimate(name, device, rows, share, neighbours, processes)

            estimate = _mix_estimates(parts, at, Workload(model, batch, share, processes))
        return replace(estimate, workload=replace(estimate.workload, model=model))

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the times of a service at each of the batches. Raises `InputError` as `estimate` does."""
        parts = name_parts(self.source_of(model))
        if len(parts) == 1:
            return batch_times(self._models, parts[0][0], device, batches, share, processes)
        return tuple(self.estimate(model, device, batch, share, (), processes).latency_ms for batch in batches)

    def board_work_ms(self, model: str, device: Device) -> Figure | None:
        """Return the mean board work of a service's request over its sizes; None where that of any size is unknown."""
        each = [(board_work(self._models, name, device), part) for name, part in name_parts(self.source_of(model))]
        if any(work is None for work, _ in each):
            return None
        return blend_figures([(work, part) for work, part in each if work is not None])

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes worth considering for a service."""
        parts = name_parts(self.source_of(model))
        return tuple(sorted({batch for name, _ in parts for batch in self._models.batches(name, device, share)}))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares worth considering for a service."""
        (first, _), *rest = name_parts(self.source_of(model))
        shares = self._models.shares(first, device)
        parts = [set(self._models.shares(name, device)) for name, _ in rest]
        return tuple(share for share in shares if all(share in part for part in parts)) or shares

    def source_of(self, name: str) -> str:
        """Return the name of a service's model, with its sizes."""
        return self._sources.get(name, name)


def _largest_part(name: str) -> str:
    """Return the most frequent size of a distribution, taken as the size of neighbours."""
    return max(name_parts(name), key=lambda part: part[1])[0]


@dataclass(frozen=True, slots=True)
class _SizeTerm:
    """Contribution of a size to a batch's worth of requests: its probability of being present, and its batch's time."""

    present: float
    latency: Figure
    cv: float
    estimates: tuple[Estimate, ...]


def _size_term(part: float, batch: int, at: Callable[[int], Estimate]) -> _SizeTerm:
    """Return the term of the size of a ``part`` of ``batch`` requests.

    The size is present with probability ``1 - (1 - part)^batch``, then with ``batch part`` over that many requests on
    average; times between two whole batches are interpolated linearly.
    """
    present = 1.0 - (1.0 - part) ** batch
    rows = min(float(batch), max(1.0, batch * part / present))
    below = math.floor(rows)
    estimates = [at(below)] + ([at(below + 1)] if rows > below else [])
    weights = [1.0 - (rows - below), rows - below]
    ends = list(zip(estimates, weights, strict=False))
    latency = Figure(
        sum(weight * end.latency_ms.value for end, weight in ends),
        estimates[0].latency_ms.source,
        sum(w * (end.latency_ms.value if end.latency_ms.low is None else end.latency_ms.low) for end, w in ends),
        sum(weight * end.latency_ms.upper() for end, weight in ends),
    )
    return _SizeTerm(present, latency, max(estimate.latency_cv for estimate in estimates), tuple(estimates))


def _mix_estimates(
    parts: Sequence[tuple[str, float]], at: Callable[[str, int], Estimate], workload: Workload
) -> Estimate:
    """Return the estimate of a batch's worth of requests of several sizes, from each size's estimates at a batch.

    Numbers of different sizes are taken as independent, which slightly overstates the spread; for single requests the
    spread is exact. Memory is that of the largest size.
    """
    terms = [_size_term(part, workload.batch, partial(at, name)) for name, part in parts]
    value = math.fsum(term.present * term.latency.value for term in terms)
    second = math.fsum(term.present * term.latency.value**2 * (1.0 + term.cv**2) for term in terms)
    squares = [(term.present * term.latency.value) ** 2 for term in terms]
    variance = second - (value**2 if workload.batch == 1 else math.fsum(squares))
    estimates = [estimate for term in terms for estimate in term.estimates]
    has_interval = any(estimate.latency_ms.low is not None for estimate in estimates)
    low = math.fsum(term.present * (term.latency.low or 0.0) for term in terms)
    high = math.fsum(term.present * term.latency.upper() for term in terms)
    return replace(
        max(estimates, key=lambda estimate: estimate.latency_ms.value),
        workload=workload,
        latency_ms=Figure(
            value,
            " and ".join(dict.fromkeys(estimate.latency_ms.source for estimate in estimates)),
            low if has_interval else None,
            high if has_interval else None,
        ),
        latency_cv=math.sqrt(max(0.0, variance)) / value,
        pause_factor=max(estimate.pause_factor for estimate in estimates),
        pause_cv=None,
        memory_bytes=max(
            (estimate.memory_bytes for estimate in estimates if estimate.memory_bytes), key=Figure.upper, default=None
        ),
    )


def name_services(estimator: Estimator, sources: Mapping[str, str]) -> Estimator:
    """Return the estimator for services; unchanged where every service has its model's name."""
    renamed = {service: model for service, model in sources.items() if service != model}
    return ServiceEstimator(estimator, renamed) if renamed else estimator


def name_tried_services(tried: TriedRuns, sources: Mapping[str, str]) -> TriedRuns:
    """Return the measured and failed runs of the models as runs of their services."""
    services: dict[str, list[str]] = {}
    mixed: dict[str, list[str]] = {}
    for service, model in sources.items():
        parts = name_parts(model)
        for name, _ in parts:
            (services if len(parts) == 1 else mixed).setdefault(name, []).append(service)

    def list_services(model: str) -> list[str]:
        return services.get(model) or [model]

    def list_all(model: str) -> list[str]:
        return [*services.get(model, ()), *mixed.get(model, ())] or [model]

    # Groups that ran matter only against groups that failed: a thousand services have a million pairs.
    together = tried.together if any(group.beside for group in tried.failed) else frozenset()
    # A service of several sizes fails where any size fails; a successful size proves nothing for the others.
    return TriedRuns(
        tuple(run for group in tried.failed for run in group.rename(list_all)),
        frozenset(
            (device, workload)
            for device, key in tried.measured
            for (workload,) in rename_workloads((key,), list_services)
        ),
        frozenset(
            (device, tuple(sorted(named))) for device, ran in together for named in rename_workloads(ran, list_services)
        ),
    )
