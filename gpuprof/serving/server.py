"""The server: starts the workers of a plan, opens its ports, supervises clients and workers, and drains."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.errors import GpuprofError, InputError
from gpuprof.machine.core_sharing import CoreSharing
from gpuprof.machine.scheduling import shorten_wakeup_latency
from gpuprof.serving.change.adapt import Adapter
from gpuprof.serving.change.shadow import StandbyController
from gpuprof.serving.change.worker_fleet import PlanChange, WorkerFleet
from gpuprof.serving.control import control_path, open_control
from gpuprof.serving.engines.local_engine import Engine, LocalEngine
from gpuprof.serving.handshake_turns import HandshakeTurns
from gpuprof.serving.listening import ConnectionAcceptor, stop_listening
from gpuprof.serving.plan.planner import MapSource, Planner
from gpuprof.serving.protocol.http_api import HttpApi
from gpuprof.serving.protocol.http_connection import HttpConnection
from gpuprof.serving.protocol.protocol_parts import ProtocolParts
from gpuprof.serving.router.router import Router
from gpuprof.serving.server_settings import ServerSettings
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.security import is_loopback
from gpuprof.serving.watch.garbage import GarbageCollection
from gpuprof.serving.watch.logs import LOGGER
from gpuprof.serving.watch.memory import FreeMemory, set_up_heaps
from gpuprof.serving.watch.stalls import StallMeter

if TYPE_CHECKING:
    from gpuprof.serving.protocol.grpc_server import GrpcServer

#: Set to 1, whatever memory of tensors is given back is overwritten at once, so that tests see who still reads it.
POISON_VARIABLE = "GPUPROF_POISON"
_WATCH_S = 0.5
_GRACE_S = 0.15
#: Connections that wait to be accepted, as many as the system allows (net.core.somaxconn): clients of one more believe
#: that they are connected, and what they send comes after one, three or seven seconds, when they are told again.
_MOST_UNACCEPTED = (1 << 16) - 1

#: Makes what keeps the machines; given the arena and `ServerSettings`.
EngineMaker = Callable[[Arena, ServerSettings], Engine]
#: Told where a server listens, and how many models and workers it has.
Ready = Callable[[str, int, int], None]


class Server:
    """Serves a plan.

    Parameters
    ----------
    source : MapSource
    planner : Planner
    settings : ServerSettings
    make_engine : callable
        By default that of one machine.
    """

    def __init__(
        self, source: MapSource, planner: Planner, settings: ServerSettings, make_engine: EngineMaker | None = None
    ) -> None:
        self._source = source
        self._planner = planner
        self._settings = settings
        self._stop = asyncio.Event()
        self._cores = CoreSharing()
        self.stalls = StallMeter(time.monotonic())
        self._arena = Arena(settings.buffer_bytes, poison=os.environ.get(POISON_VARIABLE) == "1")
        self._garbage = GarbageCollection()
        self._memory = FreeMemory(self._arena, time.monotonic())
        self.router = Router(self._arena, settings.tracer)
        self._engine = make_engine(self._arena, settings) if make_engine else LocalEngine(self._arena, settings.hang_s)
        self._engine.on_moved = lambda: self._start_controller(self._follow_machines())
        self._worker_fleet = WorkerFleet(self.router, self._engine, settings.routing, settings.hang_s, settings.drain_s)
        guarded = bool(settings.security.token) or not is_loopback(settings.host)
        self._api = HttpApi(
            self.router,
            settings.max_body_bytes,
            settings.security.admits,
            None if guarded else {settings.host.lower(), "localhost.localdomain"},
            settings.connections_per_peer,
            self.stalls,
        )
        self.router.on_change(self._api.forget_routes)
        self._grpc: GrpcServer | None = None
        self._acceptor: ConnectionAcceptor | None = None
        self._handshakes = HandshakeTurns(self._open_connection)
        self._api.turned_away_elsewhere = self._count_turned_away
        self._api.find_relay_figures = lambda: None if self._grpc is None else self._grpc.relay_figures
        self._controllers: list[asyncio.Task[None]] = []
        self._adapter: Adapter | None = None

    async def run(self, ready: Ready) -> None:
        """Serve until told to stop; ``ready`` is called with the address and the numbers of models and workers.

        Raises
        ------
        GpuprofError
            When the port is taken, or a worker cannot hold its share or load its model.
        """
        listener = await self._listen()
        self._handle_signals()
        watch, listen = asyncio.ensure_future(self._watch()), asyncio.ensure_future(self.stalls.run())
        try:
            await self._start_workers()
            if not self._stop.is_set():
                addresses = [await self._open_grpc()] if self._settings.grpc_port is not None else []
                # The port was taken before the workers started, to know of a conflict at once; now clients are let in.
                self._acceptor = ConnectionAcceptor(listener.sockets, self._accept_connection, self._api.find_lane)
                if self._settings.security.context is None:
                    await listener.start_serving()
                else:
                    self._acceptor.accept_all(_MOST_UNACCEPTED)
                host, port = listener.sockets[0].getsockname()[:2]
                control = await open_control(port, self._apply)
                self._start_controllers()
                self._garbage.start()
                scheme = "http" if self._settings.security.context is None else "https"
                where = " and ".join([f"{scheme}://{_format_host(host)}:{port}", *addresses])
                self.stalls.forget()
                ready(where, len(self.router.list_models()), len(self._worker_fleet.workers))
                await self._stop.wait()
                control.close()
                control_path(port).unlink(missing_ok=True)
                self._stop_controllers()
                await self._drain(listener)
        finally:
            self._garbage.stop()
            watch.cancel()
            listen.cancel()
            self._stop_controllers()
            for accepted in self._close_acceptor():
                accepted.close()
            listener.close()
            for connection in self._api.connections:
                connection.close()
            if self._grpc is not None:
                await self._grpc.close()
            self._api.pool.close()
            await self._worker_fleet.stop()
            await self._engine.close()
            if self._settings.tracer is not None:
                await asyncio.to_thread(self._settings.tracer.close)
            self._arena.close()

    async def _listen(self) -> asyncio.Server:
        settings = self._settings
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_server(
                self._make_connection,
                settings.host,
                settings.port,
                backlog=_MOST_UNACCEPTED,
                start_serving=False,
            )
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            if error.errno == errno.EADDRINUSE:
                raise InputError(
                    f"port {settings.port} is taken on {settings.host}", "choose another with --port"
                ) from None
            raise InputError(
                f"cannot listen on {where}: {error.strerror or error}",
                "another --port, or with --host an address of this machine",
            ) from None

    async def _open_grpc(self) -> str:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core would print whatever clients do wrong
        from gpuprof.serving.protocol.grpc_server import GrpcServer

        settings = self._settings
        assert settings.grpc_port is not None
        self._grpc = GrpcServer(
            self.router,
            settings.max_body_bytes,
            settings.security,
            settings.stall_s,
            settings.idle_s,
            ProtocolParts(self._api.pool, self._api.turns, partial(self._api.count_refusal, protocol="grpc")),
            settings.connections_per_peer,
        )
        port = await self._grpc.start(settings.host, settings.grpc_port)
        scheme = "grpc" if settings.security.context is None else "grpcs"
        return f"{scheme}://{_format_host(settings.host)}:{port}"

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_stop_signal)

    def _on_stop_signal(self) -> None:
        if self._stop.is_set():  # told twice: at once; machines see it and end their workers
            os._exit(130)
        self._stop.set()

    async def _start_workers(self) -> None:
        """Start the plan's workers; return when all are ready, or when told to stop before."""
        started = asyncio.ensure_future(self._move(self._source))
        stopped = asyncio.ensure_future(self._stop.wait())
        either: set[asyncio.Future[Any]] = {started, stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not started.done():
            started.cancel()
        with suppress(asyncio.CancelledError):
            await started

    def _start_controllers(self) -> None:
        """Start the controllers that change the workers on their own: standbys, and the adapter."""
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
        """Plan the same map again: a machine was replaced by one that may have other cores and GPUs."""
        try:
            move = await self._move(self._source)
        except GpuprofError as error:
            LOGGER.error("the map does not fit the machine that came", extra={"error": str(error)})
        else:
            LOGGER.info("moved to other machines", extra=asdict(move))

    async def _move(self, source: MapSource) -> PlanChange:
        """Plan the workers of a map on the present machines, and change to them."""
        parts = await self._engine.parts(self._planner.nodes(source))
        plan = await asyncio.to_thread(self._planner.plan, source, parts)
        move = await self._worker_fleet.move(source.deployment, plan)
        self._cores.take(self._worker_fleet.local_cores())
        return move

    async def _watch(self) -> None:
        """Replace hung workers, close stalled connections, and drop the requests of clients that have disconnected."""
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            for worker in self._worker_fleet.workers:
                worker.watch(now, self.stalls.stalled_since)
            self._engine.watch(self.stalls.awake_s(now))
            self._cores.watch(now)
            for connection in self._api.connections:
                idle_s = now - connection.progress.touched
                if connection.is_idle:
                    if idle_s > self._settings.idle_s:
                        connection.close()
                elif connection.is_overdue(now, self._settings.stall_s):
                    connection.abort()
            if self._grpc is not None:
                self._grpc.watch(now)
                self._grpc.watch_relay(self.stalls.awake_s(now))
            for model in self.router.list_models():
                model.forget_cancelled()
            self._garbage.collect(self._count_open())
            if await self._memory.return_free(now, bool(self.router.in_flight)) and self._grpc is not None:
                self._grpc.measure_idle_bytes()

    def _count_open(self) -> int:
        """Return how many calls of gRPC, connections of HTTP and requests there are."""
        calls = 0 if self._grpc is None else self._grpc.open_calls
        return calls + len(self._api.connections) + self.router.in_flight

    def _make_connection(self) -> HttpConnection:
        """Return the protocol for a connection that the loop has accepted, and accept more in the same turn."""
        if self._acceptor is not None:
            self._acceptor.accept_more()
        return HttpConnection(self._api)

    async def _accept_connection(self, connection: socket.socket) -> None:
        """Serve a connection that the acceptor, not the loop, has accepted."""
        if self._settings.security.context is None:
            await self._open_connection(connection)
        else:
            await self._handshakes.shake_hands(connection)

    async def _open_connection(self, connection: socket.socket) -> None:
        loop, context = asyncio.get_running_loop(), self._settings.security.context
        await loop.connect_accepted_socket(lambda: HttpConnection(self._api), connection, ssl=context)

    def _count_turned_away(self) -> int:
        return self._handshakes.turned_away + (0 if self._grpc is None else self._grpc.turned_away)

    def _close_acceptor(self) -> list[socket.socket]:
        return [] if self._acceptor is None else self._acceptor.close()

    async def _stop_listening(self, listener: asyncio.Server) -> None:
        """Stop listening; connections that the kernel has accepted already are served, not reset."""
        waiting = self._close_acceptor() + stop_listening(listener.sockets)
        listener.close()
        for connection in waiting:
            connection.setblocking(False)
        # At once, and whatever becomes of one: clients that say nothing must not keep the others waiting.
        await asyncio.gather(*map(self._accept_connection, waiting), return_exceptions=True)

    async def _drain(self, listener: asyncio.Server) -> None:
        """Answer the requests that have come or are being received, then return."""
        self.router.draining = True
        await asyncio.sleep(_GRACE_S)  # load balancers see that it is not ready and send no more
        await self._stop_listening(listener)
        if self._grpc is not None:
            await self._grpc.stop(self._settings.drain_s)
        deadline = time.monotonic() + self._settings.drain_s
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline:
            now = time.monotonic()
            idle = not self.router.in_flight and all(c.can_close(now) for c in self._api.connections)
            quiet = quiet + 1 if idle else 0
            await asyncio.sleep(_GRACE_S / 2)
        if quiet < 2:
            LOGGER.warning("stopped before all was answered", extra={"unfinished": self._list_unfinished()})

    def _list_unfinished(self) -> dict[str, object]:
        """Return the unfinished work, for the log."""
        owing = [connection for connection in self._api.connections if not connection.is_idle]
        busy = sum(connection.busy for connection in owing)
        return {"requests": self.router.in_flight, "connections": len(owing), "of_these_waiting_for_an_answer": busy}


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log that a controller has ended, which it never should; serving goes on without it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        LOGGER.error("no more decisions are made", extra={"error": f"{type(error).__name__}: {error}"})


def _format_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def run_server(
    source: MapSource,
    planner: Planner,
    settings: ServerSettings,
    ready: Ready,
    make_engine: EngineMaker | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises
    ------
    GpuprofError
        As `Server.run`.
    """
    import uvloop

    _raise_file_limit()
    set_up_heaps()
    shorten_wakeup_latency()

    async def main() -> None:
        await Server(source, planner, settings, make_engine).run(ready)

    uvloop.run(main())


def _raise_file_limit() -> None:
    """Allow as many connections as the system does."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
