"""The server: its workers, ports, edge and supervision, and the shutdown without lost requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuprof.errors import GpuprofError
from gpuprof.machine.cores import avoid_cores, shorten_wakeup_latency
from gpuprof.serving.change.adapt import Adapter
from gpuprof.serving.change.shadow import StandbyController
from gpuprof.serving.change.worker_fleet import PlanChange, WorkerFleet
from gpuprof.serving.control import control_path, open_control
from gpuprof.serving.edge.edge import Edge, EdgeSettings, find_envoy, listen_error
from gpuprof.serving.engine import Engine, LocalEngine
from gpuprof.serving.plan.serving_plan import MapSource, Planner
from gpuprof.serving.protocol.grpc_streams import StreamServer
from gpuprof.serving.protocol.http_api import HttpApi, HttpConnection
from gpuprof.serving.router.router import Router
from gpuprof.serving.server_settings import ServerSettings
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.watch.logs import LOGGER

#: Environment variable; if 1, freed tensor memory is overwritten at once, so that tests detect reads after release.
POISON_VARIABLE = "GPUPROF_POISON"
_WATCH_S = 0.5

#: Called with the server's address, and the numbers of models and workers.
Ready = Callable[[str, int, int], None]


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

        Raises `InputError` when a port is taken; `UnavailableError` when the edge is needed and there is no Envoy.
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
        """Start accepting clients; return the addresses.

        Raises `UnavailableError` when the edge does not start.
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
        """Close stalled and idle connections; called periodically with the monotonic time."""
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
        """Stop listening; connections that the kernel has already accepted are served, not reset."""
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


class Server:
    """Serves a plan.

    Parameters
    ----------
    source : MapSource
    planner : Planner
    settings : ServerSettings
    engine : Engine or None
        Runs the machines; None: the engine of this machine alone.
    """

    def __init__(
        self, source: MapSource, planner: Planner, settings: ServerSettings, engine: Engine | None = None
    ) -> None:
        self._source = source
        self._planner = planner
        self._settings = settings
        self._stop = asyncio.Event()
        self._arena = Arena(settings.buffer_bytes, poison=os.environ.get(POISON_VARIABLE) == "1")
        self.router = Router(self._arena, settings.tracer)
        self._engine = engine or LocalEngine(self._arena)
        self._engine.on_moved = lambda: self._start_controller(self._follow_machines())
        self._worker_fleet = WorkerFleet(self.router, self._engine, settings.hang_s, settings.drain_s)
        self._api = HttpApi(self.router, settings)
        self._front = Front(settings, self._api)
        self._controllers: list[asyncio.Task[None]] = []
        self._adapter: Adapter | None = None

    async def run(self, ready: Ready) -> None:
        """Serve until a stop signal; ``ready`` is called with the address and the numbers of models and workers.

        Raises `GpuprofError` when the port is taken, or a worker cannot have its share or load its model.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_stop_signal)
        watch = asyncio.ensure_future(self._watch())
        try:
            await self._front.reserve()
            await self._start_workers()
            if not self._stop.is_set():
                where = await self._front.start()
                port = self._front.http_port
                control = await open_control(port, self._apply)
                self._start_controllers()
                gc.collect()
                gc.freeze()  # existing objects live as long as the server
                ready(where, len(self.router.list_entries()), self._worker_fleet.count_processes())
                await self._stop.wait()
                control.close()
                control_path(port).unlink(missing_ok=True)
                self._stop_controllers()
                await self._front.drain()
        finally:
            watch.cancel()
            self._stop_controllers()
            await self._front.close()
            await self._worker_fleet.stop()
            await self._engine.close()
            if self._settings.tracer is not None:
                await asyncio.to_thread(self._settings.tracer.close)
            self._arena.close()

    def _on_stop_signal(self) -> None:
        if self._stop.is_set():  # second signal: stop at once; machines see it and end their workers
            os._exit(130)
        self._stop.set()

    async def _start_workers(self) -> None:
        """Start the plan's workers; return when all are ready, or at an earlier stop signal."""
        started = asyncio.ensure_future(self._move(self._source))
        stop = asyncio.ensure_future(self._stop.wait())
        futures: set[asyncio.Future[Any]] = {started, stop}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not started.done():
            started.cancel()
        with suppress(asyncio.CancelledError):
            await started

    def _start_controllers(self) -> None:
        """Start the controllers that change workers automatically: standbys, and the adapter."""
        if self._settings.shadow:
            self._start_controller(StandbyController(self.router, self._worker_fleet).watch())
        if self._settings.adapt is not None:
            self._adapter = Adapter(self.router, self._source.deployment, self._settings.adapt, self._apply)
            self._start_controller(self._adapter.watch())

    def _start_controller(self, controller: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(controller)
        task.add_done_callback(_log_failure)
        self._controllers.append(task)

    def _stop_controllers(self) -> None:
        for controller in self._controllers:
            controller.cancel()

    async def _apply(self, path: Path) -> dict[str, Any]:
        """Change to the map at ``path``."""
        source = await asyncio.to_thread(MapSource.read_map, path)
        move = await self._move(source)
        self._source = source
        if self._adapter is not None:
            self._adapter.follow(source.deployment)
        LOGGER.info("moved to another map", extra={"map": str(path), **asdict(move)})
        return asdict(move)

    async def _follow_machines(self) -> None:
        """Plan the same map again after a machine was replaced, because the new one may have other cores and GPUs."""
        try:
            move = await self._move(self._source)
        except GpuprofError as error:
            LOGGER.error("the map does not fit the machine that came", extra={"error": str(error)})
        else:
            LOGGER.info("moved to other machines", extra=asdict(move))

    async def _move(self, source: MapSource) -> PlanChange:
        """Plan the workers of a map on the current machines, and change to them."""
        parts = await self._engine.parts(self._planner.nodes(source))
        plan = await asyncio.to_thread(self._planner.plan, source, parts)
        move = await self._worker_fleet.move(source.deployment, plan)
        avoid_cores(self._worker_fleet.local_cores())
        return move

    async def _watch(self) -> None:
        """Replace hung workers, close stalled connections, and drop the requests of disconnected clients."""
        watched, pardoned_until = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            if now - watched > 2.0 * _WATCH_S:  # after a stall of this process answers may wait to be read
                pardoned_until = now + self._settings.hang_s
            watched = now
            if now >= pardoned_until:
                for worker in self._worker_fleet.workers:
                    worker.watch(now)
            await self._front.watch(now)
            for model in self.router.list_models():
                model.forget_cancelled()
            self._arena.trim()


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log the unexpected end of a controller; serving continues without it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        LOGGER.error("no more decisions are made", extra={"error": f"{type(error).__name__}: {error}"})


def run_server(
    source: MapSource,
    planner: Planner,
    settings: ServerSettings,
    ready: Ready,
    engine: Engine | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises `GpuprofError` as `Server.run`.
    """
    import resource

    import uvloop

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # as many connections as the system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    shorten_wakeup_latency()

    async def main() -> None:
        await Server(source, planner, settings, engine).run(ready)

    uvloop.run(main())
