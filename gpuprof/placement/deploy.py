"""Turns a placement into a deployment map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuprof.deployment import DeployedModel, DeploymentMap, Gpu, MapPrediction, MigPlace, Node, Partition
from gpuprof.device import Device
from gpuprof.placement.objective import measure
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, Placement
from gpuprof.placement.predict import Predictor
from gpuprof.placement.problem import ModelFile, Problem


def to_map(problem: Problem, placement: Placement, created: str | None = None) -> DeploymentMap:
    """Return the map of ``placement`` with everything that is predicted of it.

    Parameters
    ----------
    problem : Problem
    placement : Placement
    created : str, optional
        Time of making; left out, the same problem gives the same bytes.
    """
    predictor = Predictor(problem)
    nodes = tuple(_nodes(problem, placement.gpus, predictor))
    drawn = DeploymentMap(
        policy=placement.policy,
        created=created,
        inputs=dict(problem.inputs),
        models=_models(problem, predictor),
        nodes=nodes,
        predicted=MapPrediction(gpus=len(placement.gpus), goodput_rps=0.0),
        unplaced=placement.unplaced,
    )
    devices = {entry.device.name: entry.device for entry in problem.fleet.entries}
    figures = measure(drawn, devices)
    predicted = MapPrediction(
        gpus=figures.gpus,
        cost_per_hour=_cost(problem, placement.gpus),
        goodput_rps=figures.goodput_rps,
        internal_slack=figures.internal_slack,
        external_fragmentation=figures.external_fragmentation,
        lower_bound_gpus=placement.lower_bound_gpus,
        lower_bound_cost_per_hour=placement.lower_bound_cost_per_hour,
    )
    return drawn.model_copy(update={"predicted": predicted})


def _nodes(problem: Problem, gpus: Sequence[PlacedGpu], predictor: Predictor) -> Iterator[Node]:
    """Yield machines of one kind of device each; a CPU is a machine of its own."""
    number = 0
    for entry in problem.fleet.entries:
        own = [gpu for gpu in gpus if gpu.device == entry.device.name]
        size = 1 if entry.device.kind == "cpu" else problem.options.gpus_per_node
        for first in range(0, len(own), size):
            drawn = [_gpu(i, gpu, entry.device, predictor) for i, gpu in enumerate(own[first : first + size])]
            yield Node(name=f"node{number}", gpus=tuple(drawn))
            number += 1


def _gpu(index: int, placed: PlacedGpu, device: Device, predictor: Predictor) -> Gpu:
    partitions = tuple(_partition(partition, device, predictor) for partition in placed.partitions)
    return Gpu(index=index, device=placed.device, partitions=partitions)


def _partition(placed: PlacedPartition, device: Device, predictor: Predictor) -> Partition:
    mig = None if placed.mig is None else MigPlace(profile=placed.mig, start=placed.start or 0)
    replicas = tuple(predictor.replica(device, one, placed.beside(one)) for one in placed.replicas)
    return Partition(mig=mig, replicas=replicas)


def _models(problem: Problem, predictor: Predictor) -> dict[str, DeployedModel]:
    models = {}
    for demand in problem.demands:
        file = problem.files.get(demand.model, ModelFile())
        models[demand.model] = DeployedModel(
            path=file.path,
            sha256=file.sha256,
            rate_rps=demand.rate_rps,
            slo_ms=demand.slo.latency_ms,
            percentile=demand.slo.percentile,
            predicted=predictor.model(demand.model),
        )
    return models


def _cost(problem: Problem, gpus: Sequence[PlacedGpu]) -> float | None:
    """Return the cost for an hour; None when some device used has no price."""
    prices = [problem.device(gpu.device).price_per_hour for gpu in gpus]
    return None if None in prices else sum(price for price in prices if price is not None)
