"""Speed of the simulator.

    python -m bench.simulator [--quick]

Prints requests simulated per second of one core (CPU time, drawing the arrivals included) for maps of 100 replicas.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence

from gpuprof.domain.arrival_process import ArrivalProcess, GammaArrivals
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

BATCH_MS = tuple(5.0 + 0.5 * size for size in range(8))
CAPACITY_RPS = 1000.0 * len(BATCH_MS) / BATCH_MS[-1]
SLO_MS = 30.0


def main() -> int:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    quick = parser.parse_args().quick
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    for models in (100, 20, 10, 1):
        print_speed(models, 20.0 if quick else 60.0)
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
