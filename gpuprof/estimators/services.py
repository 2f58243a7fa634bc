"""Estimates for services: several of them may run one model, each with its own rate, SLO and priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Workload
from gpuprof.domain.failure import TriedRuns
from gpuprof.domain.share import Share


class ServiceEstimator:
    """Answers for services what an estimator says of the models that they run.

    Parameters
    ----------
    models : Estimator
    sources : mapping of str to str
        Service → name of its model; what is not named is a model itself.
    """

    def __init__(self, models: Estimator, sources: Mapping[str, str]) -> None:
        self._models = models
        self._sources = dict(sources)

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict a service; see `gpuprof.domain.estimate.Estimator`.

        Raises
        ------
        InputError
            For a model, batch or share of which nothing can be said.
        """
        others = sorted(replace(one, model=self._source(one.model)) for one in beside)
        found = self._models.estimate(self._source(model), device, batch, share, others, processes)
        return replace(found, workload=replace(found.workload, model=model))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes worth considering for a service."""
        return self._models.batches(self._source(model), device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares worth considering for a service."""
        return self._models.shares(self._source(model), device)

    def _source(self, service: str) -> str:
        return self._sources.get(service, service)


def name_services(estimator: Estimator, sources: Mapping[str, str]) -> Estimator:
    """Return the estimator for services; itself where every service is called as its model."""
    renamed = {service: model for service, model in sources.items() if service != model}
    return ServiceEstimator(estimator, renamed) if renamed else estimator


def name_tried_services(tried: TriedRuns, sources: Mapping[str, str]) -> TriedRuns:
    """Return what was tried of the models as what is known of the services that run them."""
    services: dict[str, list[str]] = {}
    for service, model in sources.items():
        services.setdefault(model, []).append(service)

    def rename_workload(workload: Workload) -> list[Workload]:
        return [replace(workload, model=one) for one in services.get(workload.model, [workload.model])]

    return TriedRuns(
        tuple(replace(one, workload=own) for one in tried.failed for own in rename_workload(one.workload)),
        frozenset((device, own) for device, workload in tried.measured for own in rename_workload(workload)),
    )
