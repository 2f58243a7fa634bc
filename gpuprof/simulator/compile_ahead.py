"""Compiles the simulator's event loop, and keeps the machine code on disk for other processes.

python -m gpuprof.simulator.compile_ahead
"""

from __future__ import annotations

from gpuprof.domain.map_file import parse_map
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.compilation import use_machine_code
from gpuprof.simulator.engine import simulate


def main() -> None:
    """Simulate a replica without requests in machine code, which compiles it for the types of all simulations."""
    use_machine_code()
    predicted = {"latency_ms": 1.0, "throughput_rps": 1.0, "goodput_rps": 1.0}
    replica = {"model": "m", "batch": 1, "rate_rps": 1.0, "batch_latency_ms": [1.0], "predicted": predicted}
    gpu = {"index": 0, "device": "cpu", "partitions": [{"replicas": [replica]}]}
    document = {
        "schema": "gpuprof.deployment/1",
        "policy": "none",
        "models": {"m": {"rate_rps": 1.0, "slo_ms": 1.0}},
        "nodes": [{"name": "here", "gpus": [gpu]}],
        "predicted": {"gpus": 1, "goodput_rps": 1.0},
    }
    simulate(parse_map(document, "the map of one replica"), {}, SimulationOptions(1.0))


if __name__ == "__main__":
    main()
