"""Closed loops by several clients: our own over HTTP, gRPC with whole messages, and NVIDIA's tritonclient."""

from __future__ import annotations

import asyncio
import select
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from gpuprof.load.client import Connection


class AnswerError(Exception):
    """A server answered something else than what it is measured at."""


#: Sends a request, and returns when the answer is there.
Ask = Callable[[int], Awaitable[object]]


@dataclass(frozen=True)
class LoopResult:
    """Of one case: requests per second, latencies in ms, and ms of CPU time for each request."""

    rate_rps: float
    p50_ms: float
    p99_ms: float
    client_ms: float
    router_ms: float
    workers_ms: float


def measure_loop(process: psutil.Process, seconds: float, exchange: Callable[[float], list[float]]) -> LoopResult:
    """Return what ``exchange``, given the seconds that it is to last, comes to after a short warm-up."""
    exchange(min(1.0, seconds / 4.0))
    before = _cpu_s(process)
    started = time.monotonic()
    latencies_ms = exchange(seconds)
    elapsed = time.monotonic() - started
    used = [1000.0 * (after - first) / len(latencies_ms) for first, after in zip(before, _cpu_s(process), strict=True)]
    quantiles = statistics.quantiles(latencies_ms, n=100)
    return LoopResult(len(latencies_ms) / elapsed, quantiles[49], quantiles[98], *used)


def http_loop(port: int, requests: Sequence[bytes], concurrency: int) -> Callable[[float], list[float]]:
    """Return what keeps so many HTTP requests in flight, each on a connection of its own."""

    def run(seconds: float) -> list[float]:
        connections = [Connection("127.0.0.1", port) for _ in range(concurrency)]
        try:
            return _exchange(connections, requests, seconds)
        finally:
            for connection in connections:
                connection.socket.close()

    return run


def _exchange(connections: list[Connection], requests: Sequence[bytes], seconds: float) -> list[float]:
    buffer = bytearray(1 << 20)
    latencies_ms: list[float] = []
    started = {}
    for number, connection in enumerate(connections):
        started[connection] = time.monotonic()
        connection.begin(number, requests[number % len(requests)])
    deadline = time.monotonic() + seconds
    waiting = set(connections)
    while waiting:
        writers = [connection for connection in waiting if connection.is_sending]
        readable, writable, _ = select.select(list(waiting), writers, [], 10.0)
        for connection in writable:
            connection.write()
        for connection in readable:
            status = connection.read_answer(buffer)
            if status is None:
                continue
            if status != 200:
                raise AnswerError(f"it answered {status}")
            now = time.monotonic()
            latencies_ms.append(1000.0 * (now - started[connection]))
            if now >= deadline:
                waiting.discard(connection)
            else:
                started[connection] = now
                connection.begin(0, requests[len(latencies_ms) % len(requests)])
    return latencies_ms


def grpc_loop(port: int, message: bytes, concurrency: int) -> Callable[[float], list[float]]:
    """Return what keeps so many calls of ModelInfer in flight on one channel; messages are sent as they are."""
    import grpc.aio

    async def run(seconds: float) -> list[float]:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            return await _ask_on(lambda _: call(message), concurrency, seconds)

    return lambda seconds: asyncio.run(run(seconds))


async def _ask_on(ask: Ask, concurrency: int, seconds: float) -> list[float]:
    latencies_ms: list[float] = []
    deadline = time.monotonic() + seconds

    async def one(number: int) -> None:
        while (started := time.monotonic()) < deadline:
            await ask(number)
            latencies_ms.append(1000.0 * (time.monotonic() - started))

    await asyncio.gather(*(one(number) for number in range(concurrency)))
    return latencies_ms


def triton_loops(
    http_port: int, grpc_port: int, name: str, array: Any, concurrency: int
) -> dict[str, Callable[[float], list[float]]]:
    """Return a closed loop for each of tritonclient's clients; the synchronous ones have one request in flight."""
    import tritonclient.grpc
    import tritonclient.grpc.aio
    import tritonclient.http
    import tritonclient.http.aio

    def sync(module: Any, port: int) -> Callable[[float], list[float]]:
        def run(seconds: float) -> list[float]:
            client = module.InferenceServerClient(f"127.0.0.1:{port}")
            latencies_ms = []
            deadline = time.monotonic() + seconds
            while (started := time.monotonic()) < deadline:
                _check(client.infer("m", [_triton_input(module, name, array)]), array)
                latencies_ms.append(1000.0 * (time.monotonic() - started))
            client.close()
            return latencies_ms

        return run

    def concurrent(module: Any, kinds: Any, port: int) -> Callable[[float], list[float]]:
        async def run(seconds: float) -> list[float]:
            client = module.InferenceServerClient(f"127.0.0.1:{port}")

            async def ask(_: int) -> None:
                _check(await client.infer("m", [_triton_input(kinds, name, array)]), array)

            latencies_ms = await _ask_on(ask, concurrency, seconds)
            await client.close()
            return latencies_ms

        return lambda seconds: asyncio.run(run(seconds))

    return {
        "http": sync(tritonclient.http, http_port),
        "http asyncio": concurrent(tritonclient.http.aio, tritonclient.http, http_port),
        "grpc": sync(tritonclient.grpc, grpc_port),
        "grpc asyncio": concurrent(tritonclient.grpc.aio, tritonclient.grpc, grpc_port),
    }


def _triton_input(module: Any, name: str, array: Any) -> Any:
    tensor = module.InferInput(name, list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return tensor


def _check(answer: Any, array: Any) -> None:
    """Stop when the identity does not give back what it was given."""
    if not np.array_equal(answer.as_numpy("OUTPUT0"), array):
        raise AnswerError("it answered something else")


def _cpu_s(process: psutil.Process) -> tuple[float, float, float]:
    """Return seconds of CPU time of this client, of the router and of all workers."""
    client = psutil.Process().cpu_times()
    router = process.cpu_times()
    workers = [child.cpu_times() for child in process.children(recursive=True)]
    return client.user + client.system, router.user + router.system, sum(times.user + times.system for times in workers)
