"""Explains the batch, share, device and neighbours of a model in a map, and the effect of changed demands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeploymentMap, Partition, Replica, share_of
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, queue_of
from gpuprof.errors import InputError
from gpuprof.placement.evidence import ask_estimator, neighbour_workloads, replica_workload
from gpuprof.placement.placement import Placement
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.policies import Policy
from gpuprof.placement.pool import Pools
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import PooledSegments, Segment, Segments
from gpuprof.rules.turns import find_mean_waits, held_shares, load_replica

#: Relative change of rate and SLO in the what-ifs.
CHANGE = 0.10

_Kind = tuple[str, float, str | None]  # device, percent, MIG profile
TOGETHER = "measured together"
TURNS = "waits for its turn"
UNKNOWN = "no measurement"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A possible share of the model, with the best batch for it."""

    segment: Segment  #: Segment with the rate of a replica in a pool of this size.
    replicas: int  #: Number of such replicas serving the demand together.
    cost: float  #: Price per hour of all replicas' parts of devices.
    tail_ms: float  #: Time at the demand's percentile with these replicas; with a latency budget the time of a batch.
    chosen: int  #: Number of the map's replicas with this device and share.
    source: str  #: Source of the time of its batch.
    at_upper_end: bool  #: True if that time is planned above its mean, towards the upper end of its interval.


@dataclass(frozen=True, slots=True)
class ReplicaLocation:
    """Location, neighbours and free share of a replica."""

    where: str  #: Node, device and MIG instance.
    share: str
    batch: int
    rate_rps: float
    beside: tuple[str, ...]  #: The other replicas in the same partition, by model and share.
    free_pct: float  #: Unassigned part of the partition.


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Effect of a changed demand."""

    change: str
    gpus: int  #: Devices of the new map, over all models.
    shares: tuple[tuple[str, int], ...]  #: The model's new replicas: share and batch, with their number.
    missing_rps: float
    stopped: bool  #: True if the time limit ended the search.


def find_alternatives(problem: Problem, deployment: DeploymentMap, model: str) -> tuple[Alternative, ...]:
    """Return the shares that could serve ``model``, cheapest first.

    They are the estimator's listed shares, the map's shares with the adjacent steps, and all steps below the smallest
    listed share.
    """
    demand = problem.demand(model)
    segments = Segments(problem) if problem.options.latency_budget is not None else PooledSegments(problem)
    counts: Counter[_Kind] = Counter(
        (gpu.device, replica.sm_share_pct, None if partition.mig is None else partition.mig.profile)
        for _, gpu, partition, replica in deployment.places()
        if replica.model == model
    )
    alternatives: list[Alternative] = []
    for entry in problem.fleet.entries:
        for segment in segments.best(demand, entry.device):
            alternatives.append(_alternative(segments, demand, segment, counts))
    alternatives += list(_find_unlisted(problem, segments, demand, counts, alternatives))
    return tuple(sorted(alternatives, key=lambda alternative: (alternative.cost, alternative.replicas)))


def _find_unlisted(
    problem: Problem,
    segments: Segments,
    demand: Demand,
    counts: Mapping[_Kind, int],
    alternatives: Sequence[Alternative],
) -> Iterator[Alternative]:
    """Yield alternatives for unlisted shares: the map's, the adjacent steps, and the steps below all listed."""
    kinds: dict[tuple[str, Share], None] = {}
    for entry in problem.fleet.entries:
        listed_shares = [a.segment.share for a in alternatives if a.segment.device == entry.device.name]
        smallest = min((share.sm_pct for share in listed_shares if share.mig is None), default=0.0)
        steps = segments.search_space.steps(demand.model, entry.device, None)
        kinds |= {(entry.device.name, Share(step)): None for step in steps if step < smallest}
    for name, percent, mig in counts:
        steps = segments.search_space.steps(demand.model, problem.device(name), mig)
        below = [step for step in steps if step < percent][-1:]
        above = [step for step in steps if step > percent][:1]
        kinds |= {(name, Share(size, mig)): None for size in (*below, percent, *above)}
    listed_kinds = {(alternative.segment.device, alternative.segment.share) for alternative in alternatives}
    for name, share in kinds:
        segment = None if (name, share) in listed_kinds else segments.best_of(demand, problem.device(name), share)
        if segment is not None:
            yield _alternative(segments, demand, segment, counts)


