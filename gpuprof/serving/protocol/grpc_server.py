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

from gpuprof.errors import UnavailableError
from gpuprof.serving.protocol.grpc_health import HealthService, health_methods
from gpuprof.serving.protocol.grpc_inference import InferenceCalls
from gpuprof.serving.protocol.grpc_methods import (
    MAX_CALLS,
    CallLimits,
    GuardedMethods,
    inference_methods,
)
from gpuprof.serving.protocol.grpc_reader import WEIGH_S, MessageReader
from gpuprof.serving.protocol.grpc_reflection_methods import reflection_methods
from gpuprof.serving.protocol.grpc_relay_link import RelayLink
from gpuprof.serving.protocol.grpc_stream import InferStream
from gpuprof.serving.protocol.open_inference import SERVICE
from gpuprof.serving.protocol.protocol_figures import RelayFigures
from gpuprof.serving.protocol.protocol_parts import ProtocolParts
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.security import OPEN, Security

_MAX_STREAMS = 1000
#: Of a message that nobody waits for yet; one that is waited for may be sent as fast as it goes.
_LOOKAHEAD_BYTES = 1 << 16
_LEAST_BYTES_PER_S = 1 << 20
#: When it stops, grpcio waits for 20 s for clients that answer no ping; where so often there was no call, nobody does.
_QUIET_S, _QUIET_TURNS = 0.1, 15


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
        self._health = HealthService([SERVICE])
        receive_s = stall_s + max_message_bytes / _LEAST_BYTES_PER_S
        self._reader = MessageReader(router.arena, max_message_bytes)
        self._limits = CallLimits(self._reader, receive_s, per_peer, shared.count_refusal)
        self._streams: set[InferStream] = set()
        calls = InferenceCalls(router, self._reader, receive_s, shared)
        methods = inference_methods(router, calls, self._limits, self._streams)
        methods |= health_methods(self._health, self._limits) | reflection_methods(self._limits)
        options = _options(max_message_bytes, stall_s, idle_s)
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((GuardedMethods(methods, security, shared.count_refusal),))
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
            self.watch(time.monotonic())
            await self._server.start()
            self._relay.start(path)
        self._weighing = asyncio.ensure_future(self._weigh())
        return self.port

    async def stop(self, grace_s: float) -> None:
        """Take no more calls and wait for those that are there."""
        self._health.end()
        await self._relay.stop_listening()
        for stream in list(self._streams):
            stream.stop()
        stopping, quiet = asyncio.ensure_future(self._server.stop(grace_s)), 0
        while not stopping.done() and quiet < _QUIET_TURNS:
            await asyncio.wait([stopping], timeout=_QUIET_S)
            quiet = 0 if self._limits.clients or self._router.arena.charged else quiet + 1

    async def close(self) -> None:
        """Close the port and all connections."""
        if self._weighing is not None:
            self._weighing.cancel()
        await self._server.stop(None)
        await self._relay.close()
        self._reader.weigh()  # messages that were not whole are gone

    def watch(self, now: float) -> None:
        """End calls that do not go on, and have the health service say whether every model can be answered."""
        self._reader.watch(now)
        self._health.tell(self._router.is_ready)

    def watch_relay(self, awake_s: float) -> None:
        """Replace the relay where it hangs; ``awake_s``: a clock that stands still while the router does."""
        self._relay.watch(awake_s)

    @property
    def relay_figures(self) -> RelayFigures:
        """How the relay has fared."""
        return self._relay.figures

    @property
    def open_calls(self) -> int:
        """Calls that are not answered yet."""
        return self._limits.open_calls

    @property
    def turned_away(self) -> int:
        """Calls and connections beyond those that an address may have."""
        return self._limits.turned_away + self._relay.turned_away

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
