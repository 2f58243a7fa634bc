"""Measured interference: the time of served batches over their prediction, by active neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.router.served_replica import ServedReplica

#: Time of batches in nanoseconds and their number, by rows.
BatchTimes = Mapping[int, tuple[int, int]]
_NO_BATCHES: BatchTimes = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReplicaTime:
    """Measured and predicted time of a replica's batches in a period."""

    model: str
    #: Models of the other replicas on the same device or MIG instance that ran batches in the period, one entry per
    #: replica.
    beside: tuple[str, ...]
    took_ns: float
    predicted_ns: float


@dataclass(frozen=True, slots=True)
class NeighbourCost:
    """Slow-down of a model's batches over the map's prediction, alone and with its neighbours."""

    alone: float | None  #: Measured over predicted time of replicas without neighbours; None: each had some.
    #: Slow-down by each neighbour beyond the prediction and ``alone``.
    beside: Mapping[str, float]


def count_batches(replica: ServedReplica) -> BatchTimes:
    """Return, by rows, the number of batches and their nanoseconds in the worker."""
    return {rows: (one.count, one.gather + one.infer + one.scatter) for rows, one in list(replica.batches.items())}


def list_replica_times(
    models: Iterable[ServedModel], earlier: Mapping[str, BatchTimes] = MappingProxyType({})
) -> list[ReplicaTime]:
    """Return the times of each replica with batches; ``earlier``: by replica, the batches to exclude."""
    owned = {replica.plan.name: (model.name, replica) for model in models for replica in model.replicas}
    ran = []
    for name, (model, replica) in owned.items():
        took_ns, predicted_ns = sum_times(replica, earlier.get(name, _NO_BATCHES))
        if predicted_ns > 0.0:
            ran.append((name, model, (replica.plan.place, replica.plan.mig), took_ns, predicted_ns))
    return [
        ReplicaTime(
            model,
            tuple(sorted(other for its, other, where, *_ in ran if where == place and place[0] and its != name)),
            took_ns,
            predicted_ns,
        )
        for name, model, place, took_ns, predicted_ns in ran
    ]


def sum_times(replica: ServedReplica, earlier: BatchTimes) -> tuple[float, float]:
    """Return the nanoseconds of batches since ``earlier``, and the nanoseconds predicted for their sizes."""
    took_ns = predicted_ns = 0.0
    predicted_ms = replica.plan.latency_ms or ()
    for rows, (count, nanoseconds) in count_batches(replica).items():
        count_before, nanoseconds_before = earlier.get(rows, (0, 0))
        if rows <= len(predicted_ms):
            took_ns += nanoseconds - nanoseconds_before
            predicted_ns += 1e6 * (count - count_before) * predicted_ms[rows - 1]
    return took_ns, predicted_ns


def attribute_times(times: Sequence[ReplicaTime]) -> dict[str, NeighbourCost]:
    """Return for each model its slow-down by its neighbours beyond the prediction.

    Slow-downs by several neighbours multiply. Where there are fewer distinct sets of neighbours than neighbours, their
    shares cannot be told apart: the logarithms are divided evenly (minimum-norm least squares).
    """
    return {model: _attribute_model([one for one in times if one.model == model]) for model in {t.model for t in times}}


def _attribute_model(times: Sequence[ReplicaTime]) -> NeighbourCost:
    by_itself = [one for one in times if not one.beside]
    alone = sum(one.took_ns for one in by_itself) / sum(one.predicted_ns for one in by_itself) if by_itself else None
    others = [one for one in times if one.beside and one.took_ns > 0.0]
    names = sorted({name for one in others for name in one.beside})
    if not names:
        return NeighbourCost(alone, {})
    weights = np.sqrt([one.predicted_ns for one in others])
    counts = np.array([[float(one.beside.count(name)) for name in names] for one in others])
    logs = np.array([math.log(one.took_ns / one.predicted_ns / (alone or 1.0)) for one in others])
    found = np.linalg.lstsq(counts * weights[:, None], logs * weights, rcond=None)[0]
    return NeighbourCost(alone, {name: math.exp(log) for name, log in zip(names, found.tolist(), strict=True)})