def _alternative(segments: Segments, demand: Demand, segment: Segment, counts: Mapping[_Kind, int]) -> Alternative:
    problem = segments.problem
    count = math.ceil(demand.rate_rps / segment.capacity_rps * (1.0 - 1e-9))
    tail_ms = segment.latency_ms
    if problem.options.latency_budget is None:
        count, tail_ms = _count_replicas(segments, demand, segment, count)
    time = segments.estimate(problem.device(segment.device), segment.workload).latency_ms
    at_upper_end = planned_ms(time, problem.options.confidence) > time.value
    price = problem.entry(segment.device).price_per_hour
    used = counts.get((segment.device, segment.share.sm_pct, segment.share.mig), 0)
    return Alternative(
        segment, count, count * segment.fraction * price, tail_ms, used, source=time.source, at_upper_end=at_upper_end
    )


def _count_replicas(segments: Segments, demand: Demand, segment: Segment, guess: int) -> tuple[int, float]:
    """Return the number of equal replicas behind a router serving a demand within its SLO, and their tail."""
    pools = Pools(segments.problem, segments)
    server = segments.server(segments.problem.device(segment.device), segment.workload)

    def enough(count: int) -> bool:
        return pools.keeps(demand, Counter({server: count}), demand.rate_rps)

    count = guess
    while not enough(count):
        count += 1
    while count > 1 and enough(count - 1):
        count -= 1
    sojourn = queue_of(segments.problem.queueing, demand.model).pool(Arrivals(demand.rate_rps), (server,) * count).whole
    return count, sojourn.percentile(demand.slo.percentile)


def locate_replicas(deployment: DeploymentMap, model: str) -> tuple[ReplicaLocation, ...]:
    """Return the locations of the replicas of ``model``, in the order of the map."""
    locations = []
    for node, gpu, partition, replica in deployment.places():
        if replica.model != model:
            continue
        mig = "" if partition.mig is None else f" {partition.mig.profile}@{partition.mig.start}"
        neighbours = [neighbour for neighbour in partition.replicas if neighbour is not replica]
        free = 100.0 - sum(held_shares((placed.sm_share_pct, placed.turns) for placed in partition.replicas))
        locations.append(
            ReplicaLocation(
                where=f"{node.name} {gpu.device} {gpu.index}{mig}",
                share=str(share_of(partition, replica)),
                batch=replica.batch,
                rate_rps=replica.rate_rps,
                beside=tuple(_describe_other(replica, neighbour) for neighbour in neighbours),
                free_pct=max(0.0, free),
            )
        )
    return tuple(locations)


def _describe_other(replica: Replica, neighbour: Replica) -> str:
    if replica.turns and neighbour.turns == replica.turns:
        return f"{neighbour.model} in the same share, {'time-sliced' if replica.time_slice_ms else 'by turns'}"
    return f"{neighbour.model} {neighbour.sm_share_pct:g}%"


def run_what_ifs(problem: Problem, policy: Policy, model: str) -> Iterator[WhatIf]:
    """Yield the policy's result for the unchanged demand, for more rate and for a tighter SLO of ``model``."""
    demand = problem.demand(model)
    tighter = replace(demand, slo=Slo(demand.slo.latency_ms * (1.0 - CHANGE), demand.slo.percentile))
    faster = replace(demand, rate_rps=demand.rate_rps * (1.0 + CHANGE))
    for change, changed in (
        ("as it is", demand),
        (f"{CHANGE:.0%} more rate", faster),
        (f"{CHANGE:.0%} less SLO", tighter),
    ):
        placement = policy.place(replace(problem, demands=_with(problem.demands, changed)))
        missing = sum(shortfall.rate_rps for shortfall in placement.unplaced if shortfall.model == model)
        yield WhatIf(change, len(placement.gpus), _shares(placement, model), missing, placement.stopped)


def _with(demands: Sequence[Demand], changed: Demand) -> tuple[Demand, ...]:
    return tuple(changed if demand.model == changed.model else demand for demand in demands)


