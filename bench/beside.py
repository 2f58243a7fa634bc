"""What a model keeps of its goodput while another model is sent several times what it can do.

    python -m bench.beside [--times 3] [--seconds S]

A cheap model (4 bytes a request) and a dear one (600 KB a request, 40/s) are served by a worker each. The dear one's
goodput is measured alone, then while the cheap one is sent ``--times`` its capacity by clients of their own. These
compute on the same cores as the server: where the slowest answers took their time tells the server's part from theirs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import psutil

from bench.clients import http_loop, measure_loop
from bench.serving import deployment
from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.report import ModelResult
from gpuprof.load.target import Target, requests_for

DEAR_RPS, SLO_MS = 40.0, 500.0
#: A request that has found no connection for so long is not sent: a client of its own would have one.
GIVE_UP_S = 0.05
_CLIENTS = 4


@dataclass(frozen=True)
class Beside:
    """The cheap model's capacity and its goodput in requests/s, and what came of the dear one, alone and beside it."""

    capacity_rps: float
    overloaded_rps: float
    alone: ModelResult
    beside: ModelResult


def measure_beside(times: float, seconds: float) -> Beside:
    """Overload one model and ask another meanwhile."""
    with _two_models() as (process, port), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        target = Target("127.0.0.1", port)
        cheap = http_loop(port, requests_for(target, "cheap", None, 0), 16)
        capacity_rps = measure_loop(process, min(3.0, seconds), cheap).rate_rps
        alone = ask(port, "dear", DEAR_RPS, seconds, 1)
        flood = pool.submit(ask, port, "cheap", times * capacity_rps, seconds + 4.0, _CLIENTS)
        beside = ask(port, "dear", DEAR_RPS, seconds, 1, warmup_s=3.0)
        return Beside(capacity_rps, flood.result().goodput_rps, alone, beside)


def ask(port: int, model: str, rate_rps: float, seconds: float, clients: int, warmup_s: float = 1.0) -> ModelResult:
    """Send requests at a rate; return what came of them."""
    settings = LoadSettings(duration_s=seconds, warmup_s=warmup_s, clients=clients, give_up_s=GIVE_UP_S)
    (result,) = run_load(Target("127.0.0.1", port), [RequestStream(model, rate_rps, SLO_MS)], settings).results
    return result


@contextmanager
def _two_models() -> Iterator[tuple[psutil.Process, int]]:
    document = deployment("null:4", 1, SLO_MS)
    (replica,) = document["nodes"][0]["gpus"][0]["partitions"][0]["replicas"]
    paths = {"cheap": "null:4", "dear": "null:600k"}
    document["models"] = {name: {"path": path, "rate_rps": 40.0, "slo_ms": SLO_MS} for name, path in paths.items()}
    document["nodes"][0]["gpus"][0]["partitions"][0]["replicas"] = [replica | {"model": name} for name in paths]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "map.json"
        path.write_text(json.dumps(document))
        command = [sys.executable, "-m", "gpuprof", "serve", str(path), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            try:
                where = next(word for word in words if word.startswith("http://"))
                yield psutil.Process(process.pid), int(where.rsplit(":", 1)[1])
            finally:
                process.terminate()


def show_beside(got: Beside, times: float) -> None:
    """Print it."""
    print(f"a cheap model at {times:g} times its {got.capacity_rps:.0f}/s beside a dear one at {DEAR_RPS:.0f}/s:")
    print(f"  the cheap one answered {got.overloaded_rps:.0f}/s within its SLO of {SLO_MS:.0f} ms")
    for name, one in (("alone", got.alone), ("beside it", got.beside)):
        print(f"  the dear one {one.goodput_rps:.1f}/s {name}, p99 {one.p99_ms or float('inf'):.1f} ms", end="")
        if one.slowest_ms is not None:
            parts = (one.slowest_late_ms, one.slowest_network_ms, one.slowest_router_ms, one.slowest_queue_ms)
            told = " + ".join(f"{part or 0.0:.1f}" for part in (*parts, one.slowest_infer_ms))
            print(f"; its slowest 1%: {told} ms sent late, client and network, router, queue, model", end="")
        print(flush=True)


def main() -> int:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=3.0, help="the cheap model's capacity")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each part")
    options = parser.parse_args()
    show_beside(measure_beside(options.times, options.seconds), options.times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
