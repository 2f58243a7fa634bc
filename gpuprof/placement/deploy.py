"""Turns a placement into a deployment map, and measures maps for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    Replica,
    share_of,
)
from gpuprof.domain.device import Device
from gpuprof.errors import GpuprofError, PluginError
from gpuprof.placement.device_assignment import DeviceAddress, number_devices
from gpuprof.placement.feasibility import Evidence, Violation, check
from gpuprof.placement.limit import name_stop
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, Placement
from gpuprof.placement.policies import Policy
from gpuprof.placement.predict import Predictor
from gpuprof.placement.problem import Problem, collect_evidence
from gpuprof.rules.turns import list_firsts


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
    figures = measure(deployment, devices)
    predicted = MapPrediction(
        gpus=figures.gpus,
        cost_per_hour=_sum_cost(problem, placement.gpus),
        goodput_rps=figures.goodput_rps,
        internal_slack=figures.internal_slack,
        external_fragmentation=figures.external_fragmentation,
        lower_bound_gpus=placement.lower_bound_gpus,
        lower_bound_cost_per_hour=placement.lower_bound_cost_per_hour,
        upper_bound_goodput_rps=placement.upper_bound_goodput_rps,
        moves=moves,
    )
    return deployment.model_copy(update={"predicted": predicted})


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


@dataclass(frozen=True, slots=True)
class Objective:
    """Figures of a deployment map."""

    gpus: int  #: Nonempty devices.
    cost_per_hour: float
    goodput_rps: float  #: Requests per second predicted to be answered within their SLOs.
    #: 1 − Σ SMᵢ·Aᵢ / Σ SMᵢ over the replicas (ParvaGPU, SC'24, equation 3). The activity Aᵢ is the fraction of time
    #: that the replica is busy, multiplied on GPUs with a profile of it by the SM activity while busy.
    internal_slack: float
    #: 1 − Σ SMᵢ / (G·S): compute units of the used devices that belong to no replica. ParvaGPU's equation 4 prints the
    #: ratio without "1 −", while its Figure 7 and its text mean the unused part; the latter is followed.
    external_fragmentation: float
    #: ``compute_utilization``, ``memory_utilization``: USHER's Cuti and Muti (OSDI'24 §2): busy compute and held
    #: memory, as fractions of the used devices. Unknown memory is treated as none.
    compute_utilization: float
    memory_utilization: float
    fairness: float  #: Jain's index of the served fractions of the models' demands, 1.0 when all are equal.


def measure(
    deployment: DeploymentMap, devices: Mapping[str, Device], activity: Callable[[str, Replica], float] | None = None
) -> Objective:
    """Return the figures of a map.

    ``devices``: by name; gives the prices, a device without a price costs 1.0; ``activity``: (device, replica) →
    fraction of its compute units active while busy; 1.0 if omitted.
    """
    used_gpus = [gpu for node in deployment.nodes for gpu in node.gpus if any(p.replicas for p in gpu.partitions)]
    units = busy = memory = 0.0
    for name, partition in [(gpu.device, partition) for gpu in used_gpus for partition in gpu.partitions]:
        device, firsts = devices[name], list_firsts([replica.turns for replica in partition.replicas])
        for replica, is_first in zip(partition.replicas, firsts, strict=True):
            replica_units = device.fraction(share_of(partition, replica)) * device.compute_units
            units += replica_units if is_first else 0.0
            busy += replica_units * _busy(replica) * (1.0 if activity is None else activity(name, replica))
            memory += replica.memory_limit_bytes or replica.predicted.memory_bytes or 0
    all_units = sum(devices[gpu.device].compute_units for gpu in used_gpus)
    all_memory = sum(devices[gpu.device].dram_bytes for gpu in used_gpus)
    return Objective(
        gpus=len(used_gpus),
        cost_per_hour=sum(1.0 if (p := devices[g.device].price_per_hour) is None else p for g in used_gpus),
        goodput_rps=sum(replica.predicted.goodput_rps for *_, replica in deployment.places()),
        internal_slack=1.0 - busy / units if units else 0.0,
        external_fragmentation=max(0.0, 1.0 - units / all_units) if all_units else 0.0,
        compute_utilization=busy / all_units if all_units else 0.0,
        memory_utilization=memory / all_memory if all_memory else 0.0,
        fairness=jain(_satisfaction(deployment)),
    )


def jain(values: Iterable[float]) -> float:
    """Return Jain's fairness index (Σx)² / (n·Σx²), in [1/n, 1]; 1.0 when all are zero.

    Examples
    --------
    >>> jain([0.5, 0.5]), jain([1.0, 0.0])
    (1.0, 0.5)
    """
    numbers = list(values)
    squares = sum(value * value for value in numbers)
    return sum(numbers) ** 2 / (len(numbers) * squares) if squares else 1.0


def _busy(replica: Replica) -> float:
    if replica.predicted.utilization is not None:
        return min(1.0, replica.predicted.utilization)
    if not replica.predicted.throughput_rps:
        return 0.0
    return min(1.0, replica.rate_rps / replica.predicted.throughput_rps)


def _satisfaction(deployment: DeploymentMap) -> list[float]:
    goodput = dict.fromkeys(deployment.models, 0.0)
    for *_, replica in deployment.places():
        goodput[replica.model] = goodput.get(replica.model, 0.0) + replica.predicted.goodput_rps
    return [goodput[name] / model.rate_rps for name, model in deployment.models.items()]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a policy on a problem."""

    name: str  #: Name in the comparison: of the policy, or of the kind of device.
    #: None when the policy cannot work on the problem; ``reason`` then gives the cause.
    deployment: DeploymentMap | None
    objective: Objective | None
    violations: tuple[Violation, ...]  #: Rules its map breaks; a map with any must not be deployed.
    seconds: float  #: Wall-clock time of the decision.
    reason: str = ""
    has_failed: bool = False  #: Whether the policy or the estimator raised an error that it should not raise.

    @property
    def missing_rps(self) -> float:
        """Unserved requests per second."""
        return 0.0 if self.deployment is None else sum(shortfall.rate_rps for shortfall in self.deployment.unplaced)


def compare(problem: Problem, policies: Sequence[tuple[str, Policy]]) -> tuple[Outcome, ...]:
    """Run each (name, policy) on ``problem`` and return the outcomes in the same order."""
    evidence = collect_evidence(problem)
    return tuple(_outcome(problem, name, policy, evidence) for name, policy in policies)


def _outcome(problem: Problem, name: str, policy: Policy, evidence: Evidence) -> Outcome:
    started = time.perf_counter()
    try:
        placement = policy.place(problem)
        seconds = time.perf_counter() - started
        deployment = to_map(problem, placement)
    except GpuprofError as error:
        return Outcome(name, None, None, (), time.perf_counter() - started, str(error), isinstance(error, PluginError))
    except Exception as error:  # a faulty policy becomes a row of the table, so that the others' results are not lost
        reason = f"the policy failed: {type(error).__name__}: {error}"
        return Outcome(name, None, None, (), time.perf_counter() - started, reason, has_failed=True)
    violations = check(deployment, evidence)
    return Outcome(name, deployment, measure(deployment, evidence.devices), violations, seconds)
