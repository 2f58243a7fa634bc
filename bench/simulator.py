"""Speed of the simulator, and the error of its sampling approximation.

    python -m bench.simulator [--quick]

Prints requests simulated per second of one core (CPU time, drawing the arrivals included) for maps of 100 replicas,
then the sampled outcome beside the whole one on maps that can be simulated whole.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Mapping, Sequence

from gpuprof.domain.arrival_process import ArrivalProcess, DiurnalArrivals, GammaArrivals, MmppArrivals
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
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.outcome import SimulationOutcome
from gpuprof.simulator.sampling import DEFAULT_REPLICAS, simulate_sampled

BATCH_MS = tuple(5.0 + 0.5 * size for size in range(8))
CAPACITY_RPS = 1000.0 * len(BATCH_MS) / BATCH_MS[-1]
SLO_MS = 30.0
REPLICAS = 40  # of each model where the sample is compared with the whole


def main() -> int:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    quick = parser.parse_args().quick
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    for models in (100, 20, 10, 1):
        print_speed(models, 20.0 if quick else 60.0)
    print(f"sampled against whole: 2 models of {REPLICAS} replicas each, {DEFAULT_REPLICAS} of them kept")
    seconds = 150.0 if quick else 900.0
    full = REPLICAS * CAPACITY_RPS
    print_error("poisson, 70% load", [GammaArrivals(0.70 * full)] * 2, seconds)
    print_error("poisson, 95% load", [GammaArrivals(0.95 * full)] * 2, seconds)
    print_error("day of 50% mean load", [DiurnalArrivals(0.50 * full, 4.0, seconds)] * 2, seconds)
    print_error("day of 80% mean load", [DiurnalArrivals(0.80 * full, 4.0, seconds)] * 2, seconds)
    print_error("bursts of 3x, 60% mean load", [MmppArrivals(0.60 * full, 3.0, 2.0, 8.0)] * 2, seconds)
    return 0


def print_speed(models: int, seconds: float) -> None:
    """Print the speed for 100 replicas of so many models at 70% load."""
    deployment = a_map([100 // models] * models)
    arrivals: dict[str, ArrivalProcess] = {
        name: GammaArrivals(70.0 * CAPACITY_RPS / models) for name in deployment.models
    }
    simulate(deployment, arrivals, SimulationOptions(0.1))  # compiles, or loads what was compiled
    started = time.process_time()
    outcome = simulate(deployment, arrivals, SimulationOptions(seconds))
    spent = time.process_time() - started
    print(f"100 replicas of {models:3d} model(s): {outcome.requests / spent / 1e6:6.2f} million requests/s", flush=True)


def print_error(name: str, processes: Sequence[ArrivalProcess], seconds: float) -> None:
    """Print goodput and p99 of the sampled outcome relative to the whole one."""
    deployment = a_map([REPLICAS] * len(processes))
    arrivals = dict(zip(deployment.models, processes, strict=True))
    whole, whole_s = time_simulation(deployment, arrivals, seconds, None)
    sampled, sampled_s = time_simulation(deployment, arrivals, seconds, DEFAULT_REPLICAS)
    goodput = sampled.goodput_rps / whole.goodput_rps - 1.0
    print(
        f"  {name:28s} goodput {100 * goodput:+6.2f}%   p50 {_error(sampled, whole, 'p50_ms')}   "
        f"p99 {_error(sampled, whole, 'p99_ms')}   in time {100 * whole.goodput_rps * seconds / whole.requests:.1f}%   "
        f"{whole_s / sampled_s:.0f} times as fast",
        flush=True,
    )


def _error(sampled: SimulationOutcome, whole: SimulationOutcome, name: str) -> str:
    ratio = getattr(sampled.models[0], name) / getattr(whole.models[0], name) - 1.0
    return f"{100 * ratio:+6.2f}%"


def time_simulation(
    deployment: DeploymentMap, arrivals: Mapping[str, ArrivalProcess], seconds: float, replicas: int | None
) -> tuple[SimulationOutcome, float]:
    """Return the outcome and the CPU time in seconds."""
    started = time.process_time()
    options = SimulationOptions(seconds)
    if replicas is None:
        outcome = simulate(deployment, arrivals, options)
    else:
        outcome = simulate_sampled(deployment, arrivals, options, replicas)
    return outcome, time.process_time() - started


def a_map(replicas: Sequence[int]) -> DeploymentMap:
    """Return a map with so many equal replicas of each model, four on a GPU, eight GPUs in a node."""
    prediction = ReplicaPrediction(
        latency_ms=BATCH_MS[-1], latency_cv=0.05, throughput_rps=CAPACITY_RPS, goodput_rps=CAPACITY_RPS
    )
    parts = [
        Replica(
            model=f"model{i}",
            batch=len(BATCH_MS),
            sm_share_pct=25.0,
            max_wait_ms=4.0,
            rate_rps=CAPACITY_RPS,
            batch_latency_ms=BATCH_MS,
            predicted=prediction,
        )
        for i, count in enumerate(replicas)
        for _ in range(count)
    ]
    gpus = [
        Gpu(index=i // 4 % 8, device="a100-80", partitions=(Partition(replicas=tuple(parts[i : i + 4])),))
        for i in range(0, len(parts), 4)
    ]
    return DeploymentMap(
        policy="bench",
        models={f"model{i}": DeployedModel(rate_rps=1.0, slo_ms=SLO_MS) for i in range(len(replicas))},
        nodes=tuple(Node(name=f"node{i // 8}", gpus=tuple(gpus[i : i + 8])) for i in range(0, len(gpus), 8)),
        predicted=MapPrediction(gpus=len(gpus), goodput_rps=0.0),
    )


if __name__ == "__main__":
    sys.exit(main())
