"""Random groups of replicas behind one router, simulated, and the law of a fluid that fills them in bursts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpuprof.domain.arrival_process import ArrivalProcess, MmppArrivals, scale_to_rate
from gpuprof.domain.deployment import (
    DeployedModel,
    DeploymentMap,
    Gpu,
    MapPrediction,
    Node,
    Partition,
    Replica,
    ReplicaPrediction,
)
from gpuprof.domain.sojourn import BatchServer
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate

_SETTLING = 60.0  # of the longest batches, which begin all at once: not counted


def draw_group(seed: int) -> tuple[tuple[BatchServer, ...], float]:
    """Return replicas and the load of all together."""
    random = np.random.default_rng(seed)
    kinds = [_random_server(random) for _ in range(int(random.choice([1, 1, 2, 3])))]
    servers = tuple(kinds[int(random.integers(len(kinds)))] for _ in range(int(2 ** random.uniform(0.0, 6.01))))
    return servers, float(random.uniform(0.1, 0.95))


def _random_server(random: np.random.Generator) -> BatchServer:
    batch, fixed, full_ms = int(2 ** random.uniform(0.0, 5.01)), random.uniform(0.0, 0.9), random.uniform(5.0, 20.0)
    return BatchServer(
        tuple(full_ms * (fixed + (1.0 - fixed) * n / batch) for n in range(1, batch + 1)),
        batch,
        0.0,
        int(random.choice([1, 1, 1, 3])),
        float(random.choice([0.0, 0.05, 0.2])),
    )


def compare_fluid(servers: Sequence[BatchServer], process: MmppArrivals, p99_ms: float) -> float:
    """Return how far a p99 is off what a fluid waits and up to a batch more."""
    longest_ms = max(one.latency_ms[-1] for one in servers)
    wait_ms = fluid_wait_ms(process, math.fsum(one.capacity_rps for one in servers), 0.99)
    return (min(0.0, p99_ms - wait_ms) + max(0.0, p99_ms - wait_ms - longest_ms)) / wait_ms


def fluid_wait_ms(process: MmppArrivals, capacity_rps: float, part: float) -> float:
    """Return within how long the given part of all requests is taken, were they a fluid and the pool one server.

    What is waiting in a burst that brings more than is taken is exponentially distributed; in the calm it crosses each
    level downwards as often as upwards in bursts.
    """
    waiting, decay = _fluid_law(process, capacity_rps)
    return max(0.0, math.log(waiting / (1.0 - part))) / decay if waiting else 0.0


def _fluid_law(process: MmppArrivals, capacity_rps: float) -> tuple[float, float]:
    """Return the part of a fluid that waits, and how fast the part that waits longer falls with the milliseconds."""
    calm_s, burst_s = process.calm_s, process.burst_s
    calm_rps = process.rate_rps * (burst_s + calm_s) / (process.ratio * burst_s + calm_s)
    burst_rps = process.ratio * calm_rps
    growth_rps, fall_rps = burst_rps - capacity_rps, capacity_rps - calm_rps
    if growth_rps <= 0.0:
        return 0.0, 1.0
    decay = 1.0 / (burst_s * growth_rps) - 1.0 / (calm_s * fall_rps)
    waiting = burst_s * (burst_rps + calm_rps * growth_rps / fall_rps) / ((burst_s + calm_s) * process.rate_rps)
    return waiting, decay * capacity_rps / 1000.0


def simulate_p99_ms(servers: Sequence[BatchServer], process: ArrivalProcess, seed: int, requests: int) -> float:
    """Return the p99 of so many simulated requests."""
    replicas = tuple(
        Replica(
            model="m",
            batch=one.batch,
            processes=one.processes,
            rate_rps=process.rate_rps / len(servers),
            batch_latency_ms=one.latency_ms,
            predicted=ReplicaPrediction(
                latency_ms=one.latency_ms[-1],
                latency_cv=one.latency_cv,
                throughput_rps=one.capacity_rps,
                goodput_rps=process.rate_rps / len(servers),
            ),
        )
        for one in servers
    )
    gpus = tuple(
        Gpu(index=i, device="a100-80", partitions=(Partition(replicas=(one,)),)) for i, one in enumerate(replicas)
    )
    deployment = DeploymentMap(
        policy="bench",
        models={"m": DeployedModel(rate_rps=process.rate_rps, slo_ms=1e6)},
        nodes=(Node(name="node0", gpus=gpus),),
        predicted=MapPrediction(gpus=len(gpus), goodput_rps=0.0),
    )
    settling_s = _SETTLING / 1000.0 * max(one.latency_ms[-1] for one in servers)
    seconds = settling_s + requests / process.rate_rps
    options = SimulationOptions(duration_s=seconds, warmup_s=settling_s, seed=seed, refuse_hopeless=False)
    (found,) = simulate(deployment, {"m": scale_to_rate(process, process.rate_rps)}, options).models
    return found.p99_ms or math.inf
