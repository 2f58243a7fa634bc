"""Runs servers and speaks to them, byte by byte where a test is about bytes."""

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.report import ModelResult
from gpuprof.load.target import Target


def replica(model: str, **more: Any) -> dict[str, Any]:
    latency_ms = more.pop("latency_ms", 0.2)
    predicted = {"latency_ms": latency_ms, "throughput_rps": 1000.0 / latency_ms, "goodput_rps": 50.0}
    return {"model": model, "batch": 1, "sm_share_pct": 50.0, "rate_rps": 50.0, "predicted": predicted, **more}


def map_of(models: dict[str, str], replicas: list[dict[str, Any]], slo_ms: float = 2000.0) -> dict[str, Any]:
    return {
        "schema": "gpuprof.deployment/1",
        "policy": "by hand",
        "models": {name: {"path": path, "rate_rps": 50.0, "slo_ms": slo_ms} for name, path in models.items()},
        "nodes": [{"name": "n", "gpus": [{"index": 0, "device": "cpu", "partitions": [{"replicas": replicas}]}]}],
        "predicted": {"gpus": 1, "goodput_rps": 50.0 * len(models)},
    }


@dataclass
class RunningServer:
    process: subprocess.Popen[str]
    url: str
    line: str
    token: str = ""
    context: ssl.SSLContext | None = None

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def address(self) -> str:
        return self.url.split("//", 1)[1]

    def client(self) -> http.client.HTTPConnection:
        if self.context is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=self.context)

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if _is_worker(child)]

    def get(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        connection = self.client()
        sent_headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        sent_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, sent_headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text) if text else None
        except ValueError:
            return answer.status, text

    def infer(self, model: str, values: list[Any], datatype: str = "FP32") -> tuple[int, Any]:
        tensor = {"name": "INPUT0", "datatype": datatype, "shape": [1, len(values)], "data": values}
        return self.get(f"/v2/models/{model}/infer", "POST", json.dumps({"inputs": [tensor]}).encode())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(how)
        _, errors = self.process.communicate(timeout=40)
        return self.process.returncode, errors


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "gpuprof.serving.worker.worker" in process.cmdline()
    except psutil.Error:  # it is a zombie, or gone
        return False


@contextmanager
def running(directory: Path, document: dict[str, Any], *options: str) -> Iterator[RunningServer]:
    path = directory / "map.json"
    path.write_text(json.dumps(document))
    command = [sys.executable, "-m", "gpuprof", "serve", str(path), "--port", "0", *options]
    environment = {**os.environ, "GPUPROF_POISON": "1"}  # a byte that is read after its memory was given back shows
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate()[1])
        url = next(word for word in line.split() if word.startswith("http"))
        yield RunningServer(process, url, line)
    finally:
        with process:  # closes its pipes
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def has_ended(process: psutil.Process) -> bool:
    """Return whether it is gone, or only its parent has not yet asked how it ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually(holds: Callable[[], bool], limit_s: float = 20.0) -> bool:
    """Wait until ``holds``; whether it came to that."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return False


def send_until(
    holds: Callable[[Sequence[ModelResult]], bool], server: RunningServer, streams: Sequence[RequestStream]
) -> list[ModelResult]:
    """Send a load of 2.5 s again and again until ``holds`` of its results; return those of all loads, the last last.

    For servers that bear the load once they have adapted to it: on a machine that holds everybody up some seconds are
    spoilt, and where the server bears less than was sent none is as it should be. The first requests of a load find no
    connections yet and are late, so that each load has a warm-up.
    """
    results: list[ModelResult] = []
    for warmup_s in (4.0, *[1.0] * 9):
        settings = LoadSettings(duration_s=2.5, warmup_s=warmup_s, clients=1, arrivals="constant")
        window = run_load(Target.parse(server.url), list(streams), settings).results
        results += window
        if holds(window):
            break
    return results


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Read one HTTP answer: its status and its body."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.read()
