"""The front of a server: its sockets, the optional edge, and the shutdown without lost requests."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import time

from gpuprof.serving.edge.edge import Edge, EdgeSettings, find_envoy, listen_error
from gpuprof.serving.protocol.grpc_streams import StreamServer
from gpuprof.serving.protocol.http_api import HttpApi
from gpuprof.serving.protocol.http_connection import HttpConnection
from gpuprof.serving.server_settings import ServerSettings
from gpuprof.serving.watch.logs import LOGGER

#: Time for load balancers to see that the server is not ready and stop sending.
_GRACE_S = 0.15


class Front:
    """Listens for clients: on a TCP port for trusted clients, else on a Unix socket behind the edge.

    Attributes
    ----------
    http_port : int
        Set once `reserve` has returned.
    """

    def __init__(self, settings: ServerSettings, api: HttpApi) -> None:
        self._settings, self._api = settings, api
        self._listener: asyncio.Server | None = None
        self._edge_listener: asyncio.Server | None = None
        self._edge: Edge | None = None
        self._streams: StreamServer | None = None
        self.http_port = 0

    async def reserve(self) -> None:
        """Take the ports, before workers are started: a conflict is reported at once.

        Raises
        ------
        InputError
            When a port is taken.
        UnavailableError
            When the edge is needed and there is no Envoy.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        through_edge = settings.http_through_edge
        if settings.needs_edge:
            binary = await asyncio.to_thread(find_envoy, settings.envoy)
            self._edge = Edge(binary, settings.host, settings.port if through_edge else None, settings.grpc_port)
            edge = self._edge
            self._api.count_edge_restarts = lambda: edge.restarts
            self._edge_listener = await loop.create_unix_server(
                self._connect, str(self._edge.directory / "router"), backlog=socket.SOMAXCONN, start_serving=False
            )
        if through_edge:
            assert self._edge is not None and self._edge.http_port is not None
            self.http_port = self._edge.http_port
            return
        try:
            self._listener = await loop.create_server(
                self._connect, settings.host, settings.port, backlog=socket.SOMAXCONN, start_serving=False
            )
        except OSError as error:
            raise listen_error(settings.host, settings.port, "--port", error) from None
        self.http_port = self._listener.sockets[0].getsockname()[1]

    async def start(self) -> str:
        """Let clients in; return the addresses.

        Raises
        ------
        UnavailableError
            When the edge does not start.
        """
        settings = self._settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        encrypted = "s" if settings.security.certificate else ""
        addresses = [f"http{encrypted}://{host}:{self.http_port}"]
        if self._listener is not None:
            await self._listener.start_serving()
        if self._edge is not None and self._edge_listener is not None:
            await self._edge_listener.start_serving()
            await self._edge.start(
                EdgeSettings(
                    {"pipe": {"path": str(self._edge.directory / "router")}},
                    streams_socket=await self._start_streams(self._edge),
                    token=settings.security.token,
                    max_body_bytes=settings.max_body_bytes,
                    max_connections=settings.max_connections,
                    stall_s=settings.stall_s,
                    idle_s=settings.idle_s,
                ),
                settings.security.certificate,
                settings.security.private_key,
            )
            if self._edge.grpc_port is not None:
                addresses.append(f"grpc{encrypted}://{host}:{self._edge.grpc_port}")
        return " and ".join(addresses)

    async def watch(self, now: float) -> None:
        """Close stalled and idle connections; called now and then with the monotonic time."""
        for connection in list(self._api.connections):
            connection.watch(now, self._settings.stall_s, self._settings.idle_s)
        if self._streams is not None:
            await self._streams.watch()

    async def drain(self) -> None:
        """Answer the requests received or being received, then return."""
        router = self._api.router
        router.draining = True
        await asyncio.sleep(_GRACE_S)
        if self._streams is not None:
            await self._streams.watch()
            self._streams.drain()
        if self._edge is not None:
            await self._edge.drain()
        self._stop_listening()
        deadline = time.monotonic() + self._settings.drain_s
        idle_checks = 0
        while idle_checks < 2 and time.monotonic() < deadline:
            active = 0 if self._edge is None else await self._edge.count_active()
            now = time.monotonic()
            idle = not active and not router.in_flight and all(c.can_close(now) for c in self._api.connections)
            idle_checks = idle_checks + 1 if idle else 0
            await asyncio.sleep(_GRACE_S / 2)
        if idle_checks < 2:
            busy = sum(connection.busy for connection in self._api.connections)
            unfinished = {"requests": router.in_flight, "connections_waiting_for_an_answer": busy}
            LOGGER.warning("stopped before all was answered", extra={"unfinished": unfinished})

    async def close(self) -> None:
        """Close all sockets and end the edge."""
        if self._edge is not None:
            await self._edge.close()
        if self._streams is not None:
            await self._streams.close()
        for listener in (self._listener, self._edge_listener):
            if listener is not None:
                listener.close()
        for connection in list(self._api.connections):
            connection.close()

    def _connect(self) -> HttpConnection:
        return HttpConnection(self._api)

    async def _start_streams(self, edge: Edge) -> str | None:
        """Start the server of gRPC streams; return its socket, None without grpcio."""
        if edge.grpc_port is None:
            return None
        if any(importlib.util.find_spec(name) is None for name in ("grpc", "grpc_health", "grpc_reflection")):
            LOGGER.warning("gRPC is served without streams and reflection", extra={"install": "gpuprof-onnx[edge]"})
            return None
        self._streams = StreamServer(self._api)
        path = str(edge.directory / "streams")
        await self._streams.start(path)
        return path

    def _stop_listening(self) -> None:
        """Stop listening; connections already accepted by the kernel are served, not reset."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        waiting = []
        for listening_socket in listener.sockets:
            with socket.socket(fileno=os.dup(listening_socket.fileno())) as duplicate:
                duplicate.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        waiting.append(duplicate.accept()[0])
        listener.close()
        loop = asyncio.get_running_loop()
        for connection in waiting:
            connection.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(self._connect, connection))
            task.add_done_callback(lambda ended: ended.exception())
