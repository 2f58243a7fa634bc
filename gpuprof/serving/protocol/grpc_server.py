"""The Open Inference Protocol over gRPC: grpcio's asyncio server, in the router's process.

HTTP/2 is the C core's, which reads and writes in threads of its own without Python's lock; what it hands over are whole
messages of a bounded size, as they were sent (`grpc_reader`). It listens on a Unix socket that only the relay knows, a
process through which all clients come (`grpc_relay`). What this costs beside a bare echo of grpcio
`bench.serving --only grpc` prints.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from gpuprof.errors import UnavailableError
from gpuprof.serving.protocol.grpc_inference import InferenceCalls
from gpuprof.serving.protocol.grpc_methods import (
    CallLimits,
    GuardedMethods,
    inference_methods,
    standard_methods,
)
from gpuprof.serving.protocol.grpc_reader import WEIGH_S, MessageReader
from gpuprof.serving.protocol.grpc_relay_link import RelayLink
from gpuprof.serving.protocol.open_inference import SERVICE
from gpuprof.serving.protocol.protocol_parts import ProtocolParts
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.security import OPEN, Security

_MAX_STREAMS = 1000
_MAX_CALLS = 20_000
#: Of a message that nobody waits for yet; one that is waited for may be sent as fast as it goes.
_LOOKAHEAD_BYTES = 1 << 16
_LEAST_BYTES_PER_S = 1 << 20
_SERVING, _NOT_SERVING = (health_pb2.HealthCheckResponse.ServingStatus.Value(n) for n in ("SERVING", "NOT_SERVING"))


class GrpcServer:
    """Answers the calls of the service on all connections.

    Parameters
    ----------
    router : Router
    max_message_bytes : int
        Of a message, inflated.
    security : Security
        What calls must have in their metadata, and the certificate.
    stall_s : float
        A client that does not read or send in the middle of a call for so long is given up.
    idle_s : float
        A connection on which nothing is asked for so long is closed.
    shared : ProtocolParts or None
        What it shares with other protocols; None: nothing.
    per_peer : int
        Calls that are not answered yet, and connections, that one address may have; of connections at most half of all.

    Attributes
    ----------
    port : int
        Known once it listens.
    """

    def __init__(
        self,
        router: Router,
        max_message_bytes: int,
        security: Security = OPEN,
        stall_s: float = 30.0,
        idle_s: float = 300.0,
        shared: ProtocolParts | None = None,
        per_peer: int = 2048,
    ) -> None:
        self._router = router
        shared = ProtocolParts() if shared is None else shared
        self.port = 0
        self._relay = RelayLink(security, per_peer, stall_s)
        self._health = health.aio.HealthServicer()
        receive_s = stall_s + max_message_bytes / _LEAST_BYTES_PER_S
        self._reader = MessageReader(router.arena, max_message_bytes)
        self._limits = CallLimits(self._reader, receive_s, per_peer, shared.count_refusal)
        calls = InferenceCalls(router, self._reader, receive_s, shared)
        methods = inference_methods(router, calls, self._limits) | standard_methods(self._health, self._limits)
        options = _options(max_message_bytes, stall_s, idle_s)
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        self._server.add_generic_rpc_handlers((GuardedMethods(methods, security, shared.count_refusal),))
        self._was_ready: bool | None = None
        self._weighing: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port.

        Raises
        ------
        InputError
            When the port is taken.
        UnavailableError
            When there is no place for a socket.
        """
        self.port = self._relay.listen(host, port)
        with tempfile.TemporaryDirectory(prefix="gpuprof-") as directory:  # which nobody else can enter
            path = Path(directory) / "grpc"
            try:
                self._server.add_insecure_port(f"unix:{path}")
            except RuntimeError:
                raise UnavailableError(f"cannot open a socket in {directory}") from None
            await self.watch(time.monotonic())
            await self._server.start()
            self._relay.start(path)
        self._weighing = asyncio.ensure_future(self._weigh())
        return self.port

    async def stop(self, grace_s: float) -> None:
        """Take no more calls and wait for those that are there."""
        await self._health.enter_graceful_shutdown()
        await self._relay.stop_listening()
        await self._server.stop(grace_s)

    async def close(self) -> None:
        """Close the port and all connections."""
        if self._weighing is not None:
            self._weighing.cancel()
        await self._server.stop(None)
        await self._relay.close()
        self._reader.weigh()  # messages that were not whole are gone

    async def watch(self, now: float) -> None:
        """End calls that do not go on, and have the health service say whether every model can be answered."""
        self._reader.watch(now)
        ready = self._router.is_ready
        if ready != self._was_ready:
            self._was_ready = ready
            for name in ("", SERVICE):
                await self._health.set(name, _SERVING if ready else _NOT_SERVING)

    @property
    def turned_away(self) -> int:
        """Calls and connections beyond those that an address may have."""
        return self._limits.peers.turned_away + self._relay.turned_away

    def measure_idle_bytes(self) -> None:
        """Take the memory that the process has now for its own; called when nothing is asked of it."""
        self._reader.measure_idle_bytes()

    async def _weigh(self) -> None:
        while True:
            await asyncio.sleep(WEIGH_S)
            self._reader.weigh()


def _options(max_message_bytes: int, stall_s: float, idle_s: float) -> list[tuple[str, Any]]:
    """Return the arguments of the C core: what one connection, and all together, may cost.

    A connection whose peer acknowledges no ping is closed; one whose client reads nothing the relay closes. Of a
    message that is not waited for only so much is received: the window does not grow with the speed of the line.
    """
    stall_ms = int(1000 * stall_s)
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Inflated by `grpc_reader`, when there is memory for it.
        ("grpc.per_message_decompression", 0),
        ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.keepalive_time_ms", stall_ms),
        ("grpc.keepalive_timeout_ms", stall_ms),
        ("grpc.max_connection_idle_ms", int(1000 * idle_s)),
    ]
