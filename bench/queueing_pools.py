"""How far the model of replicas behind one router is from the simulator, over random groups and shapes of arrivals.

    python -m bench.queueing_pools [--groups N] [--per-shape N] [--shapes 'A;B'] [--seed S] [--minutes M]

Groups of 1 to 64 replicas, equal or of up to three kinds, at 10% to 95% of their capacity together under Poisson
requests; of every other shape of arrivals, up to 16 equal replicas at 10% to 85%. Goodput is compared at an SLO between
the median and 1.3 times p99. Prints the median, the 95th percentile and the largest error of p99 and goodput for each
shape, and the worst groups. Where hardly any request takes about as long as the p99, the next to nothing decides it:
what is off by more than 5% and yet is met by 98.8% to 99.2% of the simulated requests is counted as such. Where they
come in bursts the simulator itself finds another p99 each time: it is run three times, and its standard error printed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpuprof.domain.arrival_process import ArrivalProcess, Bursts, at_rate
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
_REQUESTS, _MOST_REQUESTS = 1_000_000, 16_000_000
_CYCLES, _RUNS = 3_000, 3  # of calm and burst, where the most requests allow it; and as often as that
_SETTLING = 60.0  # of the longest batches, which begin all at once: not counted
_MUCH, _NEARLY_THERE = 0.05, 0.002
_WORST = 8


@dataclass(frozen=True, slots=True)
class PoolComparison:
    """A group under a load, and how far the model is off at p99 (relative) and goodput (of all requests).

    ``at_p99``: how far the part of the simulated requests that meet the model's p99 is from 99%; ``uncertainty``: the
    standard error of the simulated p99.
    """

    shape: str
    servers: tuple[BatchServer, ...]
    load: float
    p99_error: float
    goodput_error: float
    at_p99: float
    uncertainty: float

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{self.servers.count(one)} of batch {one.batch}, {one.latency_ms[0]:.2f} to {one.latency_ms[-1]:.2f} ms, "
            f"cv {one.latency_cv:.2f}, {one.processes} process(es)"
            for one in dict.fromkeys(self.servers)
        )
        return (
            f"p99 {self.p99_error:+.1%} (met by {0.99 + self.at_p99:.2%}), goodput {self.goodput_error:+.2%}: "
            f"{self.shape}, load {self.load:.2f}, {kinds}"
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
    """Return how far the model is from a simulation of a million requests, or of more where they come in bursts."""
    rate = load * math.fsum(one.capacity_rps for one in servers)
    process = parse_arrivals(shape, rate)
    said = BatchQueue().pool(Arrivals.from_process(process, rate), servers).whole
    tail_ms = said.percentile(99.0)
    slo_ms = float(np.random.default_rng(seed).uniform(said.percentile(50.0), 1.3 * tail_ms))
    runs = _RUNS if isinstance(process, Bursts) else 1
    found = np.array([_simulate(servers, process, slo_ms, seed + 10_007 * run) for run in range(runs)])
    p99_ms, in_time = found.mean(axis=0)
    uncertainty = float(found[:, 0].std(ddof=1) / runs**0.5 / p99_ms) if runs > 1 else 0.0
    error = float(tail_ms / p99_ms - 1.0)
    at_p99 = _simulate(servers, process, tail_ms, seed)[1] - 0.99 if abs(error) > _MUCH else math.nan
    goodput_error = float(said.fraction_within(slo_ms) - in_time)
    return PoolComparison(shape, tuple(servers), load, error, goodput_error, at_p99, uncertainty)


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
    settling_s = _SETTLING / 1000.0 * max(one.latency_ms[-1] for one in servers)
    seconds = settling_s + _requests(process) / process.rate_rps
    options = SimulationOptions(duration_s=seconds, warmup_s=settling_s, seed=seed, refuse_hopeless=False)
    (found,) = simulate(deployment, {"m": at_rate(process, process.rate_rps)}, options).models
    return found.p99_ms or math.inf, found.in_time / max(1, found.answered)


def _requests(process: ArrivalProcess) -> int:
    if not isinstance(process, Bursts):
        return _REQUESTS
    return min(_MOST_REQUESTS, max(_REQUESTS, int(_CYCLES * (process.burst_s + process.calm_s) * process.rate_rps)))


def shaped_groups(count: int, seed: int) -> Iterator[tuple[tuple[BatchServer, ...], float]]:
    """Yield equal replicas and their load, for arrivals that are not Poisson."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        servers = (_random_server(random),) * int(2 ** random.uniform(0.0, 4.01))
        yield servers, float(random.uniform(0.1, 0.85))


def print_pools(count: int, seed: int, per_shape: int, shapes: Sequence[str] = SHAPES, minutes: float = 60.0) -> None:
    """Print the errors over random groups under each shape of arrivals, stopping when the time is over."""
    started, found = time.monotonic(), []
    for number, shape in enumerate(shapes, 1):
        poisson = shape == "poisson"
        groups = random_groups(count, seed) if poisson else shaped_groups(per_shape, seed)
        until = started + 60.0 * minutes * number / len(shapes)
        some = []
        for i, (servers, load) in enumerate(groups):
            some.append(compare_group(servers, load, shape, seed + i))
            if time.monotonic() > until:
                break
        _print_errors(f"{len(some)} of {count if poisson else per_shape} groups, {shape}", some)
        found += some
    for one in sorted(found, key=lambda one: -abs(one.p99_error))[:_WORST]:
        print(f"  {one}")
    print("largest errors of goodput:")
    for one in sorted(found, key=lambda one: -abs(one.goodput_error))[:_WORST]:
        print(f"  {one}")


def _print_errors(title: str, found: Sequence[PoolComparison]) -> None:
    tails, goodputs = [abs(one.p99_error) for one in found], [abs(one.goodput_error) for one in found]
    far = [one for one in found if abs(one.p99_error) > _MUCH]
    sure = sum(abs(one.p99_error) > _MUCH + 2.0 * one.uncertainty for one in far)
    known = max(one.uncertainty for one in found)
    sudden = sum(abs(one.at_p99) <= _NEARLY_THERE for one in far)
    simulated = f"; the simulated is known to {known:.1%}, {sure} are above for sure" if known else ""
    print(
        f"{title}: p99 error {_spread(tails)}, {len(far)} above {_MUCH:.0%} ({sudden} of them met by 99 ± 0.2%"
        f"{simulated}); goodput {_spread(goodputs)}, {sum(one > 0.02 for one in goodputs)} above 2%",
        flush=True,
    )


def _spread(errors: Sequence[float]) -> str:
    return f"median {statistics.median(errors):.2%}, 95th {np.percentile(errors, 95.0):.2%}, largest {max(errors):.2%}"


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=500, help="under Poisson requests")
    parser.add_argument("--per-shape", type=int, default=80, help="groups under each other shape of arrivals")
    parser.add_argument("--shapes", default=";".join(SHAPES), help="separated by semicolons")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="to stop after, the same for each shape")
    chosen = parser.parse_args()
    print_pools(chosen.groups, chosen.seed, chosen.per_shape, chosen.shapes.split(";"), chosen.minutes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
