"""Times the server itself, beside other servers in the same run: identity models and an ONNX file under closed loops.

    python -m bench.serving [--seconds S] [--model squeezenet.onnx] [--only http,grpc,tritonclient,load,memory]
                            [--peers triton,litserve,ray,mlserver] [--cache DIRECTORY]

Clients and servers share this machine. For each case and each server: requests/s, latency, how many times as much
ours did in turn with it, and the CPU time of client, router and workers for each request, which says more than
wall-clock time does where other things run beside it. Peers are installed once, each into an environment of its own;
one that cannot be is named with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.clients import AnswerError, LoopResult, grpc_loop, http_loop, measure_loop, triton_loops
from bench.peers.environment import CACHE, PeerMissingError
from bench.peers.peer import PEERS, Peer
from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.target import Target, requests_for

#: Part of the closed loop's peak at which p99 is told.
LOAD = 0.8
#: A server is measured in turn with ours, so that both meet the machine as it happens to be; the median counts.
_ROUNDS = 3
PARTS = ("http", "grpc", "tritonclient", "load", "memory")


@dataclass(frozen=True)
class Case:
    """What is served, by how many workers, and how many requests are in flight."""

    model: str
    workers: int
    concurrency: int

    @property
    def name(self) -> str:
        """For people."""
        return Path(self.model).stem


IDENTITIES = (Case("null:4", 1, 1), Case("null:4", 1, 16), Case("null:600k", 1, 1), Case("null:600k", 1, 4))


@dataclass(frozen=True)
class ServingOptions:
    """What is measured, and how."""

    cases: tuple[Case, ...]
    seconds: float
    peers: tuple[Peer, ...]
    cache: Path


@dataclass(frozen=True)
class MeasuredServer:
    """A server that runs, and what keeps requests to it in flight for so many seconds."""

    name: str
    process: psutil.Process
    loop: Callable[[float], list[float]]


def main() -> int:
    """Print one line a case and server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case")
    parser.add_argument("--model", type=Path, help="an ONNX file too, with one worker and with two, concurrency 16")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--cases", default="", help="only cases whose model's name contains this")
    every = ",".join(peer.name for peer in PEERS)
    parser.add_argument("--peers", default=every, help=f"servers to run beside ours: {every}, or none")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where they are installed")
    arguments = parser.parse_args()
    cases = list(IDENTITIES)
    if arguments.model is not None:
        cases += [Case(str(arguments.model.resolve()), workers, 16) for workers in (1, 2)]
    options = ServingOptions(
        tuple(case for case in cases if arguments.cases in case.name),
        arguments.seconds,
        tuple(peer for peer in PEERS if peer.name in arguments.peers.split(",")),
        arguments.cache,
    )
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    parts = {"http": over_http, "grpc": over_grpc, "tritonclient": by_tritonclient, "load": at_load, "memory": memory}
    for part in arguments.only.split(","):
        parts[part](options)
    return 0


def over_http(options: ServingOptions) -> None:
    """Ours and each peer under the same client, HTTP."""
    _title("HTTP")
    for case in options.cases:
        with server(case.model, case.workers) as (process, port):
            requests = requests_for(Target("127.0.0.1", port), "m", None, 0)
            ours = MeasuredServer("gpuprof", process, http_loop(port, requests, case.concurrency))
            _show("gpuprof", case, measure_loop(process, options.seconds, ours.loop))
            with bare_chain(port, requests[0]) as (chain, chain_port):
                loop = http_loop(chain_port, requests[:1], case.concurrency)
                _show_beside(MeasuredServer("two bare processes", chain, loop), case, options, ours)
            for peer in options.peers:
                if peer.largest_http is None or len(_tensor(case.model)) <= peer.largest_http:
                    _show_peer(peer, case, options, ours, requests[0])


def over_grpc(options: ServingOptions) -> None:
    """Ours and the peers that speak the protocol under the same client, gRPC."""
    _title("gRPC")
    for case in options.cases:
        with grpc_server(case.model, case.workers) as (process, port, grpc_port):
            request, message = requests_for(Target("127.0.0.1", port), "m", None, 0)[0], infer_message(case.model, port)
            ours = MeasuredServer("gpuprof", process, grpc_loop(grpc_port, message, case.concurrency))
            _show("gpuprof", case, measure_loop(process, options.seconds, ours.loop))
            with grpc_echo() as (process, port):
                echo = MeasuredServer("grpcio, bare echo", process, grpc_loop(port, message, case.concurrency))
                _show_beside(echo, case, options, ours)
            for peer in options.peers:
                if peer.speaks_grpc:
                    _show_peer(peer, case, options, ours, request, message)


