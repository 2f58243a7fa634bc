"""Approximates a large simulation by a sample of the replicas, which get a proportional part of the requests.

The router then chooses among fewer replicas, so waits are slightly overestimated. `bench/simulator.py` prints the
errors on maps small enough for a full simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from gpuprof.domain.arrival_process import ArrivalProcess, RecordedArrivals
from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.domain.sojourn import BatchServer
from gpuprof.errors import InputError
from gpuprof.rules.host_work import NO_HOST_WORK
from gpuprof.simulator.cluster import SimulationOptions, list_queues, places_of
from gpuprof.simulator.engine import simulate_to_tally
from gpuprof.simulator.outcome import SimulationOutcome, outcome_of
from gpuprof.simulator.state import Tally

#: Replicas of each model in a sample, unless the user gives a number.
DEFAULT_REPLICAS = 16


def expected_requests(arrivals: Mapping[str, ArrivalProcess], duration_s: float) -> float:
    """Return the expected number of requests."""
    return duration_s * sum(process.rate_rps for process in arrivals.values())


def simulate_sampled(
    deployment: DeploymentMap,
    arrivals: Mapping[str, ArrivalProcess],
    options: SimulationOptions,
    replicas: int = DEFAULT_REPLICAS,
    progress: Callable[[float], None] | None = None,
) -> SimulationOutcome:
    """Approximate `gpuprof.simulator.engine.simulate`; counts are scaled up to the whole simulation.

    ``replicas``: most replicas of each model. Raises `InputError` like `simulate`, and for failures, which cannot be
    sampled.
    """
    if options.failures:
        raise InputError("failures cannot be sampled", "simulate a shorter time, or a smaller map, whole")
    sample, fractions = sample_replicas(deployment, replicas)
    random = np.random.Generator(np.random.PCG64(options.seed))
    thinned = {name: _thin(process, fractions.get(name, 1.0), random) for name, process in arrivals.items()}
    # The sampled replicas do not fill the machine, so no host work disturbs them.
    settings = replace(options, host=NO_HOST_WORK)
    tally = simulate_to_tally(sample, thinned, settings, progress)
    scaled = _scale_counts(tally, np.array([1.0 / fractions[name] for name in deployment.models]))
    return replace(outcome_of(sample, places_of(sample), scaled, options), method="sampled")


def sample_replicas(deployment: DeploymentMap, limit: int) -> tuple[DeploymentMap, dict[str, float]]:
    """Return the map with at most about ``limit`` replicas per model, and the kept fraction of each model's capacity.

    Replicas with equal predictions, batch sizes, batch times and processes form a kind; each kind keeps its share, at
    least one replica.
    """
    places = places_of(deployment)
    queues = list_queues(places)
    kinds = Counter(_kind(place.replica, queue) for place, queue in zip(places, queues, strict=True))
    of_model = Counter(place.replica.model for place in places)
    to_keep = {
        kind: min(count, max(1, round(count * limit / max(limit, of_model[kind[0]])))) for kind, count in kinds.items()
    }
    nodes = []
    capacity, all_capacity = dict.fromkeys(deployment.models, 0.0), dict.fromkeys(deployment.models, 0.0)
    for place, queue in zip(places, queues, strict=True):
        replica, kind = place.replica, _kind(place.replica, queue)
        all_capacity[replica.model] += capacity_rps(replica)
        if to_keep[kind]:
            to_keep[kind] -= 1
            capacity[replica.model] += capacity_rps(replica)
            # Each replica gets its own device: its batch times include interference and, by its queue, waits for turns.
            single = _wait_without_mates(replica, queue) if replica.turns else replica
            partition = Partition(mig=place.partition.mig, replicas=(single,))
            gpu = Gpu(index=place.gpu.index, device=place.gpu.device, partitions=(partition,))
            nodes.append(Node(name=place.node.name, gpus=(gpu,)))
    fractions = {model: capacity[model] / total if total else 1.0 for model, total in all_capacity.items()}
    return deployment.model_copy(update={"nodes": tuple(nodes)}), fractions


def _wait_without_mates(replica: Replica, queue: BatchServer) -> Replica:
    """Return a replica of a worker with the waits for its turns in its batch times."""
    factors = {name: getattr(queue, name) for name in ("latency_cv", "pause_factor", "pause_cv")}
    predicted = replica.predicted.model_copy(update={"latency_ms": queue.latency_ms[-1], **factors})
    return replica.model_copy(update={"turns": 0, "batch_latency_ms": queue.latency_ms, "predicted": predicted})


def _kind(replica: Replica, queue: BatchServer) -> tuple[str, object]:
    return replica.model, (queue, replica.predicted, replica.batch, replica.processes)


def capacity_rps(replica: Replica) -> float:
    """Return the requests per second of a replica with full batches."""
    full_ms = replica.batch_latency_ms[-1] if replica.batch_latency_ms else replica.predicted.latency_ms
    return 1000.0 * replica.batch * replica.processes / full_ms if full_ms > 0 else math.inf


def _thin(process: ArrivalProcess, fraction: float, random: np.random.Generator) -> ArrivalProcess:
    """Return a process with a fraction of the rate: of a recording, a random part of its requests."""
    if isinstance(process, RecordedArrivals):
        return RecordedArrivals(process.times[random.random(len(process.times)) < fraction], process.duration_s)
    return replace(process, rate_rps=fraction * process.rate_rps)  # type: ignore[type-var]


def _scale_counts(tally: Tally, factors: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Tally:
    """Return the tally with the counts of each model multiplied; replicas represent themselves."""
    scaled = {}
    for name in ("arrived", "answered", "in_time", "missed", "stage_ns", "total", "stage", "windows", "window_ns"):
        counts = getattr(tally, name)
        model_axis = 1 if name.startswith("window") else 0
        shape = [1] * counts.ndim
        shape[model_axis] = len(factors)
        values = counts * factors.reshape(shape)
        scaled[name] = np.rint(values).astype(np.int64) if counts.dtype == np.int64 else values
    return tally._replace(**scaled)
