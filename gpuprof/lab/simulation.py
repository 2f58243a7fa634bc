"""Simulation of a scenario's map under the conditions of its paper."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpuprof.domain.arrival_process import (
    ArrivalProcess,
    DeterministicArrivals,
    GammaArrivals,
    RecordedArrivals,
    Times,
)
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import DeployedModel, DeploymentMap, Gpu, Partition, Replica, share_of
from gpuprof.domain.estimate import Estimator, Workload
from gpuprof.errors import InputError
from gpuprof.lab.publications import stretch_time_ms
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.load import thesis_network_ms
from gpuprof.simulator.outcome import ModelOutcome, SimulationOutcome

#: Serving of a map and times of its batches:
#:
#: - ``server``: gpuprof's own rules, the map's planned times;
#: - ``batches``: even arrivals, no refusals, interpolated measured times (ParvaGPU);
#: - ``neighbours``: even arrivals, times with all neighbours by the scenario's estimator (iGniter);
#: - ``cluster``: the router of Elvinger's thesis, times stretched under shares of a V100;
#: - ``stretched``: gpuprof's own rules on that cluster, with the same times.
Manner = Literal["server", "batches", "neighbours", "cluster", "stretched"]

#: MAX_WAIT_TIME of the thesis's router (§4.3.3).
_ROUTER_WAIT_MS = 100.0
#: Bytes of a request: 3 × 224 × 224 float32, or 512 token numbers of 64 bits (thesis §6.1.2).
_IMAGE_BYTES, _TEXT_BYTES = 602_112.0, 4_096.0
_LANGUAGE_MODELS = frozenset({"bert", "bloom_560", "gpt2", "t5", "xlnet"})
#: iGniter §3.1: half of the SLO is for filling the batch; a workload below this part of its rate has failed.
_IGNITER_BUDGET, _LEAST_THROUGHPUT = 0.5, 0.99


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a simulated scenario."""

    seconds: float
    warmup_s: float = 0.0
    arrived: float = 1.0  #: Part of the target rate that clients reach.
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ServedDemand:
    """Simulated service of one demand."""

    goodput_rps: float
    requests: int
    in_time: int
    is_late: bool  #: Misses its SLO, or less than 99% of its requests are answered.
    answered_rps: float
    stages_ms: dict[str, float]  #: Mean of each part of the latency.


def leg_ms(model: str, batch: int) -> float:
    """Return how long a full batch takes from the thesis's router to its node (§4.6.2)."""
    return thesis_network_ms(batch * (_TEXT_BYTES if model in _LANGUAGE_MODELS else _IMAGE_BYTES))


def simulate_service(
    deployment: DeploymentMap, demands: Sequence[Demand], manner: Manner, estimator: Estimator, traffic: Traffic
) -> dict[str, ServedDemand]:
    """Return the simulated service of each demand by its model.

    ``estimator`` gives the times of ``batches`` and ``neighbours``: the scenario's own, whichever planned the map.
    """
    if not any(True for _ in deployment.places()):
        return {demand.model: _serve_nothing(demand, traffic) for demand in demands}
    outcome = _MANNERS[manner](deployment, demands, estimator, traffic)
    streams: defaultdict[str, list[ModelOutcome]] = defaultdict(list)
    for model in outcome.models:
        streams[model.model.split("@")[0]].append(model)
    duration_s = outcome.duration_s - outcome.warmup_s
    return {
        demand.model: _sum_streams(served, duration_s)
        if (served := streams[demand.model])
        else _serve_nothing(demand, traffic)
        for demand in demands
    }


def _serve_nothing(demand: Demand, traffic: Traffic) -> ServedDemand:
    requests = round(demand.rate_rps * traffic.arrived * (traffic.seconds - traffic.warmup_s))
    return ServedDemand(0.0, requests, 0, is_late=True, answered_rps=0.0, stages_ms={})


def _sum_streams(streams: Sequence[ModelOutcome], seconds: float) -> ServedDemand:
    requests, answered = sum(stream.requests for stream in streams), sum(stream.answered for stream in streams)
    stages: defaultdict[str, float] = defaultdict(float)
    for stream in streams:
        for stage, mean_ms in stream.stage_mean_ms.items():
            stages[stage] += (mean_ms or 0.0) * stream.answered / max(1, answered)
    late = any(stream.p99_ms is None or stream.p99_ms > stream.slo_ms for stream in streams if stream.requests)
    return ServedDemand(
        goodput_rps=sum(stream.goodput_rps for stream in streams),
        requests=requests,
        in_time=sum(stream.in_time for stream in streams),
        is_late=late or answered < _LEAST_THROUGHPUT * requests or not requests,
        answered_rps=answered / seconds,
        stages_ms=dict(stages),
    )


