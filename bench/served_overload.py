"""Goodput from below to four times the capacity, served over sockets and simulated, with workers that are simulated.

    python -m bench.served_overload [--batches 1,8,32] [--replicas 1,3] [--loads 1,1.5,2,3,4] [--protocols http,grpc]
        [--only loads|priorities|clients] [--seconds S] [--seed N]

``gpuprof serve --simulate`` runs the server itself, but its workers compute nothing and answer when the batch's time is
over. Batches are long and rates low, so that the result depends little on what else the machine does. The same
requests go to the server, by a client of its own, and to the simulator, at the times at which they really were sent; it
is told what a request that meets no other takes beyond its batch. Both count what is answered within the SLO, and are
to be within 5% of each other. Two priorities, and two clients (addresses), are compared with the runtime's router in
virtual time (``bench.virtual_server``), for the simulator knows neither; each part is to be within 5% of the capacity.
How late requests were sent tells how busy the machine was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2

from bench.admission import APART, batch_times, make_map, merge_requests
from bench.clients import AnswerError
from bench.recovery import replica_of
from bench.serving import infer_message, read_port
from bench.virtual_server import VirtualRequest, serve_requests
from gpuprof.domain.arrival_process import NS_PER_S, RecordedArrivals
from gpuprof.domain.deployment import DeploymentMap, Replica
from gpuprof.domain.map_file import write_map
from gpuprof.load.traffic import arrival_times
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate

PROTOCOLS, KINDS = ("http", "grpc"), ("loads", "priorities", "clients")
_SLO_BATCHES = 3.0
#: A full batch takes so long for each of its requests, within these bounds: replicas take 6 to 50 requests/s.
_LEAST_MS, _REQUEST_MS, _LONGEST_MS = 160.0, 40.0, 640.0
#: Of a run, what is not counted; and full batches of one replica in it at least.
_WARMUP, _LEAST_BATCHES = 0.2, 60
_ALONE = 9  #: Requests before a run, one after another.
#: From another address than the flood's.
_LIGHT = "127.0.0.2"

#: Asks for one answer with this priority; whether it was one.
Ask = Callable[[int], Awaitable[bool]]


@dataclass(frozen=True)
class Served:
    """Requests as they were sent, and when each was answered after that (None: refused); times in ms."""

    overhead_ms: float  #: Of a request that meets no other, beyond its batch.
    late_ms: float  #: How late requests were sent, 99th percentile.
    requests: list[VirtualRequest]
    took_ms: list[float | None]


class _Connections:
    """HTTP connections to a port, from one address; one is opened where all are in use."""

    def __init__(self, port: int, address: str) -> None:
        self._port, self._address = port, address
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, priority: int) -> bool:
        """Send one request, and return whether it was answered."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(self._address, 0))
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [0.0]}
        body = json.dumps({"inputs": [tensor], "parameters": {"priority": priority}}).encode()
        head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))
        self._idle.append((reader, writer))
        status = int(answer.split(b" ", 2)[1])
        if status not in (200, 429, 503):
            raise AnswerError(f"the server answered {status}")
        return status == 200

    def close(self) -> None:
        """Close those that are not in use."""
        for _, writer in self._idle:
            writer.close()


@asynccontextmanager
async def _connect(protocol: str, ports: tuple[int, int], address: str = "127.0.0.1") -> AsyncIterator[Ask]:
    """Yield what asks over HTTP, or over gRPC on one channel."""
    if protocol == "http":
        connections = _Connections(ports[0], address)
        yield connections.ask
        connections.close()
        return
    messages = {}
    for priority in (0, 1):
        request = service_pb2.ModelInferRequest.FromString(infer_message("null:4", ports[0]))
        request.parameters["priority"].int64_param = priority
        messages[priority] = request.SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        async def ask(priority: int) -> bool:
            try:
                await call(messages[priority])
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
                    raise
                return False
            return True

        yield ask