def _shares(placement: Placement, model: str) -> tuple[tuple[str, int], ...]:
    counts = Counter(
        f"{replica.share} of {gpu.device}, batch {replica.batch}"
        for gpu in placement.gpus
        for replica in gpu.replicas()
        if replica.model == model
    )
    return tuple(sorted(counts.items()))


@dataclass(frozen=True, slots=True)
class NeighbourEffect:
    """The time that a group of equal neighbours adds to a replica's batch time."""

    #: ``where``, ``share``, ``batch``: location, share and batch of the replica.
    where: str
    share: str
    batch: int
    neighbour: str  #: Model, share and batch, with their number.
    #: ``alone_ms``, ``beside_ms``: mean time of a batch alone on the device, and beside all neighbours,
    #: with the wait for its turn.
    alone_ms: float
    beside_ms: float
    added_ms: float  #: Time saved without these neighbours, beside the others.
    interval_ms: tuple[float, float] | None  #: 90% interval of ``beside_ms``.
    #: Basis of the slow-down: `TOGETHER`, `TURNS`, `UNKNOWN`, or the source of the time, with the model of the effect.
    basis: str


def list_neighbour_effects(problem: Problem, deployment: DeploymentMap, model: str) -> tuple[NeighbourEffect, ...]:
    """Return the effect of each neighbour on the replicas of ``model``, in the order of the map.

    MIG instances do not slow each other down, as in all plans: neighbours are in the same partition. Neighbours without
    an estimate are left out.
    """
    effects: list[NeighbourEffect] = []
    for node, gpu, partition, replica in deployment.places():
        if replica.model != model or len(partition.replicas) < 2:
            continue
        mig = "" if partition.mig is None else f" {partition.mig.profile}@{partition.mig.start}"
        where = f"{node.name} {gpu.device} {gpu.index}{mig}"
        effects += _list_effects(problem, problem.device(gpu.device), partition, replica, where)
    return tuple(effects)


def _list_effects(
    problem: Problem, device: Device, partition: Partition, replica: Replica, where: str
) -> Iterator[NeighbourEffect]:
    workload = replica_workload(partition, replica, replica.batch)
    neighbours = neighbour_workloads(partition, replica)

    def latency(workloads: tuple[Workload, ...]) -> Figure:
        return ask_estimator(problem.estimator, device, workload, workloads).latency_ms

    def wait_ms(replicas: list[Replica]) -> float:
        """Return the mean wait for the batches of other models of the replica's worker."""
        return find_mean_waits([load_replica(replica), *map(load_replica, replicas)])[0]

    others = [other for other in partition.replicas if other is not replica]
    for neighbour, count in Counter(neighbours).items():
        try:
            isolated, joint = latency(()), latency(neighbours)
            reduced = latency(tuple(w for w in neighbours if w != neighbour))
        except InputError:
            continue
        interval = None if joint.low is None or joint.high is None else (joint.low, joint.high)
        others_wait_ms = wait_ms(others)
        left = [n for n in others if replica_workload(partition, n, n.batch) != neighbour]
        yield NeighbourEffect(
            where=where,
            share=str(workload.share),
            batch=workload.batch,
            neighbour=_describe_neighbour(neighbour, count),
            alone_ms=isolated.value,
            beside_ms=joint.value + others_wait_ms,
            added_ms=joint.value - reduced.value + others_wait_ms - wait_ms(left),
            interval_ms=interval if not others_wait_ms else None,
            basis=TURNS if workload.turns and neighbour.turns == workload.turns else _describe_basis(isolated, joint),
        )


def _describe_neighbour(neighbour: Workload, count: int) -> str:
    prefix = f"{count} × " if count > 1 else ""
    return f"{prefix}{neighbour.model} {neighbour.share.sm_pct:g}%, batch {neighbour.batch}"


def _describe_basis(isolated: Figure, joint: Figure) -> str:
    """Return the source of the slow-down, found by comparing the figures with and without the neighbours.

    An estimator that measured this co-location keeps the source of the time alone; an estimator without data keeps the
    time and widens its interval.
    """
    if joint.source != isolated.source:
        return joint.source
    if joint.value != isolated.value:
        return TOGETHER if joint.is_observed else joint.source
    return UNKNOWN if joint.upper() > isolated.upper() else joint.source
