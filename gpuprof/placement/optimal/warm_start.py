"""Warm start from the running map: its replicas at the present rates."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import DeploymentMap, Partition, share_of
from gpuprof.domain.device import Device
from gpuprof.domain.fleet import Fleet
from gpuprof.domain.mig import is_legal, make_placement
from gpuprof.errors import InputError
from gpuprof.placement.bin import MPS_CLIENTS
from gpuprof.placement.cover import share_out_rate
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The part of an older map that can go on running."""

    gpus: tuple[PlacedGpu, ...]
    #: The remaining demands on the remaining devices; None when the map serves everything.
    rest: Problem | None


def make_warm_start(problem: Problem, segments: Segments, previous: DeploymentMap, freed: int = 0) -> WarmStart | None:
    """Return the older map at the present rates, without dispensable devices; None where it is not sound.

    Parameters
    ----------
    freed : int
        Number of further devices to leave out, the idlest first: their requests are placed anew together with the
        unserved requests, which may take fewer devices than both apart.
    """
    try:
        old = list(_list_previous_gpus(problem, previous))
    except InputError:
        return None
    # Keyed by identity: equal replicas on different devices are different replicas.
    found = {id(one): segment for gpu in old for one, segment in _segments(problem, segments, gpu)}
    needed = _drop_unneeded(problem, _within_fleet(problem, old), found)
    gpus = _share_out_rates(problem, _drop_least_used(problem, needed, found, freed), found)
    if not all(_is_sound(problem, segments, gpu) for gpu in gpus):
        return None
    return WarmStart(tuple(gpus), _remaining_problem(problem, gpus))


def keep_previous_gpus(problem: Problem, segments: Segments, previous: DeploymentMap) -> tuple[PlacedGpu, ...]:
    """Return the replicas that may go on running, each model's rate divided evenly; empty where the map is not sound.

    SLOs are not checked.
    """
    try:
        old = _within_fleet(problem, list(_list_previous_gpus(problem, previous)))
        counts = Counter(one.model for gpu in old for one in gpu.replicas())
        if any(counts[one.model] > one.max_replicas for one in problem.demands if one.max_replicas is not None):
            return ()
        rated = {
            id(one): replace(
                one,
                rate_rps=problem.demand(one.model).rate_rps / counts[one.model],
                memory_bytes=segments.memory_bytes(segments.estimate(problem.device(gpu.device), one.workload)),
            )
            for gpu in old
            for one in gpu.replicas()
        }
    except InputError:
        return ()
    gpus = tuple(_with_rates(gpu, rated) for gpu in old)
    return gpus if all(_fits_rules(problem, segments, gpu) for gpu in gpus) else ()


def _fits_rules(problem: Problem, segments: Segments, gpu: PlacedGpu) -> bool:
    """Return whether a device's configuration and contents are legal, and its replicas within the options."""
    device, options = problem.device(gpu.device), problem.options
    instances = [part for part in gpu.partitions if part.mig is not None]
    planned = all(
        one.batch <= options.max_batch
        and one.processes <= segments.search_space.processes(one.share)[-1]
        and not one.max_wait_ms
        for one in gpu.replicas()
    )
    whole = len(instances) == len(gpu.partitions) or len(gpu.partitions) == 1
    legal = is_legal(device, [make_placement(device, str(part.mig), part.start or 0) for part in instances])
    return planned and whole and legal and all(_fits(device, part) for part in gpu.partitions)


def balance_rates(problem: Problem, segments: Segments, gpus: Sequence[PlacedGpu]) -> tuple[PlacedGpu, ...]:
    """Return a map with each model's rate divided by the capacities of its replicas.

    The map stays as it is where an SLO would break, or where its rates exceed the known capacities.
    """
    # Equal devices may be the same object, and replicas are compared by identity.
    gpus = [_copy_replicas(gpu) for gpu in gpus]
    by_replica = {id(one): segment for gpu in gpus for one, segment in _segments(problem, segments, gpu)}
    if len(by_replica) < sum(1 for gpu in gpus for _ in gpu.replicas()):
        return tuple(gpus)
    even = _share_out_rates(problem, gpus, by_replica)
    serves_all = _total_rate_rps(even) >= _total_rate_rps(gpus) * (1.0 - _EPSILON)
    return tuple(even if serves_all and all(_is_sound(problem, segments, gpu) for gpu in even) else gpus)