async def _send_all(
    requests: Sequence[VirtualRequest], protocol: str, ports: tuple[int, int], first_ms: float
) -> Served:
    """Send each request at its time; those of a client that has a name come over HTTP from an address of their own."""
    sent: list[tuple[float, int, float | None]] = []
    async with _connect(protocol, ports) as ask, _connect("http", ports, _LIGHT) as ask_apart:
        alone = []
        for _ in range(_ALONE):
            began = time.monotonic()
            await ask(0)
            alone.append(1000.0 * (time.monotonic() - began) - first_ms)
        start = time.monotonic() + 0.2

        async def send(number: int, request: VirtualRequest) -> None:
            began = time.monotonic()
            answered = await (ask_apart if request.client else ask)(request.priority)
            took_ms = 1000.0 * (time.monotonic() - began) if answered else None
            sent.append((1000.0 * (began - start), number, took_ms))

        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                await asyncio.sleep(max(0.0, start + request.at_ms / 1000.0 - time.monotonic()))
                group.create_task(send(number, request))
    sent.sort()
    late_ms = np.quantile([at_ms - requests[number].at_ms for at_ms, number, _ in sent], 0.99)
    as_sent = [replace(requests[number], at_ms=at_ms) for at_ms, number, _ in sent]
    return Served(statistics.median(alone), float(late_ms), as_sent, [took_ms for *_, took_ms in sent])