def draw_arrivals(demand: Demand, number: int, traffic: Traffic) -> Times:
    """Draw the requests of a demand with exponential gaps (thesis §4.3.1); ``number``: its position."""
    mean = demand.rate_rps * traffic.arrived
    random = np.random.default_rng([traffic.seed, number])
    expected = mean * traffic.seconds
    times = GammaArrivals(mean).stream(random).take(int(expected + 10.0 * expected**0.5 + 10))
    return times[times < traffic.seconds * 1e9]


def _serve(
    deployment: DeploymentMap, demands: Sequence[Demand], estimator: Estimator, traffic: Traffic
) -> SimulationOutcome:
    return simulate(deployment, _record(deployment, demands, traffic), _options(traffic))


def _serve_stretched(
    deployment: DeploymentMap, demands: Sequence[Demand], estimator: Estimator, traffic: Traffic
) -> SimulationOutcome:
    stretched = rewrite_replicas(deployment, lambda gpu, partition, replica: _stretch(replica))
    legs: dict[str, tuple[float, float]] = {}
    for *_, replica in stretched.places():
        legs[replica.model] = (max(leg_ms(replica.model, replica.batch), legs.get(replica.model, (0.0, 0.0))[0]), 0.0)
    return simulate(stretched, _record(stretched, demands, traffic), _options(traffic, legs_ms=legs))


def _serve_batches(
    deployment: DeploymentMap, demands: Sequence[Demand], estimator: Estimator, traffic: Traffic
) -> SimulationOutcome:
    def time_replica(gpu: Gpu, partition: Partition, replica: Replica) -> Replica:
        share, kind = share_of(partition, replica), device(gpu.device)
        sizes, times = [], []
        for size in estimator.batches(replica.model, kind, share):
            with suppress(InputError):  # more processes exceed the memory earlier
                time = estimator.estimate(replica.model, kind, size, share, (), replica.processes).latency_ms
                sizes.append(size)
                times.append(time.value)
        batch_ms = np.interp(np.arange(1, replica.batch + 1), sizes, times)
        return replica.model_copy(update={"batch_latency_ms": tuple(batch_ms.tolist())})

    timed = rewrite_replicas(deployment, time_replica)
    return simulate(timed, _space_evenly(timed), _options(traffic, refuse_hopeless=False))


def _serve_beside_neighbours(
    deployment: DeploymentMap, demands: Sequence[Demand], estimator: Estimator, traffic: Traffic
) -> SimulationOutcome:
    """Simulate with times for all neighbours; a batch waits for half of the SLO, loading overlaps (equation 2)."""
    legs: dict[str, tuple[float, float]] = {}

    def slow_down(gpu: Gpu, partition: Partition, replica: Replica) -> Replica:
        share = share_of(partition, replica)
        neighbours = [
            Workload(neighbour.model, neighbour.batch, share_of(partition, neighbour))
            for neighbour in partition.replicas
            if neighbour is not replica
        ]
        sizes = [
            estimator.estimate(replica.model, device(gpu.device), size, share, neighbours)
            for size in range(1, replica.batch + 1)
        ]
        legs[replica.model] = (sizes[-1].overlapped_ms, 0.0)
        times = tuple(size.latency_ms.value - size.overlapped_ms for size in sizes)
        wait_ms = _IGNITER_BUDGET * deployment.models[replica.model].slo_ms
        return replica.model_copy(update={"batch_latency_ms": times, "max_wait_ms": wait_ms})

    slowed_map = rewrite_replicas(deployment, slow_down)
    return simulate(slowed_map, _space_evenly(slowed_map), _options(traffic, refuse_hopeless=False, legs_ms=legs))


