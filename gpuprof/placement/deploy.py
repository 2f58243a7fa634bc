"""Turns a placement into a deployment map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from gpuprof.domain.deployment import (
    DeployedModel,
    DeploymentMap,
    Gpu,
    MapPrediction,
    MigInstance,
    ModelFile,
    Node,
    Partition,
)
from gpuprof.domain.device import Device
from gpuprof.placement.device_assignment import DeviceAddress, number_devices
from gpuprof.placement.early_stop import name_stop
from gpuprof.placement.evidence import ABSOLUTE_ROUNDING
from gpuprof.placement.objective import measure
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, Placement
from gpuprof.placement.predict import Predictor
from gpuprof.placement.problem import Problem


def to_map(problem: Problem, placement: Placement, created: str | None = None) -> DeploymentMap:
    """Return the map of ``placement`` with all its predictions.

    ``created``: time of creation; without it, the same problem gives the same bytes.
    """
    addresses, moves = number_devices(problem, placement.gpus)
    predictor = Predictor(problem, [gpu for _, gpu in addresses])
    nodes = tuple(_make_nodes(addresses, problem, predictor))
    deployment = DeploymentMap(
        policy=placement.policy,
        created=created,
        planned_with=problem.planned_with.model_copy(
            update={"found_by": placement.found_by, "stopped_by": name_stop(placement)}
        ),
        models=_describe_models(problem, predictor),
        nodes=nodes,
        predicted=MapPrediction(gpus=len(placement.gpus), goodput_rps=0.0),
        unplaced=placement.unplaced,
        chains=dict(problem.chains),
    )
    devices = {entry.device.name: entry.device for entry in problem.fleet.entries}
    figures, bounds = measure(deployment, devices), _drop_refuted_bounds(problem, placement)
    predicted = MapPrediction(
        gpus=figures.gpus,
        cost_per_hour=_sum_cost(problem, placement.gpus),
        goodput_rps=figures.goodput_rps,
        internal_slack=figures.internal_slack,
        external_fragmentation=figures.external_fragmentation,
        lower_bound_gpus=bounds.lower_bound_gpus,
        lower_bound_cost_per_hour=bounds.lower_bound_cost_per_hour,
        upper_bound_goodput_rps=bounds.upper_bound_goodput_rps,
        moves=moves,
    )
    return deployment.model_copy(update={"predicted": predicted})


def _drop_refuted_bounds(problem: Problem, placement: Placement) -> Placement:
    """Return the placement without the bounds it refutes itself."""
    gpus, cost, bound_rps = (
        placement.lower_bound_gpus,
        placement.lower_bound_cost_per_hour,
        placement.upper_bound_goodput_rps,
    )
    if not placement.unplaced:
        own_cost = sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
        gpus = None if gpus is not None and gpus > len(placement.gpus) else gpus
        cost = None if cost is not None and cost > own_cost * (1.0 + ABSOLUTE_ROUNDING) else cost
    served_rps = sum(placement.rates_rps().values())
    bound_rps = None if bound_rps is not None and served_rps > bound_rps * (1.0 + ABSOLUTE_ROUNDING) else bound_rps
    return replace(placement, lower_bound_gpus=gpus, lower_bound_cost_per_hour=cost, upper_bound_goodput_rps=bound_rps)


def _make_nodes(
    addresses: Sequence[tuple[DeviceAddress, PlacedGpu]], problem: Problem, predictor: Predictor
) -> Iterator[Node]:
    for name, group in groupby(addresses, key=lambda pair: pair[0].node):
        gpus = [_make_gpu(address.index, gpu, problem.device(gpu.device), predictor) for address, gpu in group]
        yield Node(name=name, gpus=tuple(gpus))


def _make_gpu(index: int, placed: PlacedGpu, device: Device, predictor: Predictor) -> Gpu:
    sorted_partitions = sorted(placed.partitions, key=lambda partition: partition.start or 0)
    partitions = tuple(_make_partition(partition, device, predictor) for partition in sorted_partitions)
    return Gpu(index=index, device=placed.device, partitions=partitions)


def _make_partition(placed: PlacedPartition, device: Device, predictor: Predictor) -> Partition:
    mig = None if placed.mig is None else MigInstance(profile=placed.mig, start=placed.start or 0)
    return Partition(
        mig=mig,
        replicas=predictor.replicas(device, placed),
        unshared=placed.unshared,
        oversubscribed=placed.oversubscribed,
    )


def _describe_models(problem: Problem, predictor: Predictor) -> dict[str, DeployedModel]:
    models = {}
    for demand in problem.demands:
        file = problem.files.get(demand.model, ModelFile())
        models[demand.model] = DeployedModel(
            path=file.path,
            sha256=file.sha256,
            source_model=demand.source_model,
            dims=demand.dims,
            rate_rps=demand.rate_rps,
            slo_ms=demand.slo.latency_ms,
            percentile=demand.slo.percentile,
            predicted=predictor.model(demand.model),
            members=dict(file.members),
            saved_weight_bytes=file.saved_weight_bytes,
        )
    return models


def _sum_cost(problem: Problem, gpus: Sequence[PlacedGpu]) -> float | None:
    """Return the cost per hour; None when some used device has no price."""
    prices = [problem.device(gpu.device).price_per_hour for gpu in gpus]
    return None if None in prices else sum(price for price in prices if price is not None)