def _total_rate_rps(gpus: Sequence[PlacedGpu]) -> float:
    return math.fsum(one.rate_rps for gpu in gpus for one in gpu.replicas())


def _copy_replicas(gpu: PlacedGpu) -> PlacedGpu:
    """Return the device with replica objects of its own."""
    parts = (replace(part, replicas=tuple(replace(one) for one in part.replicas)) for part in gpu.partitions)
    return PlacedGpu(gpu.device, tuple(parts))


def _list_previous_gpus(problem: Problem, previous: DeploymentMap) -> Iterator[PlacedGpu]:
    kinds = {entry.device.name for entry in problem.fleet.entries}
    asked = {demand.model for demand in problem.demands}
    for node in previous.nodes:
        for gpu in node.gpus:
            parts = tuple(_old_partition(part, asked) for part in gpu.partitions)
            kept = tuple(part for part in parts if part.replicas)
            if gpu.device in kinds and kept:
                yield PlacedGpu(gpu.device, kept)


def _old_partition(partition: Partition, asked: set[str]) -> PlacedPartition:
    replicas = tuple(
        PlacedReplica(one.model, one.batch, one.processes, share_of(partition, one), 0.0, one.max_wait_ms)
        for one in partition.replicas
        if one.model in asked
    )
    mig = partition.mig
    return PlacedPartition(replicas, None if mig is None else mig.profile, None if mig is None else mig.start)


def _segments(problem: Problem, segments: Segments, gpu: PlacedGpu) -> Iterator[tuple[PlacedReplica, Segment]]:
    """Yield the segment of each replica that still keeps its SLO and obeys the options."""
    device, options = problem.device(gpu.device), problem.options
    for replica in gpu.replicas():
        most = segments.search_space.processes(replica.share)[-1]
        if replica.batch > options.max_batch or replica.processes > most or replica.max_wait_ms:
            continue  # replicas waiting for full batches are no longer planned
        segment = segments.make(problem.demand(replica.model), device, replica.workload)
        if segment is not None:
            yield replica, segment


def _drop_least_used(
    problem: Problem, gpus: list[PlacedGpu], by_replica: Mapping[int, Segment], freed: int
) -> list[PlacedGpu]:
    """Return the devices without the ``freed`` devices of the highest unused price."""
    offered = _capacity(gpus, by_replica)
    busy = {model: min(1.0, problem.demand(model).rate_rps / offered[model]) for model in offered}
    prices = {entry.device.name: entry.price_per_hour for entry in problem.fleet.entries}

    def idle(gpu: PlacedGpu) -> float:
        known = [(replica.model, by_replica[id(replica)]) for replica in gpu.replicas() if id(replica) in by_replica]
        return prices[gpu.device] * (1.0 - math.fsum(segment.fraction * busy[model] for model, segment in known))

    left_out = {id(gpu) for gpu in sorted(gpus, key=idle, reverse=True)[:freed]}
    return [gpu for gpu in gpus if id(gpu) not in left_out]


def _within_fleet(problem: Problem, gpus: Sequence[PlacedGpu]) -> list[PlacedGpu]:
    free = {entry.device.name: math.inf if entry.count is None else entry.count for entry in problem.fleet.entries}
    kept = []
    for gpu in gpus:
        if free[gpu.device] > 0:
            free[gpu.device] -= 1
            kept.append(gpu)
    return kept


def _drop_unneeded(problem: Problem, gpus: list[PlacedGpu], by_replica: Mapping[int, Segment]) -> list[PlacedGpu]:
    """Leave out devices, those of least capacity first, as long as the others serve as much."""
    offered = _capacity(gpus, by_replica)
    asked = {model: min(problem.demand(model).rate_rps, offered[model]) for model in offered}

    def spare(gpu: PlacedGpu) -> bool:
        own = _capacity([gpu], by_replica)
        return all(offered[model] - own[model] >= asked[model] * (1.0 - _EPSILON) for model in own)

    kept = list(gpus)
    prices = {entry.device.name: entry.price_per_hour for entry in problem.fleet.entries}
    for gpu in sorted(gpus, key=lambda one: (-prices[one.device], sum(_capacity([one], by_replica).values()))):
        if spare(gpu):
            for model, capacity in _capacity([gpu], by_replica).items():
                offered[model] -= capacity
            kept = [one for one in kept if one is not gpu]
    return kept


