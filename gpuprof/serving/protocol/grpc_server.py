"""The Open Inference Protocol over gRPC: grpcio's asyncio server, in the router's process.

HTTP/2, with everything that a client can do to it, is the C core's, which reads and writes in threads of its own
without Python's lock; what it hands over are whole messages of a bounded size, as they were sent (`grpc_reader`). A
process of its own in front of the router has not been built or measured: every request would cross one process more on
its way to a worker, and large tensors would be copied once more. What this way costs beside a bare echo of grpcio
`bench.serving --only grpc` prints.
"""

from __future__ import annotations

import asyncio
import math
import time
from http import HTTPStatus
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from gpuprof.errors import InputError
from gpuprof.serving.protocol.grpc_connection_bytes import ConnectionBytes, Peer
from gpuprof.serving.protocol.grpc_connections import ConnectionLimit
from gpuprof.serving.protocol.grpc_guard import ConnectionGuard
from gpuprof.serving.protocol.grpc_head_fields import HEAD_FIELDS
from gpuprof.serving.protocol.grpc_inference import InferenceCalls
from gpuprof.serving.protocol.grpc_methods import (
    CallLimits,
    GuardedMethods,
    inference_methods,
    standard_methods,
)
from gpuprof.serving.protocol.grpc_reader import WEIGH_S, MessageReader
from gpuprof.serving.protocol.open_inference import SERVICE
from gpuprof.serving.protocol.protocol_parts import ProtocolParts
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.security import OPEN, Security
from gpuprof.serving.watch.logs import LOGGER

_MAX_STREAMS = 1000
#: The more there were at once, the more of the memory stays in pieces that cannot be returned: some 10 KB for each.
_MAX_CONNECTIONS = 2048
_MAX_CALLS = 20_000
_MAX_METADATA_BYTES = 1 << 14
#: Of a message that nobody waits for yet; one that is waited for may be sent as fast as it goes.
_LOOKAHEAD_BYTES = 1 << 16
_HANDSHAKE_S = 10.0
_NO_MESSAGES = RefusedError(
    HTTPStatus.TOO_MANY_REQUESTS, "the connection sends much that is no message", reason="control frames"
)
#: Connections are looked at so often, and for no more than this part of the time.
_LOOK_S, _LOOK_PART = 0.1, 0.05
_LEAST_BYTES_PER_S = 1 << 20
#: Who was shut out is logged so seldom, and of so many.
_TELL_S, _TOLD = 1.0, 20
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
        self._security = security
        shared = ProtocolParts() if shared is None else shared
        self._count_refusal = shared.count_refusal
        self._per_peer = min(per_peer, _MAX_CONNECTIONS // 2)
        self.port = 0
        self._connections = ConnectionLimit(self.port, self._per_peer)
        self._health = health.aio.HealthServicer()
        receive_s = stall_s + max_message_bytes / _LEAST_BYTES_PER_S
        self._bytes = ConnectionBytes(max_message_bytes)
        self._reader = MessageReader(router.arena, max_message_bytes, self._bytes)
        self._limits = CallLimits(self._reader, receive_s, per_peer, shared.count_refusal)
        calls = InferenceCalls(router, self._reader, receive_s, shared)
        methods = inference_methods(router, calls, self._limits) | standard_methods(self._health, self._limits)
        options = _options(max_message_bytes, stall_s, idle_s)
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        self._server.add_generic_rpc_handlers((GuardedMethods(methods, security, shared.count_refusal),))
        HEAD_FIELDS.limit()
        self._told = -math.inf
        self._guard: ConnectionGuard | None = None
        self._was_ready: bool | None = None
        self._watching: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port.

        Raises
        ------
        InputError
            When the port is taken.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._security.private_key:
                pair = (self._security.private_key.encode(), self._security.certificate.encode())
                bound = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
            else:
                bound = self._server.add_insecure_port(address)
        except RuntimeError:
            raise InputError(f"port {port} is taken on {host}", "choose another with --grpc-port") from None
        await self.watch(time.monotonic())
        await self._server.start()
        self.port = int(bound)
        self._connections = ConnectionLimit(self.port, self._per_peer)
        loop = asyncio.get_running_loop()

        def note_shut_out(peers: list[Peer]) -> None:
            loop.call_soon_threadsafe(self._note_shut_out, peers)

        self._guard = ConnectionGuard(self.port, self._bytes, self._reader.measure_memory, note_shut_out)
        self._guard.start()
        self._watching = [asyncio.ensure_future(work()) for work in (self._weigh, self._watch_connections)]
        return self.port

    async def stop(self, grace_s: float) -> None:
        """Take no more calls and wait for those that are there."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def close(self) -> None:
        """Close the port and all connections."""
        for task in self._watching:
            task.cancel()
        if self._guard is not None:
            await asyncio.to_thread(self._guard.end)
        await self._server.stop(None)

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
        return self._limits.peers.turned_away + self._connections.turned_away

    def measure_idle_bytes(self) -> None:
        """Take the memory that the process has now for its own; called when nothing is asked of it."""
        self._reader.measure_idle_bytes()

    async def _weigh(self) -> None:
        while True:
            await asyncio.sleep(WEIGH_S)
            self._reader.weigh()

    async def _watch_connections(self) -> None:
        """Shut out connections that are too many for their address, and those that send what is no message."""
        looked = time.monotonic()
        while True:
            began = time.monotonic()
            explained = self._bytes.explain()
            received = await asyncio.to_thread(self._connections.enforce)
            ended = time.monotonic()
            futile = self._bytes.judge(explained, received, ended - looked)
            looked = ended
            if futile:
                self._note_shut_out(await asyncio.to_thread(self._connections.shut_out, futile))
            await asyncio.sleep(max(_LOOK_S, (ended - began) / _LOOK_PART))

    def _note_shut_out(self, peers: list[Peer]) -> None:
        for _ in peers:
            self._count_refusal(_NO_MESSAGES)
        if peers and (now := time.monotonic()) > self._told + _TELL_S:
            self._told = now
            LOGGER.warning("connections of gRPC were closed that sent no messages", extra={"peers": peers[:_TOLD]})


def _options(max_message_bytes: int, stall_s: float, idle_s: float) -> list[tuple[str, Any]]:
    """Return the arguments of the C core: what one connection, and all together, may cost.

    A connection whose peer acknowledges no ping is closed, and by TCP's own timeout (TCP_USER_TIMEOUT, which these
    settings turn on) one whose peer reads nothing. Of a message that is not waited for only so much is received: the
    window does not grow with the speed of the line.
    """
    stall_ms = int(1000 * stall_s)
    return [
        # Or a second server could listen on the same port, and each would get a part of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Inflated by `grpc_reader`, when there is memory for it.
        ("grpc.per_message_decompression", 0),
        ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE_S)),
        ("grpc.keepalive_time_ms", stall_ms),
        ("grpc.keepalive_timeout_ms", stall_ms),
        ("grpc.max_connection_idle_ms", int(1000 * idle_s)),
    ]
