"""A server of one null model on any free port, to measure the overhead of serving.

python -m gpuprof.load.null_server DEVICE BYTES

Prints its address and serves until SIGTERM.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_file import parse_map
from gpuprof.serving.plan.planner import MapSource, Planner
from gpuprof.serving.server import run_server
from gpuprof.serving.server_settings import ServerSettings

_RATE_RPS = 1000.0


def main(arguments: list[str]) -> int:
    """Serve until a stop signal."""
    device, size = arguments
    deployment = null_map(device, int(size))
    planner = Planner(f"null-{os.getpid()}")
    run_server(MapSource(deployment, Path()), planner, ServerSettings(port=0), _say_where)
    return 0


def _say_where(url: str, models: int, workers: int) -> None:
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def null_map(device: str, size: int) -> DeploymentMap:
    """Return a map with a single null model of ``size`` bytes on all of ``device``."""
    predicted = {"latency_ms": 0.0, "throughput_rps": 1e6, "goodput_rps": _RATE_RPS}
    replica = {"model": "null", "batch": 1, "rate_rps": _RATE_RPS, "predicted": predicted}
    gpu = {"index": 0, "device": device, "partitions": [{"replicas": [replica]}]}
    document = {
        "schema": "gpuprof.deployment/1",
        "policy": "none",
        "models": {"null": {"path": f"null:{size}", "rate_rps": _RATE_RPS, "slo_ms": 1000.0}},
        "nodes": [{"name": "here", "gpus": [gpu]}],
        "predicted": {"gpus": 1, "goodput_rps": _RATE_RPS},
    }
    return parse_map(document, "the map of a null model")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