def _capacity(gpus: Sequence[PlacedGpu], by_replica: Mapping[int, Segment]) -> defaultdict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for gpu in gpus:
        for replica in gpu.replicas():
            if id(replica) in by_replica:
                total[replica.model] += by_replica[id(replica)].capacity_rps
    return total


def _share_out_rates(problem: Problem, gpus: Sequence[PlacedGpu], by_replica: Mapping[int, Segment]) -> list[PlacedGpu]:
    """Divide the present rates among the replicas; leave out replicas without capacity."""
    able: defaultdict[str, list[PlacedReplica]] = defaultdict(list)
    for gpu in gpus:
        for replica in gpu.replicas():
            if id(replica) in by_replica:
                able[replica.model].append(replica)
    rated: dict[int, PlacedReplica] = {}
    for model, replicas in able.items():
        demand = problem.demand(model)
        chosen = replicas[: demand.max_replicas]
        cover = share_out_rate(demand.rate_rps, [by_replica[id(one)] for one in chosen])
        for one, (segment, rate) in zip(chosen, cover.parts, strict=True):
            rated[id(one)] = replace(one, rate_rps=rate, memory_bytes=segment.memory_bytes)
    return [kept for gpu in gpus if (kept := _with_rates(gpu, rated)).partitions]


def _with_rates(gpu: PlacedGpu, rated: Mapping[int, PlacedReplica]) -> PlacedGpu:
    parts = (
        replace(part, replicas=tuple(rated[id(one)] for one in part.replicas if id(one) in rated))
        for part in gpu.partitions
    )
    return PlacedGpu(gpu.device, tuple(part for part in parts if part.replicas))


def _is_sound(problem: Problem, segments: Segments, gpu: PlacedGpu) -> bool:
    device = problem.device(gpu.device)
    instances = [part for part in gpu.partitions if part.mig is not None]
    if len(instances) != len(gpu.partitions) and len(gpu.partitions) > 1:
        return False
    if not is_legal(device, [make_placement(device, str(part.mig), part.start or 0) for part in instances]):
        return False
    return all(_fits(device, part) and segments.holds(device, part) for part in gpu.partitions)


def _fits(device: Device, partition: PlacedPartition) -> bool:
    capacity = device.memory_bytes(partition.replicas[0].share)
    return (
        math.fsum(one.share.sm_pct for one in partition.replicas) <= 100.0 + _EPSILON
        and sum(one.processes for one in partition.replicas) <= MPS_CLIENTS
        and sum(one.memory_bytes or 0 for one in partition.replicas) <= capacity
    )


def _remaining_problem(problem: Problem, gpus: Sequence[PlacedGpu]) -> Problem | None:
    """Return the problem of the remaining demands, None when nothing remains."""
    served: defaultdict[str, float] = defaultdict(float)
    replicas = Counter(one.model for gpu in gpus for one in gpu.replicas())
    for gpu in gpus:
        for one in gpu.replicas():
            served[one.model] += one.rate_rps
    demands = tuple(
        rest
        for demand in problem.demands
        if (rest := _remaining_demand(demand, served[demand.model], replicas[demand.model])) is not None
    )
    used = Counter(gpu.device for gpu in gpus)
    entries = tuple(
        replace(entry, count=None if entry.count is None else entry.count - used[entry.device.name])
        for entry in problem.fleet.entries
    )
    fleet = Fleet(tuple(entry for entry in entries if entry.count != 0))
    if not demands or not fleet.entries:
        return None
    # Without the older map: planning the rest would start from it again.
    return replace(problem, demands=demands, fleet=fleet, previous=None)


def _remaining_demand(demand: Demand, served_rps: float, replicas: int) -> Demand | None:
    """Return the remainder of a demand, None when nothing remains or no more replicas are allowed."""
    if served_rps >= demand.rate_rps * (1.0 - _EPSILON):
        return None
    allowed = None if demand.max_replicas is None else demand.max_replicas - replicas
    if allowed == 0:
        return None
    floor = demand.min_goodput_rps
    return replace(
        demand,
        rate_rps=demand.rate_rps - served_rps,
        max_replicas=allowed,
        min_goodput_rps=None if floor is None else max(0.0, floor - served_rps),
    )