def _show_peer(
    peer: Peer, case: Case, options: ServingOptions, ours: MeasuredServer, request: bytes, message: bytes | None = None
) -> None:
    """Measure a peer over HTTP, or over gRPC with ``message``; ``request`` is what our server is sent over HTTP."""
    payload = peer.http_request(_tensor(case.model), request)
    try:
        with peer.serve(case.model, case.workers, payload, options.cache) as (process, ports):
            if message is not None:
                loop = grpc_loop(ports.grpc, message, case.concurrency)
            else:
                loop = http_loop(ports.http, [payload], case.concurrency)
            _show_beside(MeasuredServer(peer.name, process, loop), case, options, ours)
    except (AnswerError, PeerMissingError) as error:
        print(f"{peer.name:24s} {case.name:12s} not measured: {error}", flush=True)


def _show_beside(theirs: MeasuredServer, case: Case, options: ServingOptions, ours: MeasuredServer) -> None:
    """Measure both in turn, several times, and print one of the rounds, with the ratio of the median one."""
    rounds = []
    for _ in range(_ROUNDS):
        pair = [measure_loop(measured.process, options.seconds / _ROUNDS, measured.loop) for measured in (ours, theirs)]
        rounds.append((pair[0].rate_rps / pair[1].rate_rps, pair[1]))
    ratio, result = sorted(rounds, key=lambda result_pair: result_pair[0])[_ROUNDS // 2]
    _show(theirs.name, case, result, ratio)


def by_tritonclient(options: ServingOptions) -> None:
    """Our server driven by NVIDIA's client, synchronous and asyncio, over both protocols."""
    _title("tritonclient to gpuprof")
    for case in options.cases:
        if not case.model.startswith("null:") or case.concurrency == 1:
            continue
        array = np.frombuffer(_tensor(case.model), np.float32).reshape(1, -1)
        with grpc_server(case.model, case.workers) as (process, port, grpc_port):
            for name, loop in triton_loops(port, grpc_port, "INPUT0", array, case.concurrency).items():
                inflight = Case(case.model, case.workers, case.concurrency if "asyncio" in name else 1)
                _show(name, inflight, measure_loop(process, options.seconds, loop))


def at_load(options: ServingOptions) -> None:
    """p99 at `LOAD` of the peak beside what a batch takes by itself."""
    print(f"p99 at {LOAD:.0%} of the peak, as times of what the model takes for one batch")
    for case in options.cases:
        if case.model.startswith("null:"):
            continue
        with server(case.model, case.workers) as (process, port):
            peak_rps = closed_loop(process, port, case.concurrency, options.seconds).rate_rps
            for arrivals in ("constant", "poisson"):
                settings = LoadSettings(duration_s=4.0 * options.seconds, arrivals=arrivals, clients=1)
                stream = RequestStream("m", LOAD * peak_rps, 60_000.0)
                outcome = run_load(Target("127.0.0.1", port), [stream], settings)
                (result,), (stages,) = outcome.results, outcome.stages
                batch_ms = float(str(stages["infer_ms"]))
                p99_ms = result.p99_ms or float("nan")
                print(f"  {case.name}, {case.workers} worker(s), {arrivals}, {result.rate_rps:.0f}/s:", end=" ")
                print(f"p99 {p99_ms:.1f} ms, a batch {batch_ms:.1f} ms: {p99_ms / batch_ms:.1f} times", flush=True)


def memory(options: ServingOptions) -> None:
    """What router and idle worker have in memory beyond what ONNX Runtime and the weights take by themselves."""
    print("resident memory, MB: router; idle worker; a process that does nothing but hold the same session")
    for case in {case.model: case for case in options.cases if case.workers == 1}.values():
        with server(case.model, 1) as (process, _):
            (worker,) = (
                child
                for child in process.children(recursive=True)
                if "gpuprof.serving.worker.worker" in child.cmdline()
            )
            figures = [served.memory_info().rss / 1e6 for served in (process, worker)]
        print(f"  {case.name:12s} {figures[0]:6.0f} {figures[1]:6.0f} {_bare_mb(case.model):6.0f}", flush=True)


def _bare_mb(model: str) -> float:
    """Return the memory of an interpreter that has the session of a model and has run it once."""
    from bench.peers import peer_model

    program = (
        "import sys, numpy, psutil\nfrom bench.peers.peer_model import PeerModel\nmodel = PeerModel(sys.argv[1])\n"
        "model.run_array(numpy.zeros([abs(size) for size in model.shape], numpy.float32))\n"
        "print(psutil.Process().memory_info().rss)"
    )
    root = Path(peer_model.__file__).resolve().parents[2]
    command = [sys.executable, "-c", program, model]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, check=True).stdout) / 1e6


def _title(what: str) -> None:
    case = f"{what:24s} {'model':12s} {'workers':>7s} {'in flight':>9s}"
    figures = f"{'req/s':>8s} {'p50 ms':>8s} {'p99 ms':>8s} {'ours':>7s}"
    print(f"{case} {figures}   CPU ms a request: client, router, workers")


