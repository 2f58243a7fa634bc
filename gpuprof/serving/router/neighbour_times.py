"""Measured interference: the time of served batches over their prediction, by active neighbours."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.router.served_replica import ServedReplica

#: Time of batches in nanoseconds and their number, by rows.
BatchTimes = Mapping[int, tuple[int, int]]
_NO_BATCHES: BatchTimes = MappingProxyType({})


def count_batches(replica: ServedReplica) -> BatchTimes:
    """Return, by rows, the number of batches and their nanoseconds in the worker."""
    return {rows: (b.count, b.gather + b.infer + b.scatter) for rows, b in list(replica.statistics.batches.items())}


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


def find_neighbour_slowdowns(
    models: Iterable[ServedModel], earlier: Mapping[str, BatchTimes] = MappingProxyType({})
) -> dict[str, dict[str, float]]:
    """Return, by model and neighbour, the slow-down of the model's batches over the map's prediction.

    Neighbours are the other replicas with batches on the same device or MIG instance. Slow-downs multiply, and the
    neighbours of a replica are assumed to slow it equally. ``earlier``: by replica, the batches to exclude.
    """
    ran = []
    for model in models:
        for replica in model.replicas:
            took_ns, predicted_ns = sum_times(replica, earlier.get(replica.plan.name, _NO_BATCHES))
            if min(took_ns, predicted_ns) > 0.0:
                ran.append((model.name, replica.plan, took_ns, predicted_ns))
    logs: defaultdict[tuple[str, str], float] = defaultdict(float)
    weights: defaultdict[tuple[str, str], float] = defaultdict(float)
    for model_name, plan, took_ns, predicted_ns in ran:
        place = plan.place, plan.mig
        neighbours = [
            name for name, peer, *_ in ran if plan.place and peer is not plan and (peer.place, peer.mig) == place
        ]
        for neighbour in neighbours:
            logs[model_name, neighbour] += predicted_ns * math.log(took_ns / predicted_ns) / len(neighbours)
            weights[model_name, neighbour] += predicted_ns
    slowdowns: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (model_name, neighbour), weight in weights.items():
        slowdowns[model_name][neighbour] = math.exp(logs[model_name, neighbour] / weight)
    return slowdowns
