"""Says why a model of a map got its batch, share and place, and what would change them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpuprof.demand import Demand, Slo
from gpuprof.deployment import DeploymentMap, share_of
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments

#: By how much rate and SLO are changed to see what would follow.
CHANGE = 0.10


@dataclass(frozen=True, slots=True)
class Alternative:
    """A share that the model could have had, with the best batch for it.

    Attributes
    ----------
    segment : Segment
    replicas : int
        How many of it would serve the demand.
    cost : float
        Devices' worth of all of them.
    chosen : int
        How many replicas of the map have this device and share.
    """

    segment: Segment
    replicas: int
    cost: float
    chosen: int


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a replica of the model stands, beside whom, and what is left there.

    Attributes
    ----------
    where : str
        Node, device and MIG instance.
    share, batch : str, int
    rate_rps : float
    beside : tuple of str
        The other replicas in the same partition, by model and share.
    free_pct : float
        Of the partition, given to nobody.
    """

    where: str
    share: str
    batch: int
    rate_rps: float
    beside: tuple[str, ...]
    free_pct: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a changed demand would do.

    Attributes
    ----------
    change : str
    gpus : int
        Devices of the new map, of all models.
    shares : tuple of (str, int)
        The model's replicas then: share and batch, and how many.
    missing_rps : float
    """

    change: str
    gpus: int
    shares: tuple[tuple[str, int], ...]
    missing_rps: float


def alternatives(problem: Problem, deployment: DeploymentMap, model: str) -> tuple[Alternative, ...]:
    """Return the shares that could serve ``model``, cheapest first."""
    demand = problem.demand(model)
    segments = Segments(problem)
    chosen: Counter[tuple[str, float, str | None]] = Counter(
        (gpu.device, replica.sm_share_pct, None if partition.mig is None else partition.mig.profile)
        for _, gpu, partition, replica in deployment.places()
        if model in replica.rates()
    )
    found = []
    for entry in problem.fleet.entries:
        for segment in segments.best(demand, entry.device):
            count = -(-demand.rate_rps // segment.capacity_rps)
            taken = chosen[segment.device, segment.share.sm_pct, segment.share.mig]
            found.append(Alternative(segment, int(count), count * segment.fraction * entry.price_per_hour, taken))
    return tuple(sorted(found, key=lambda one: (one.cost, one.replicas)))


def seats(deployment: DeploymentMap, model: str) -> tuple[Seat, ...]:
    """Return where the replicas of ``model`` stand, in the order of the map."""
    found = []
    for node, gpu, partition, replica in deployment.places():
        if replica.model != model:
            continue
        mig = "" if partition.mig is None else f" {partition.mig.profile}@{partition.mig.start}"
        others = [other for other in partition.replicas if other is not replica]
        free = 100.0 - sum(one.sm_share_pct for one in partition.replicas)
        found.append(
            Seat(
                where=f"{node.name} {gpu.device} {gpu.index}{mig}",
                share=str(share_of(partition, replica)),
                batch=replica.batch,
                rate_rps=replica.rate_rps,
                beside=tuple(f"{other.model} {other.sm_share_pct:g}%" for other in others),
                free_pct=max(0.0, free),
            )
        )
    return tuple(found)


def what_ifs(problem: Problem, policy: Policy, model: str) -> Iterator[WhatIf]:
    """Yield what the policy would do as it is, with more rate and with a tighter SLO for ``model``."""
    demand = problem.demand(model)
    tighter = replace(demand, slo=Slo(demand.slo.latency_ms * (1.0 - CHANGE), demand.slo.percentile))
    faster = replace(demand, rate_rps=demand.rate_rps * (1.0 + CHANGE))
    for change, other in (
        ("as it is", demand),
        (f"{CHANGE:.0%} more rate", faster),
        (f"{CHANGE:.0%} less SLO", tighter),
    ):
        placement = policy.place(replace(problem, demands=_with(problem.demands, other)))
        missing = sum(one.rate_rps for one in placement.unplaced if one.model == model)
        yield WhatIf(change, len(placement.gpus), _shares(placement, model), missing)


def _with(demands: Sequence[Demand], other: Demand) -> tuple[Demand, ...]:
    return tuple(other if demand.model == other.model else demand for demand in demands)


def _shares(placement: Placement, model: str) -> tuple[tuple[str, int], ...]:
    counts = Counter(
        f"{replica.share} of {gpu.device}, batch {replica.batch}"
        for gpu in placement.gpus
        for replica in gpu.replicas()
        if replica.model == model
    )
    return tuple(sorted(counts.items()))
