"""Times the server itself: identity models and SqueezeNet under a closed loop, and the overhead of a lone request.

    python -m bench.serving [--seconds S] [--model squeezenet.onnx]

Client and server share this machine. For each case: requests/s, latency, and the CPU time of client, router and
workers for each request, which says more than wall-clock time does where other things run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gpuprof.serving.load_client import Connection
from gpuprof.serving.load_target import Target, requests_for

#: (model, replicas, concurrency)
IDENTITIES = (("null:4", 1, 1), ("null:4", 1, 16), ("null:600k", 1, 1), ("null:600k", 1, 4))


@dataclass(frozen=True)
class Result:
    """Of one case: requests per second, latencies in ms, and ms of CPU time for each request."""

    rate_rps: float
    p50_ms: float
    p99_ms: float
    client_ms: float
    router_ms: float
    workers_ms: float


def main() -> int:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case")
    parser.add_argument("--model", type=Path, help="an ONNX file too, with one worker and with two, concurrency 16")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'model':14s} {'workers':>7s} {'in flight':>9s} {'req/s':>8s} {'p50 ms':>8s} {'p99 ms':>8s}", end="")
    print("   CPU ms a request: client, router, workers")
    cases = list(IDENTITIES)
    if options.model is not None:
        cases += [(str(options.model.resolve()), workers, 16) for workers in (1, 2)]
    for model, workers, concurrency in cases:
        with server(model, workers) as (process, port):
            result = closed_loop(process, port, concurrency, options.seconds)
        show(Path(model).stem, workers, concurrency, result)
    return 0


def show(model: str, workers: int, concurrency: int, result: Result) -> None:
    """Print one line."""
    figures = f"{result.rate_rps:8.0f} {result.p50_ms:8.2f} {result.p99_ms:8.2f}"
    cpu = f"{result.client_ms:.3f}, {result.router_ms:.3f}, {result.workers_ms:.3f}"
    print(f"{model:14s} {workers:7d} {concurrency:9d} {figures}   {cpu}", flush=True)


@contextmanager
def server(model: str, workers: int, slo_ms: float = 60_000.0) -> Iterator[tuple[psutil.Process, int]]:
    """Serve ``model`` with one process for each of ``workers`` replicas, which share the machine's cores."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "map.json"
        path.write_text(json.dumps(deployment(model, workers, slo_ms)))
        command = [sys.executable, "-m", "gpuprof", "serve", str(path), "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(line.split("http://", 1)[1].split()[0].rsplit(":", 1)[1])
            yield psutil.Process(process.pid), port
        finally:
            with process:
                process.terminate()


def deployment(model: str, workers: int, slo_ms: float = 60_000.0) -> dict[str, Any]:
    """Return a map of ``workers`` replicas with a core's worth of share each."""
    share = 100.0 / max(workers, len(os.sched_getaffinity(0)))
    predicted = {"latency_ms": 1.0, "throughput_rps": 1000.0, "goodput_rps": 1000.0}
    replica = {"model": "m", "batch": 1, "sm_share_pct": share, "rate_rps": 1000.0, "predicted": predicted}
    return {
        "schema": "gpuprof.deployment/1",
        "policy": "benchmark",
        "models": {"m": {"path": model, "rate_rps": 1000.0, "slo_ms": slo_ms}},
        "nodes": [
            {"name": "n", "gpus": [{"index": 0, "device": "cpu", "partitions": [{"replicas": [replica] * workers}]}]}
        ],
        "predicted": {"gpus": 1, "goodput_rps": 1000.0},
    }


def closed_loop(process: psutil.Process, port: int, concurrency: int, seconds: float) -> Result:
    """Keep ``concurrency`` requests in flight for ``seconds`` after a short warm-up."""
    requests = requests_for(Target("127.0.0.1", port), "m", None, 0)
    connections = [Connection("127.0.0.1", port) for _ in range(concurrency)]
    _exchange(connections, requests, min(1.0, seconds / 4.0))
    before = _cpu_s(process)
    started = time.monotonic()
    latencies_ms = _exchange(connections, requests, seconds)
    elapsed = time.monotonic() - started
    used = [1000.0 * (after - first) / len(latencies_ms) for first, after in zip(before, _cpu_s(process), strict=True)]
    for connection in connections:
        connection.socket.close()
    quantiles = statistics.quantiles(latencies_ms, n=100)
    return Result(len(latencies_ms) / elapsed, quantiles[49], quantiles[98], *used)


def _exchange(connections: list[Connection], requests: tuple[bytes, ...], seconds: float) -> list[float]:
    buffer = bytearray(1 << 20)
    latencies_ms: list[float] = []
    started = {}
    for number, connection in enumerate(connections):
        started[connection] = time.monotonic()
        connection.begin(number, requests[number % len(requests)])
    deadline = time.monotonic() + seconds
    waiting = set(connections)
    while waiting:
        writers = [connection for connection in waiting if connection.unsent is not None]
        readable, writable, _ = select.select(list(waiting), writers, [], 10.0)
        for connection in writable:
            connection.write()
        for connection in readable:
            status = connection.read(buffer)
            if status is None:
                continue
            if status != 200:
                raise SystemExit(f"the server answered {status}")
            now = time.monotonic()
            latencies_ms.append(1000.0 * (now - started[connection]))
            if now >= deadline:
                waiting.discard(connection)
            else:
                started[connection] = now
                connection.begin(0, requests[len(latencies_ms) % len(requests)])
    return latencies_ms


def _cpu_s(process: psutil.Process) -> tuple[float, float, float]:
    """Return seconds of CPU time of this client, of the router and of all workers."""
    own = psutil.Process().cpu_times()
    router = process.cpu_times()
    workers = [child.cpu_times() for child in process.children(recursive=True)]
    return own.user + own.system, router.user + router.system, sum(times.user + times.system for times in workers)


if __name__ == "__main__":
    sys.exit(main())
