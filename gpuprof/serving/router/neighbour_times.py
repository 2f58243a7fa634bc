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
    return {rows: (b.count, b.gather + b.infer + b.scatter) for rows, b in list(replica.batches.items())}


def list_replica_times(
    models: Iterable[ServedModel], earlier: Mapping[str, BatchTimes] = MappingProxyType({})
) -> list[ReplicaTime]:
    """Return the times of each replica with batches; ``earlier``: by replica, the batches to exclude."""
    owned = {replica.plan.name: (model.name, replica) for model in models for replica in model.replicas}
    runs = []
    for name, (model, replica) in owned.items():
        took_ns, predicted_ns = sum_times(replica, earlier.get(name, _NO_BATCHES))
        if predicted_ns > 0.0:
            runs.append((name, model, (replica.plan.place, replica.plan.mig), took_ns, predicted_ns))
    return [
        ReplicaTime(
            model,
            tuple(sorted(peer for key, peer, where, *_ in runs if where == place and place[0] and key != name)),
            took_ns,
            predicted_ns,
        )
        for name, model, place, took_ns, predicted_ns in runs
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
    return {model: _attribute_model([s for s in times if s.model == model]) for model in {t.model for t in times}}


def _attribute_model(times: Sequence[ReplicaTime]) -> NeighbourCost:
    by_itself = [sample for sample in times if not sample.beside]
    base = sum(s.took_ns for s in by_itself) / sum(s.predicted_ns for s in by_itself) if by_itself else None
    joint = [sample for sample in times if sample.beside and sample.took_ns > 0.0]
    names = sorted({name for sample in joint for name in sample.beside})
    if not names:
        return NeighbourCost(base, {})
    weights = np.sqrt([sample.predicted_ns for sample in joint])
    counts = np.array([[float(sample.beside.count(name)) for name in names] for sample in joint])
    logs = np.array([math.log(sample.took_ns / sample.predicted_ns / (base or 1.0)) for sample in joint])
    factors = np.linalg.lstsq(counts * weights[:, None], logs * weights, rcond=None)[0]
    return NeighbourCost(base, {name: math.exp(log) for name, log in zip(names, factors.tolist(), strict=True)})