def _serve_in_cluster(
    deployment: DeploymentMap, demands: Sequence[Demand], estimator: Estimator, traffic: Traffic
) -> SimulationOutcome:
    """Simulate the thesis's cluster; each replica is a model of its own, ``model@0``, ``model@1`` …

    Each replica gets exactly the requests that the thesis's router sends to it.
    """
    models: dict[str, DeployedModel] = {}
    batches: defaultdict[str, list[int]] = defaultdict(list)

    def rename(gpu: Gpu, partition: Partition, replica: Replica) -> Replica:
        name = f"{replica.model}@{len(batches[replica.model])}"
        batches[replica.model].append(replica.batch)
        models[name] = deployment.models[replica.model]
        return _stretch(replica).model_copy(update={"model": name})

    plan = rewrite_replicas(deployment, rename).model_copy(update={"models": models})
    arrivals: dict[str, ArrivalProcess] = {}
    for number, demand in enumerate(demands):
        parts = split_over_replicas(draw_arrivals(demand, number, traffic), batches[demand.model])
        for replica, part in enumerate(parts):
            arrivals[f"{demand.model}@{replica}"] = RecordedArrivals(part, traffic.seconds)
    legs = {replica.model: (leg_ms(replica.model.split("@")[0], replica.batch), 0.0) for *_, replica in plan.places()}
    options = _options(traffic, refuse_hopeless=False, legs_ms=legs, batch_timeout_ms=_ROUTER_WAIT_MS)
    return simulate(plan, arrivals, options)


_MANNERS: dict[Manner, Callable[[DeploymentMap, Sequence[Demand], Estimator, Traffic], SimulationOutcome]] = {
    "server": _serve,
    "stretched": _serve_stretched,
    "batches": _serve_batches,
    "neighbours": _serve_beside_neighbours,
    "cluster": _serve_in_cluster,
}


def _options(traffic: Traffic, **settings: object) -> SimulationOptions:
    return SimulationOptions(traffic.seconds, warmup_s=traffic.warmup_s, seed=traffic.seed, **settings)  # type: ignore[arg-type]


def _record(deployment: DeploymentMap, demands: Sequence[Demand], traffic: Traffic) -> dict[str, ArrivalProcess]:
    placed_models = {replica.model for *_, replica in deployment.places()}
    return {
        demand.model: RecordedArrivals(draw_arrivals(demand, number, traffic), traffic.seconds)
        for number, demand in enumerate(demands)
        if demand.model in placed_models
    }


def _space_evenly(deployment: DeploymentMap) -> dict[str, ArrivalProcess]:
    return {name: DeterministicArrivals(model.rate_rps) for name, model in deployment.models.items()}


def _stretch(replica: Replica) -> Replica:
    sizes = range(1, replica.batch + 1)
    times = tuple(stretch_time_ms(replica.model, size, replica.sm_share_pct) for size in sizes)
    return replica.model_copy(update={"batch_latency_ms": times})


def split_over_replicas(times: Times, batches: Sequence[int]) -> list[Times]:
    """Split a model's requests over its replicas by the rule of the thesis's router (§4.3.3, listing 4.3).

    The router builds one batch at a time: a full batch, or a batch whose first request has waited 100 ms, is sent, and
    the next batch is built for the next replica.

    Parameters
    ----------
    times : ndarray of int64, ascending
        Nanoseconds.
    batches : sequence of int
        Batch size of each replica.
    """
    parts: list[list[int]] = [[] for _ in batches]
    replica, size, begin_ns = 0, 0, 0
    for time in times.tolist() if batches else ():
        if size and time - begin_ns >= _ROUTER_WAIT_MS * 1e6:
            replica, size = (replica + 1) % len(batches), 0
        if not size:
            begin_ns = time
        parts[replica].append(time)
        size += 1
        if size == batches[replica]:
            replica, size = (replica + 1) % len(batches), 0
    return [np.array(part, np.int64) for part in parts]


def rewrite_replicas(deployment: DeploymentMap, change: Callable[[Gpu, Partition, Replica], Replica]) -> DeploymentMap:
    """Return the map with each replica changed, in the order of the map."""

    def rewrite_gpu(gpu: Gpu) -> Gpu:
        parts = tuple(
            part.model_copy(update={"replicas": tuple(change(gpu, part, replica) for replica in part.replicas)})
            for part in gpu.partitions
        )
        return gpu.model_copy(update={"partitions": parts})

    nodes = tuple(
        node.model_copy(update={"gpus": tuple(rewrite_gpu(gpu) for gpu in node.gpus)}) for node in deployment.nodes
    )
    return deployment.model_copy(update={"nodes": nodes})
