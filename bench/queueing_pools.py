"""How far the model of replicas behind one router is from the simulator, over random groups and shapes of arrivals.

Printed by `bench.queueing`. Groups of 1 to 64 replicas, equal or of up to three kinds, at 10% to 95% of their capacity
together; goodput is compared at an SLO between the median and 1.3 times p99. For arrivals that are not Poisson, equal
replicas at 10% to 85%.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpuprof.domain.arrival_process import ArrivalProcess, at_rate
from gpuprof.domain.arrival_text import parse_arrivals
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
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate

SHAPES = ("poisson", "constant", "gamma:4", "lognormal:4", "hyperexponential:4", "batch:5", "mmpp:2,0.5s")
_REQUESTS = 1_000_000
_WORST = 5


@dataclass(frozen=True, slots=True)
class PoolComparison:
    """A group under a load, and how far the model is off at p99 (relative) and goodput (of all requests)."""

    shape: str
    servers: tuple[BatchServer, ...]
    load: float
    p99_error: float
    goodput_error: float

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{self.servers.count(one)} of batch {one.batch}, {one.latency_ms[0]:.2f} to {one.latency_ms[-1]:.2f} ms, "
            f"cv {one.latency_cv:.2f}, {one.processes} process(es)"
            for one in dict.fromkeys(self.servers)
        )
        return (
            f"p99 {self.p99_error:+.1%}, goodput {self.goodput_error:+.2%}: {self.shape}, load {self.load:.2f}, {kinds}"
        )


def random_groups(count: int, seed: int) -> Iterator[tuple[tuple[BatchServer, ...], float]]:
    """Yield replicas and the load of all together."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        kinds = [_random_server(random) for _ in range(int(random.choice([1, 1, 2, 3])))]
        servers = tuple(kinds[int(random.integers(len(kinds)))] for _ in range(int(2 ** random.uniform(0.0, 6.01))))
        yield servers, float(random.uniform(0.1, 0.95))


def _random_server(random: np.random.Generator) -> BatchServer:
    batch, fixed, full_ms = int(2 ** random.uniform(0.0, 5.01)), random.uniform(0.0, 0.9), random.uniform(5.0, 20.0)
    return BatchServer(
        tuple(full_ms * (fixed + (1.0 - fixed) * n / batch) for n in range(1, batch + 1)),
        batch,
        0.0,
        int(random.choice([1, 1, 1, 3])),
        float(random.choice([0.0, 0.05, 0.2])),
    )


def compare_group(servers: Sequence[BatchServer], load: float, shape: str, seed: int) -> PoolComparison:
    """Return how far the model is from a simulation of a million requests."""
    rate = load * math.fsum(one.capacity_rps for one in servers)
    process = parse_arrivals(shape, rate)
    said = BatchQueue().pool(Arrivals.from_process(process, rate), servers).whole
    slo_ms = float(np.random.default_rng(seed).uniform(said.percentile(50.0), 1.3 * said.percentile(99.0)))
    p99_ms, in_time = _simulate(servers, process, slo_ms, seed)
    return PoolComparison(
        shape, tuple(servers), load, said.percentile(99.0) / p99_ms - 1.0, said.fraction_within(slo_ms) - in_time
    )


def _simulate(servers: Sequence[BatchServer], process: ArrivalProcess, slo_ms: float, seed: int) -> tuple[float, float]:
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
        models={"m": DeployedModel(rate_rps=process.rate_rps, slo_ms=slo_ms)},
        nodes=(Node(name="node0", gpus=gpus),),
        predicted=MapPrediction(gpus=len(gpus), goodput_rps=0.0),
    )
    seconds = _REQUESTS / process.rate_rps
    options = SimulationOptions(duration_s=seconds, warmup_s=0.05 * seconds, seed=seed, refuse_hopeless=False)
    (found,) = simulate(deployment, {"m": at_rate(process, process.rate_rps)}, options).models
    return found.p99_ms or math.inf, found.in_time / max(1, found.answered)


def print_pools(count: int, seed: int) -> None:
    """Print the errors over random groups under Poisson requests, and of each other shape of arrivals."""
    found = [
        compare_group(servers, load, "poisson", seed + i)
        for i, (servers, load) in enumerate(random_groups(count, seed))
    ]
    _print_errors(f"{count} random groups of 1 to 64 replicas, poisson", found)
    random = np.random.default_rng(seed)
    for shape in SHAPES[1:]:
        some = []
        for i in range(max(1, count // 6)):
            servers = (_random_server(random),) * int(2 ** random.uniform(0.0, 4.01))
            some.append(compare_group(servers, float(random.uniform(0.1, 0.85)), shape, seed + i))
        _print_errors(f"{len(some)} random groups, {shape}", some)
        found += some
    for one in sorted(found, key=lambda one: -abs(one.p99_error))[:_WORST]:
        print(f"  {one}")


def _print_errors(title: str, found: Sequence[PoolComparison]) -> None:
    tails, goodputs = [abs(one.p99_error) for one in found], [abs(one.goodput_error) for one in found]
    print(
        f"{title}: p99 median error {statistics.median(tails):.2%}, largest {max(tails):.2%}, "
        f"{sum(one > 0.05 for one in tails)} above 5%; goodput largest {max(goodputs):.2%}",
        flush=True,
    )
