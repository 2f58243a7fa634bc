"""A client that sends requests when they are due, whatever the answers do, and takes little time for itself.

It waits with select, whose time-outs are exact to microseconds; event loops round theirs to milliseconds. What it
waits for is one epoll object: select itself would go through all connections at every event, and under overload there
are hundreds of them, all of whose time the server's workers lack where they share its cores.
"""

from __future__ import annotations

import gc
import select
import socket
import ssl
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from gpuprof.machine.scheduling import answer_quickly
from gpuprof.serving.load.payload import Payload

if TYPE_CHECKING:
    from gpuprof.serving.load.target import Target

_RECEIVE_BYTES = 1 << 20
_MAX_CONNECTIONS = 800  # systems often allow a process 1024 open files
_LOST = 0
#: What a socket says that has nothing to give, or takes nothing, at the moment.
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one client sends.

    Attributes
    ----------
    host, port : str, int
    requests : tuple of tuple of bytes
        For each model, one or more whole HTTP requests, sent in turn.
    times : sequence of float
        Seconds from the start, increasing.
    models : sequence of int
        Position in ``requests`` of each.
    patience_s : float
        How long to wait for the last answers.
    target : Target or None
        Where it is encrypted: what tells how.
    """

    host: str
    port: int
    requests: tuple[tuple[bytes, ...], ...]
    times: Sequence[float]
    models: Sequence[int]
    patience_s: float = 10.0
    target: Target | None = None


@dataclass(slots=True)
class SentRequests:
    """What became of each request: all lists are as long as the schedule.

    Attributes
    ----------
    sent_s, done_s : array of float
        Seconds from the start; ``done_s`` is -1 where no answer came.
    status : array of int
        HTTP status; 0 where no answer came.
    cpu_s : float
        CPU time of the client that sent them.
    """

    sent_s: array[float] = field(default_factory=lambda: array("d"))
    done_s: array[float] = field(default_factory=lambda: array("d"))
    status: array[int] = field(default_factory=lambda: array("h"))
    cpu_s: float = 0.0


class Connection:
    """One connection and the request that is on it.

    Parameters
    ----------
    host, port : str, int
    context : SSLContext or None
        It is encrypted.
    """

    __slots__ = ("_payload", "_position", "closing", "expected", "head", "number", "received", "socket", "unread")

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.unread: Callable[[], int] = lambda: 0
        if context is not None:
            encrypted = context.wrap_socket(self.socket, server_hostname=host)
            self.socket, self.unread = encrypted, encrypted.pending
        self.socket.setblocking(False)
        self.number = -1
        self._payload: Payload | None = None
        self._position = 0
        self.expected = -1
        self.received = 0
        self.head = b""
        self.closing = False

    def fileno(self) -> int:
        """Return the socket's file descriptor, for select."""
        return self.socket.fileno()

    @property
    def is_sending(self) -> bool:
        """Whether the socket did not take all of the request yet."""
        return self._payload is not None

    def begin(self, number: int, request: Payload) -> None:
        """Send a request, as much as the socket takes.

        Raises
        ------
        OSError
            As `write`.
        """
        self.number = number
        self._payload, self._position = request, 0
        self.expected = -1
        self.received = 0
        self.head = b""
        self.write()

    def write(self) -> None:
        """Send more, as much as the socket takes.

        Raises
        ------
        OSError
            When the server has closed the connection.
        """
        assert self._payload is not None
        try:
            self._position += self._payload.send(self.socket, self._position)
        except _LATER:
            return
        if self._position == self._payload.size:
            self._payload = None

    def read_answer(self, buffer: bytearray) -> int | None:
        """Take in what has arrived; return the status when the answer is whole.

        Raises
        ------
        OSError
            When the connection has ended before that.
        """
        while True:
            try:
                count = self.socket.recv_into(buffer)
            except _LATER:
                return None
            if not count:
                raise ConnectionResetError("closed by the server")
            if self.expected < 0:
                self.head += bytes(memoryview(buffer)[:count]) if self.head or count < 4096 else bytes(buffer[:4096])
                self._read_head()
            self.received += count
            if 0 <= self.expected <= self.received:
                return int(self.head[9:12])
            if not self.unread():  # decrypted bytes that wait are not seen by select
                return None

    def _read_head(self) -> None:
        end = self.head.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.head[:end].lower()
        # By its whole name: Triton's answers have an Inference-Header-Content-Length, too, and before it.
        fields = dict(line.split(b":", 1) for line in head.split(b"\r\n")[1:])
        self.expected = end + 4 + int(fields[b"content-length"])
        self.closing = fields.get(b"connection", b"").strip() == b"close"