@contextmanager
def _serve(deployment: DeploymentMap) -> Iterator[tuple[int, int]]:
    """Serve a map with simulated workers; yield its ports for HTTP and gRPC."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "map.json"
        write_map(deployment, path)
        command = [sys.executable, "-m", "gpuprof", "serve", str(path), "--simulate", "--port", "0", "--grpc-port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                if not line:  # its stderr, which is this program's, has the reason
                    raise AnswerError(f"the server ended as it started, with code {process.wait()}")
                yield read_port(line, "http://"), read_port(line, "grpc://")
            finally:
                process.terminate()


@dataclass(frozen=True)
class ReplicaSet:
    """Replicas of one model, and how long requests come."""

    batch: int
    replicas: int
    seconds: float

    @property
    def times_ms(self) -> list[float]:
        """Of batches of 1, 2, … requests."""
        times = batch_times(self.batch)
        return [one * min(_LONGEST_MS, max(_LEAST_MS, _REQUEST_MS * self.batch)) / times[-1] for one in times]

    @property
    def capacity_rps(self) -> float:
        """Of all replicas."""
        return 1000.0 * self.replicas * self.batch / self.times_ms[-1]

    @property
    def slo_ms(self) -> float:
        """Some full batches."""
        return _SLO_BATCHES * self.times_ms[-1]

    @property
    def duration_s(self) -> float:
        """Long enough for some tens of batches."""
        return max(self.seconds, _LEAST_BATCHES * self.times_ms[-1] / 1000.0)

    def replica_list(self) -> list[Replica]:
        """Return them, all equal."""
        return [replica_of(self.times_ms, 0.0)] * self.replicas

    def arrivals(self, load: float, seed: int, *, priority: int = 0, client: str = "") -> list[VirtualRequest]:
        """Return requests at so many times the capacity."""
        times_s = arrival_times("poisson", load * self.capacity_rps, self.duration_s, seed)
        return [VirtualRequest(1000.0 * at, priority, client=client) for at in times_s.tolist()]

    def serve(self, requests: Sequence[VirtualRequest], protocol: str) -> Served:
        """Send requests to a server."""
        with _serve(make_map(self.replica_list(), self.slo_ms, self.capacity_rps)) as ports:
            return asyncio.run(_send_all(requests, protocol, ports, self.times_ms[0]))

    def simulate(self, requests: Sequence[VirtualRequest], overhead_ms: float) -> float:
        """Return the part of the capacity that the simulator says is answered in time."""
        at_ns = np.rint(np.array([one.at_ms for one in requests]) * NS_PER_S / 1000.0).astype(np.int64)
        end_s = max(self.duration_s, requests[-1].at_ms / 1000.0 + 1e-3)  # the last may have been sent late
        options = SimulationOptions(end_s, warmup_s=_WARMUP * self.duration_s, legs_ms={"m": (overhead_ms, 0.0)})
        deployment = make_map(self.replica_list(), self.slo_ms, self.capacity_rps)
        outcome = simulate(deployment, {"m": RecordedArrivals(at_ns, end_s)}, options)
        return outcome.models[0].in_time / self._most

    def part_in_time(
        self, requests: Sequence[VirtualRequest], took_ms: Sequence[float | None], whose: tuple[int, str] | None = None
    ) -> float:
        """Return what was answered in time as a part of the capacity; ``whose``: of one priority and client alone."""
        begin_ms = 1000.0 * _WARMUP * self.duration_s
        count = sum(
            one.at_ms >= begin_ms and took is not None and took <= self.slo_ms
            for one, took in zip(requests, took_ms, strict=True)
            if whose in (None, (one.priority, one.client))
        )
        return count / self._most

    @property
    def _most(self) -> float:
        return (1.0 - _WARMUP) * self.duration_s * self.capacity_rps


def show_load(case: ReplicaSet, load: float, protocol: str, seed: int) -> bool:
    """Print one load, served and simulated."""
    served = case.serve(case.arrivals(load, seed), protocol)
    parts = case.part_in_time(served.requests, served.took_ms), case.simulate(served.requests, served.overhead_ms)
    return _show(f"{case.batch:5d} {case.replicas:8d} {load:5g}  {protocol:4s}", [parts], served)


def show_parts(case: ReplicaSet, kind: str, protocol: str, seed: int) -> bool:
    """Print two priorities or two clients, together at twice the capacity; served, and in virtual time."""
    if kind == "priorities":
        groups = [case.arrivals(0.5, seed), case.arrivals(1.5, seed + 1, priority=1)]
    else:
        groups = [case.arrivals(0.4, seed, client="light"), case.arrivals(2.0, seed + 1)]
    served = case.serve(merge_requests(groups), protocol)
    virtual = serve_requests(case.replica_list(), served.requests, slo_ms=case.slo_ms)
    whole_ms = [None if took is None else took + served.overhead_ms for took in virtual.took_ms]
    parts = [
        (
            case.part_in_time(served.requests, served.took_ms, (group[0].priority, group[0].client)),
            case.part_in_time(served.requests, whole_ms, (group[0].priority, group[0].client)),
        )
        for group in groups
    ]
    return _show(f"{case.batch:5d} {case.replicas:8d} {kind:10s}  {protocol:4s}", parts, served)


def _show(name: str, parts: Sequence[tuple[float, float]], served: Served) -> bool:
    total = sum(ours for ours, _ in parts), sum(theirs for _, theirs in parts)
    agrees = abs(total[1] - total[0]) <= APART * total[0] and all(abs(one - other) <= APART for one, other in parts)
    said = " + ".join(f"{100 * ours:5.1f} {100 * theirs:5.1f}" for ours, theirs in parts)
    print(
        f"{name}  {said}  {100 * (total[1] / total[0] - 1.0):+5.1f}%  {served.overhead_ms:4.1f} {served.late_ms:4.1f}"
        f"{'' if agrees else '  DIFFERS'}",
        flush=True,
    )
    return agrees


def main() -> int:
    """Print all cells; 0 when all agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32", help="largest batches")
    parser.add_argument("--replicas", default="1,3", help="of the model")
    parser.add_argument("--loads", default="1,1.5,2,3,4", help="times the capacity")
    parser.add_argument("--protocols", default=",".join(PROTOCOLS), help="over which requests come")
    parser.add_argument("--only", choices=KINDS, help="one kind of traffic")
    parser.add_argument("--seconds", type=float, default=24.0, help="of each run, and sixty full batches at least")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals")
    said = parser.parse_args()
    print("batch replicas  load  over  served simulated, % of the capacity in time; difference; ms outside, sent late")
    good = True
    for batch, replicas in product(map(int, said.batches.split(",")), map(int, said.replicas.split(","))):
        case = ReplicaSet(batch, replicas, said.seconds)
        for protocol in said.protocols.split(","):
            for kind in KINDS if said.only is None else (said.only,):
                if kind == "loads":
                    for load in map(float, said.loads.split(",")):
                        good &= show_load(case, load, protocol, said.seed)
                else:
                    good &= show_parts(case, kind, protocol, said.seed)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
