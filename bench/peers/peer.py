"""Other servers: how each is started, and what it is asked."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench.peers.environment import CACHE, Environment, PeerMissingError
from bench.peers.ports import Ports
from bench.peers.triton import triton_command

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 90.0
_END_S = 20.0


#: Given the interpreter, the model, the number of workers, the ports and a directory: the command.
Command = Callable[[Path, str, int, Ports, Path], list[str]]


@dataclass(frozen=True)
class Peer:
    """A server to measure beside ours.

    Attributes
    ----------
    name : str
    environment : Environment
    command : Command
    request : callable or None
        Given a tensor: path, type of content and body of an HTTP request; None: it takes the requests that ours takes.
    speaks_grpc : bool
        Whether it has the Open Inference Protocol over gRPC.
    largest_http : int or None
        Bytes of the largest tensor that it is asked over HTTP; None: any. Larger ones are asked over gRPC.
    """

    name: str
    environment: Environment
    command: Command
    request: Callable[[bytes], tuple[str, str, bytes]] | None
    speaks_grpc: bool = False
    largest_http: int | None = None

    def http_request(self, tensor: bytes, ours: bytes) -> bytes:
        """Return a whole HTTP request with a tensor; ``ours`` is the request that our server is sent."""
        if self.request is None:
            return ours
        path, kind, body = self.request(tensor)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    @contextmanager
    def serve(
        self, model: str, workers: int, request: bytes, cache: Path = CACHE
    ) -> Iterator[tuple[psutil.Process, Ports]]:
        """Run it with so many workers, and wait until it answers this HTTP request.

        Raises
        ------
        PeerMissingError
            When it cannot be installed, or does not answer.
        """
        python = self.environment.python(cache)
        ports = Ports(*_free_ports(2))
        with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("wb") as log:
            directory = Path(name)
            process = subprocess.Popen(
                self.command(python, model, workers, ports, directory),
                stdout=log,
                stderr=log,
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": str(_ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
                start_new_session=True,
            )
            try:
                self._wait(process, ports.http, request, directory / "log")
                yield psutil.Process(process.pid), ports
            finally:
                _end(process)

    def _wait(self, process: subprocess.Popen[bytes], port: int, request: bytes, log: Path) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(request)
                if connection.recv(12, socket.MSG_WAITALL)[9:] == b"200":
                    return
            time.sleep(0.2)
        last = (log.read_text(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
        raise PeerMissingError(f"{self.name} does not answer: {last[:200]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.Error):
            child.kill()
    process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _module(name: str) -> Command:
    def command(python: Path, model: str, workers: int, ports: Ports, directory: Path) -> list[str]:
        return [str(python), "-m", name, model, str(workers), str(ports.http)]

    return command


def _mlserver(python: Path, model: str, workers: int, ports: Ports, directory: Path) -> list[str]:
    settings = {
        "host": "127.0.0.1",
        "http_port": ports.http,
        "grpc_port": ports.grpc,
        "metrics_endpoint": None,
        "parallel_workers": workers,
        "debug": False,
        "grpc_max_message_length": 1 << 24,
    }
    model_settings = {
        "name": "m",
        "implementation": "bench.peers.mlserver_runtime.PeerRuntime",
        "parameters": {"uri": model},
    }
    (directory / "settings.json").write_text(json.dumps(settings))
    (directory / "model-settings.json").write_text(json.dumps(model_settings))
    return [str(python.parent / "mlserver"), "start", str(directory)]


def _open_inference(tensor: bytes) -> tuple[str, str, bytes]:
    values = np.frombuffer(tensor, np.float32).tolist()
    entry = {"name": "input", "datatype": "FP32", "shape": [1, len(values)], "data": values}
    return "/v2/models/m/infer", "application/json", json.dumps({"inputs": [entry]}).encode()


def _base64(tensor: bytes) -> tuple[str, str, bytes]:
    return "/predict", "application/json", json.dumps({"data": base64.b64encode(tensor).decode()}).encode()


def _body(tensor: bytes) -> tuple[str, str, bytes]:
    return "/", "application/octet-stream", tensor


_RUNTIME = ("onnxruntime", "numpy")
PEERS = (
    Peer(
        "triton",
        # The wheel has Triton's own server and its Python backend; what it asks for besides is for its Python API.
        Environment("triton", _RUNTIME, ("nvidia-pytriton",)),
        triton_command,
        None,
        speaks_grpc=True,
    ),
    Peer("litserve", Environment("litserve", ("litserve", *_RUNTIME)), _module("bench.peers.litserve_app"), _base64),
    Peer("ray", Environment("ray", ("ray[serve]", *_RUNTIME)), _module("bench.peers.ray_app"), _body),
    Peer(
        "mlserver",
        # It asks for the event loop in a way that later versions of uvloop no longer answer.
        Environment("mlserver", ("mlserver", "uvloop<0.22", *_RUNTIME)),
        _mlserver,
        _open_inference,
        speaks_grpc=True,
        largest_http=1 << 16,
    ),
)