class LoadClient:
    """Sends one schedule.

    Parameters
    ----------
    schedule : Schedule
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._idle: list[Connection] = []
        self._busy: dict[int, Connection] = {}
        self._events = select.epoll()
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._turns = [0] * len(schedule.requests)
        self._context = None if schedule.target is None else schedule.target.context()
        encrypted = self._context is not None
        self._payloads = [[Payload(request, encrypted) for request in own] for own in schedule.requests]
        count = len(schedule.times)
        self.sent = SentRequests(array("d", bytes(8 * count)), array("d", [-1.0]) * count, array("h", bytes(2 * count)))

    def run(self, start: float) -> SentRequests:
        """Send everything; ``start`` is the moment on the monotonic clock that the times count from."""
        answer_quickly()
        gc.collect()
        gc.disable()  # a collection in the middle would be seen as latency
        cpu_s = time.thread_time()
        try:
            self._run(start)
        finally:
            self.sent.cpu_s = time.thread_time() - cpu_s
            gc.enable()
            for connection in (*self._idle, *self._busy.values()):
                connection.socket.close()
            for payload in chain.from_iterable(self._payloads):
                payload.close()
            self._events.close()
        return self.sent

    def _run(self, start: float) -> None:
        times = self._schedule.times
        count = len(times)
        position = 0
        clock = time.monotonic
        deadline = start + (times[-1] if count else 0.0) + self._schedule.patience_s
        while position < count or (self._busy and clock() < deadline):
            now = clock() - start
            while position < count and times[position] <= now and len(self._busy) < _MAX_CONNECTIONS:
                self._send(position, now)
                position += 1
                now = clock() - start
            due = times[position] - now if position < count else 0.1
            if len(self._busy) >= _MAX_CONNECTIONS:
                due = 0.1
            self._receive(max(0.0, due), start)

    def _send(self, number: int, now: float) -> None:
        model = self._schedule.models[number]
        payloads = self._payloads[model]
        self._turns[model] += 1
        payload = payloads[self._turns[model] % len(payloads)]
        self.sent.sent_s[number] = now
        try:
            connection = self._idle.pop() if self._idle else self._connect()
        except OSError:
            return  # counted as lost: nobody is there to answer
        try:
            self._busy[connection.fileno()] = connection
            connection.begin(number, payload)
            if connection.is_sending:
                self._events.modify(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)
        except OSError:
            pass  # counted as lost: it has no answer
            if self._busy.get(connection.fileno()) is connection:
                self._drop(connection)

    def _connect(self) -> Connection:
        connection = Connection(self._schedule.host, self._schedule.port, self._context)
        self._events.register(connection.fileno(), select.EPOLLIN)
        return connection

    def _receive(self, timeout: float, start: float) -> None:
        select.select([self._events], [], [], timeout)
        for descriptor, event in self._events.poll(0):
            connection = self._busy.get(descriptor)
            if connection is None:
                self._forget_idle(descriptor)
                continue
            if event & select.EPOLLOUT and not self._write(connection):
                continue
            if event & ~select.EPOLLOUT:
                self._read_answer(connection, start)

    def _forget_idle(self, descriptor: int) -> None:
        """Drop a connection that the server has closed, or says something on that was not asked for."""
        for connection in [one for one in self._idle if one.fileno() == descriptor]:
            self._idle.remove(connection)
            connection.socket.close()

    def _write(self, connection: Connection) -> bool:
        """Send more of a request; return whether the connection still stands."""
        try:
            connection.write()
        except OSError:
            self._drop(connection)
            return False
        if not connection.is_sending:
            self._events.modify(connection.fileno(), select.EPOLLIN)
        return True

    def _read_answer(self, connection: Connection, start: float) -> None:
        try:
            status = connection.read_answer(self._buffer)
        except (OSError, ValueError, KeyError):
            self._drop(connection)
            return
        if status is None:
            return
        self.sent.done_s[connection.number] = time.monotonic() - start
        self.sent.status[connection.number] = status
        if connection.closing or connection.is_sending:
            self._drop(connection)
        else:
            del self._busy[connection.fileno()]
            self._idle.append(connection)

    def _drop(self, connection: Connection) -> None:
        self._busy.pop(connection.fileno(), None)
        connection.socket.close()  # epoll forgets what is closed


def run_clients(schedules: Sequence[Schedule]) -> list[SentRequests]:
    """Run one client for each schedule, the first in this process, the others in processes of their own."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    pipes = []
    for schedule in schedules[1:]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_run_apart, args=(schedule, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append((process, ours))
    for _, pipe in pipes:
        pipe.recv()  # it is there
    start = time.monotonic() + 0.05
    for _, pipe in pipes:
        pipe.send(start)
    results = [LoadClient(schedules[0]).run(start)]
    for process, pipe in pipes:
        results.append(pipe.recv())
        process.join()
    return results


def _run_apart(schedule: Schedule, pipe: object) -> None:
    pipe.send(True)  # type: ignore[attr-defined]
    pipe.send(LoadClient(schedule).run(pipe.recv()))  # type: ignore[attr-defined]