def _show(server_name: str, case: Case, result: LoopResult, times: float | None = None) -> None:
    """Print one line; ours does ``times`` as many requests."""
    figures = f"{result.rate_rps:8.0f} {result.p50_ms:8.2f} {result.p99_ms:8.2f}"
    ratio = "" if times is None else f"{times:.2f} x"
    cpu = f"{result.client_ms:.3f}, {result.router_ms:.3f}, {result.workers_ms:.3f}"
    what = f"{server_name:24s} {case.name:12s} {case.workers:7d} {case.concurrency:9d}"
    print(f"{what} {figures} {ratio:>7s}   {cpu}", flush=True)


@contextmanager
def serve_model(
    model: str, workers: int, slo_ms: float, *options: str, checkout: Path | None = None
) -> Iterator[tuple[psutil.Process, str]]:
    """Serve ``model``, with the code of another checkout if one is given; yield the process and its first line."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "map.json"
        path.write_text(json.dumps(deployment(model, workers, slo_ms)))
        command = [sys.executable, "-m", "gpuprof", "serve", str(path), "--port", "0", *options]
        environment = None if checkout is None else {**os.environ, "PYTHONPATH": str(checkout)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout, env=environment)
        try:
            assert process.stdout is not None
            yield psutil.Process(process.pid), process.stdout.readline()
        finally:
            with process:
                process.terminate()


@contextmanager
def grpc_echo() -> Iterator[tuple[psutil.Process, int]]:
    """Serve what gives back each message as it came: what grpcio itself costs."""
    with subprocess.Popen([sys.executable, "-m", "bench.grpc_echo"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield psutil.Process(process.pid), int(process.stdout.readline())
        finally:
            process.terminate()


@contextmanager
def bare_chain(port: int, request: bytes) -> Iterator[tuple[psutil.Process, int]]:
    """Serve the answer of the server at ``port`` to this request without reading it: what wake-ups cost."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b"")).replace(b"Connection: close\r\n", b"", 1)
    command = [sys.executable, "-m", "bench.http_chain", str(len(request))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        with process.stdin:
            process.stdin.write(answer)
        try:
            yield psutil.Process(process.pid), int(process.stdout.readline())
        finally:
            process.terminate()


@contextmanager
def server(model: str, workers: int, slo_ms: float = 60_000.0) -> Iterator[tuple[psutil.Process, int]]:
    """Serve ``model`` with one process for each of ``workers`` replicas, which share the machine's cores."""
    with serve_model(model, workers, slo_ms) as (process, line):
        yield process, read_port(line, "http://")


@contextmanager
def grpc_server(model: str, workers: int) -> Iterator[tuple[psutil.Process, int, int]]:
    """Serve ``model`` over HTTP and gRPC."""
    with serve_model(model, workers, 60_000.0, "--grpc-port", "0") as (process, line):
        yield process, read_port(line, "http://"), read_port(line, "grpc://")


def read_port(line: str, scheme: str) -> int:
    """Return the port of a server from the line that says where it listens."""
    return int(line.split(scheme, 1)[1].split()[0].rsplit(":", 1)[1])


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


def closed_loop(process: psutil.Process, port: int, concurrency: int, seconds: float) -> LoopResult:
    """Keep ``concurrency`` requests in flight for ``seconds`` after a short warm-up."""
    requests: Sequence[bytes] = requests_for(Target("127.0.0.1", port), "m", None, 0)
    return measure_loop(process, seconds, http_loop(port, requests, concurrency))


def _tensor(model: str) -> bytes:
    """Return a float32 tensor for the only input of a model, batch 1."""
    if model.startswith("null:"):
        from gpuprof.serving.worker.runtime import null_bytes

        count = null_bytes(model) // 4
    else:
        import onnx

        (entry,) = onnx.load(model, load_external_data=False).graph.input
        count = int(np.prod([dim.dim_value or 1 for dim in entry.type.tensor_type.shape.dim]))
    return np.random.default_rng(0).standard_normal(count, np.float32).tobytes()


def infer_message(model: str, port: int) -> bytes:
    """Return a ModelInferRequest for a model of our server, as it is sent."""
    from tritonclient.grpc import service_pb2

    (entry,) = Target("127.0.0.1", port).get("/v2/models/m")["inputs"]
    tensor = _tensor(model)
    shape = [size if size > 0 else 1 for size in entry["shape"]]
    shape[-1] = len(tensor) // 4 if model.startswith("null:") else shape[-1]
    described = service_pb2.ModelInferRequest.InferInputTensor(name=entry["name"], datatype="FP32", shape=shape)
    request = service_pb2.ModelInferRequest(model_name="m", inputs=[described], raw_input_contents=[tensor])
    return bytes(request.SerializeToString())


if __name__ == "__main__":
    sys.exit(main())
