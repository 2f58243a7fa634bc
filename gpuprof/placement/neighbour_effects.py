"""Explains the batch time each neighbour of a replica adds, and its evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpuprof.domain.deployment import DeploymentMap, Partition, Replica
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure, Workload
from gpuprof.errors import InputError
from gpuprof.placement.map_workloads import ask_estimator, neighbour_workloads, replica_workload
from gpuprof.placement.problem import Problem
from gpuprof.rules.turns import find_mean_waits, load_replica

TOGETHER = "measured together"
TURNS = "waits for its turn"
UNKNOWN = "no measurement"
#: Parts of the time alone and of the total effect of all neighbours: smaller effects are ignored.
_LITTLE, _NEXT_TO_NOTHING = 1e-3, 0.1


@dataclass(frozen=True, slots=True)
class NeighbourEffect:
    """Time that equal neighbours of a replica together add to its batch time."""

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


def describe_joint_effects(effects: Sequence[NeighbourEffect]) -> Iterator[str]:
    """Yield a note for each replica whose neighbours slow its batches together, but hardly one by one.

    This happens where the model of the effect depends on the presence of neighbours, not on their number.
    """
    for (where, share, batch), group in groupby(effects, key=lambda effect: (effect.where, effect.share, effect.batch)):
        members = list(group)
        together_ms = members[0].beside_ms - members[0].alone_ms
        added_ms = sum(effect.added_ms for effect in members)
        if together_ms > _LITTLE * members[0].alone_ms and added_ms < _NEXT_TO_NOTHING * together_ms:
            yield (
                f"{where}, share {share}, batch {batch}: its neighbours together add {together_ms:.3g} ms, and each "
                f"next to nothing beside the others, since it counts whether there are any, not how many (known from "
                f"{members[0].basis})"
            )


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
    """Return the basis of the slow-down, as shown by the difference between the two figures.

    An estimator that measured this co-location keeps the source of the time alone; an estimator without data keeps the
    time and widens its interval.
    """
    if joint.source != isolated.source:
        return joint.source
    if joint.value != isolated.value:
        return TOGETHER if joint.is_observed else joint.source
    return UNKNOWN if joint.upper() > isolated.upper() else joint.source
