"""The router's end of its relay, which it starts, keeps, and starts again when it ends."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from gpuprof.errors import InputError
from gpuprof.runtime.module_command import module_command
from gpuprof.serving.protocol.grpc_relay import PING, STOP, STOPPED, TURNED_AWAY, WITHOUT_HTTP2, RelayOrder
from gpuprof.serving.protocol.protocol_figures import RelayFigures
from gpuprof.serving.transport.security import Security
from gpuprof.serving.watch.living_process import LivingProcess
from gpuprof.serving.watch.logs import LOGGER
from gpuprof.serving.watch.stalls import read_waited_s

#: Connections that wait to be accepted, as many as the system allows (net.core.somaxconn).
_MOST_UNACCEPTED = (1 << 16) - 1
#: The more there were at once, the more of grpcio's memory stays in pieces that cannot be returned: 10 KB for each.
_MAX_CONNECTIONS = 2048
_MESSAGE_BYTES = 1 << 12
#: One that lived for less is not replaced at once, or it would be started as fast as it can die.
_LONG_LIFE_S = _BACKOFF_S = 1.0
_PATIENCE_S = 8.0
#: A relay that has not answered for so long hangs; it answers between two pieces of work, which take milliseconds. One
#: that starts may have to be read from a slow disk.
_HANG_S, _FIRST_ANSWER_S = 10.0, 60.0
#: Clients that do not offer HTTP/2 are told of so often at most.
_WARN_S = 60.0


class RelayLink:
    """Has a relay accept the clients of gRPC.

    Parameters
    ----------
    security : Security
        Whose certificate it shows.
    per_peer : int
        Connections that one address may have; at most half of all.
    stall_s : float
        A client that does not read for so long is given up.

    Attributes
    ----------
    turned_away : int
        Connections beyond those that an address may have, or that there may be in all.
    """

    def __init__(self, security: Security, per_peer: int, stall_s: float) -> None:
        self._security = security
        self._per_peer = min(per_peer, _MAX_CONNECTIONS // 2)
        self._stall_s = stall_s
        self._listening: list[socket.socket] = []
        self._upstream = -1
        self._process: LivingProcess | None = None
        self._relay: socket.socket | None = None
        self._began = 0.0
        #: Since when it owes an answer, on the clock of `watch` without its waits for a core; None: it owes none.
        self._asked: float | None = None
        self._silent_s = self._waited_s = 0.0
        self._has_answered = False
        self._ends = self._hangs = 0
        self._without_http2, self._warned_at = 0, -math.inf
        self._ended, self._stopped = asyncio.Event(), asyncio.Event()
        self._turned_away_before = self._turned_away = 0

    @property
    def pid(self) -> int:
        """Return the process id of the relay."""
        return 0 if self._process is None else self._process.pid

    @property
    def turned_away(self) -> int:
        """Return how many connections there would have been more."""
        return self._turned_away_before + self._turned_away

    @property
    def figures(self) -> RelayFigures:
        """Return how the relay has fared."""
        return RelayFigures(self._ends - self._hangs, self._hangs, self._silent_s)

    def listen(self, host: str, port: int) -> int:
        """Take a port, on every address of ``host``; return it.

        Raises
        ------
        InputError
            When it cannot be had.
        """
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in dict.fromkeys((one[0], one[4]) for one in found):
                both = host == "::" and socket.has_dualstack_ipv6()
                where = (str(address[0]), port)
                self._listening.append(
                    socket.create_server(where, family=family, backlog=_MOST_UNACCEPTED, dualstack_ipv6=both)
                )
                port = self._listening[0].getsockname()[1]
        except OSError as error:
            self._close_listening()
            if error.errno == errno.EADDRINUSE:
                raise InputError(f"port {port} is taken on {host}", "choose another with --grpc-port") from None
            raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        return port

    def start(self, upstream: Path) -> None:
        """Start the relay; it connects to the socket ``upstream``, which may then lose its name."""
        self._upstream = os.open(upstream, os.O_PATH)
        self._start()

    def watch(self, awake_s: float) -> None:
        """Kill the relay when it has not answered for too long; called periodically.

        Parameters
        ----------
        awake_s : float
            A clock that stands still while the router does, and with it when the machine stands still.
        """
        if self._relay is None or self._process is None:
            return
        # While it waits for a core, which others have, it cannot answer either.
        self._waited_s = max(self._waited_s, read_waited_s(self._process.pid))
        clock = awake_s - self._waited_s
        if self._asked is None:
            self._asked = clock
        self._silent_s = max(0.0, clock - self._asked)
        if self._silent_s > (_HANG_S if self._has_answered else _FIRST_ANSWER_S):
            LOGGER.warning("the relay of gRPC hangs, is replaced", extra={"pid": self.pid})
            self._hangs += 1
            self._asked = math.inf
            self._process.kill()
        with suppress(OSError):  # what it has not read fills its socket
            self._relay.send(PING)

    async def stop_listening(self) -> None:
        """Let no new connection in; those that the system has accepted are relayed."""
        if self._relay is not None:
            with suppress(OSError, TimeoutError):
                self._relay.send(STOP)
                await asyncio.wait_for(self._stopped.wait(), _PATIENCE_S)
        self._close_listening()

    async def close(self) -> None:
        """Let the relay end when clients have been told everything, and wait for it."""
        self._close_listening()
        if self._relay is not None:
            asyncio.get_running_loop().remove_reader(self._relay)
            self._relay.close()
            self._relay = None
        if self._process is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _PATIENCE_S)
            if self._process is not None:
                self._process.kill()
                await self._ended.wait()
        if self._upstream >= 0:
            os.close(self._upstream)
            self._upstream = -1

    def _close_listening(self) -> None:
        for listener in self._listening:
            listener.close()
        self._listening = []

    def _start(self) -> None:
        listening = [listener.fileno() for listener in self._listening]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            order = RelayOrder(
                listening,
                theirs.fileno(),
                self._upstream,
                _MAX_CONNECTIONS,
                self._per_peer,
                self._stall_s,
                self._security.certificate,
                self._security.private_key,
            )
            process = subprocess.Popen(
                module_command("gpuprof.serving.protocol.grpc_relay"),
                pass_fds=(*listening, theirs.fileno(), self._upstream),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
        assert process.stdin is not None
        # By stdin, since it holds the key: arguments can be read by everybody.
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(order.to_json().encode())
        self._began, self._relay = time.monotonic(), ours
        self._process = LivingProcess(process.pid, process)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.fileno(), self._has_ended)
        loop.add_reader(ours, self._hear_relay)

    def _hear_relay(self) -> None:
        assert self._relay is not None
        text = b""
        with suppress(OSError):
            text = self._relay.recv(_MESSAGE_BYTES)
        if not text:  # it has ended
            asyncio.get_running_loop().remove_reader(self._relay)
            return
        self._has_answered, self._asked, self._silent_s = True, None, 0.0
        said = json.loads(text)
        self._turned_away = said.get(TURNED_AWAY, self._turned_away)
        self._warn_of_clients(said.get(WITHOUT_HTTP2, 0))
        if STOPPED in said:
            self._stopped.set()

    def _warn_of_clients(self, without_http2: int) -> None:
        now = time.monotonic()
        if without_http2 > self._without_http2 and now > self._warned_at + _WARN_S:
            more = without_http2 - self._without_http2
            self._without_http2, self._warned_at = without_http2, now
            LOGGER.warning("clients of gRPC offer no HTTP/2 (ALPN h2), are refused", extra={"clients": more})

    def _has_ended(self) -> None:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.fileno())
        self._process.release()
        self._process = None
        self._ended.set()
        self._stopped.set()
        if self._relay is None:  # it was to end
            return
        self._ends += 1
        self._asked, self._has_answered = None, False
        self._silent_s, self._waited_s, self._without_http2 = 0.0, 0.0, 0
        loop.remove_reader(self._relay)
        self._relay.close()
        self._relay = None
        self._turned_away_before, self._turned_away = self.turned_away, 0
        delay_s = 0.0 if time.monotonic() > self._began + _LONG_LIFE_S else _BACKOFF_S
        LOGGER.warning("the relay of gRPC ended, starts again", extra={"in_s": delay_s})
        loop.call_later(delay_s, self._restart)

    def _restart(self) -> None:
        if not self._listening:  # the server stops
            return
        self._ended.clear()
        try:
            self._start()
        except OSError as error:
            LOGGER.error("cannot start the relay of gRPC", extra={"error": str(error), "in_s": _BACKOFF_S})
            asyncio.get_running_loop().call_later(_BACKOFF_S, self._restart)
