"""An open-loop client that sends requests when they are due, with little CPU time.

The client waits with select, whose time-outs are exact to microseconds; event loops round theirs to milliseconds. It
selects on a single epoll object: select on the connections would scan all of them at every event, hundreds under
overload, and take CPU time from the server's workers where they share its cores.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import select
import socket
import ssl
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from http import HTTPStatus
from multiprocessing.connection import Connection as Pipe
from typing import TYPE_CHECKING, NamedTuple

from gpuprof.machine.cores import shorten_wakeup_latency

if TYPE_CHECKING:
    from gpuprof.load.target import NextStep, Target

_MAX_CONNECTIONS = 800  # systems often allow a process 1024 open files
#: Length of an answer without Content-Length, and the end of a chunked answer.
_UNTIL_CLOSED = sys.maxsize
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_METRICS = (b"queue", b"infer", b"total")
#: Interval of the checks for the end, and the delay of a closed loop after a lost request.
_LOOK_S = 0.1
#: Exceptions of a socket that has no data, or accepts none, at the moment.
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests of a client, and their times."""

    host: str
    port: int
    #: Per model, at least one whole HTTP request; several are sent alternately.
    requests: tuple[tuple[bytes, ...], ...]
    times: Sequence[float]  #: Seconds from the start, increasing.
    models: Sequence[int]  #: Position in ``requests`` of each.
    patience_s: float = 10.0  #: Time to wait for the last answers.
    target: Target | None = None  #: Source of the TLS context; None: no TLS.
    #: Closed loop: number of requests of each model in flight; ``times`` is then empty.
    in_flight: tuple[int, ...] = ()
    until_s: float = 0.0  #: Closed loop: when the last request is sent, at the latest.
    steps: tuple[tuple[NextStep, ...], ...] = ()  #: By model, the requests that follow its answers; see `NextStep`.


@dataclass(slots=True)
class SentRequests:
    """Outcome of each request, in the order of the schedule or, in a closed loop, of sending."""

    #: ``sent_s``, ``done_s``: Seconds from the start; ``done_s`` is -1 where no answer came.
    sent_s: array[float] = field(default_factory=lambda: array("d"))
    done_s: array[float] = field(default_factory=lambda: array("d"))
    status: array[int] = field(default_factory=lambda: array("h"))  #: HTTP status; 0 where no answer came.
    cpu_s: float = 0.0  #: CPU time of the sending client.
    #: Closed loop: position of each request's model.
    models: array[int] = field(default_factory=lambda: array("h"))
    #: ``server_ms``, ``queue_ms``, ``infer_ms``: Time in the server, and its parts in the queue and in the model, as
    #: the server reports them; NaN where the server does not, and empty where the client did not ask.
    server_ms: array[float] = field(default_factory=lambda: array("d"))
    queue_ms: array[float] = field(default_factory=lambda: array("d"))
    infer_ms: array[float] = field(default_factory=lambda: array("d"))


class ServerTimes(NamedTuple):
    """Times in ms that a server reports with an answer; NaN where they are missing."""

    queue_ms: float = math.nan  #: Waiting for a batch.
    infer_ms: float = math.nan  #: The model.
    total_ms: float = math.nan


def read_times(value: bytes) -> ServerTimes:
    """Return the times in ``value``, the ``Server-Timing`` header in lower case; unknown metrics are ignored."""
    times = dict.fromkeys(_METRICS, math.nan)
    for metric in value.split(b","):
        name, *parameters = (part.strip() for part in metric.split(b";"))
        if name not in times:
            continue
        for parameter in parameters:
            key, _, text = parameter.partition(b"=")
            if key.strip() == b"dur":
                with suppress(ValueError):
                    duration_ms = float(text.strip(b' "'))
                    times[name] = duration_ms if 0.0 <= duration_ms < float("inf") else math.nan
    return ServerTimes(*times.values())


class Connection:
    """A connection and its current request. ``context``: TLS context of an encrypted connection."""

    __slots__ = (
        "_unsent", "answer", "closing", "expected", "head", "keeps",
        "number", "received", "socket", "tail", "told", "unread",
    )  # fmt: skip

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection((host, port))
        # Nagle's algorithm would hold back the end of a request until the earlier bytes are acknowledged.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.unread: Callable[[], int] = lambda: 0
        if context is not None:
            is_encrypted = context.wrap_socket(self.socket, server_hostname=host)
            self.socket, self.unread = is_encrypted, is_encrypted.pending
        self.socket.setblocking(False)
        self.number = -1
        self._unsent = memoryview(b"")
        self.expected = -1
        self.received = 0
        self.head = self.tail = b""
        self.closing = False
        self.told = ServerTimes()
        self.keeps, self.answer = False, bytearray()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for select."""
        return self.socket.fileno()

    @property
    def is_sending(self) -> bool:
        """Return whether part of the request is still unsent."""
        return len(self._unsent) > 0

    def begin(self, number: int, request: bytes, keeps: bool = False) -> None:
        """Send a request, as much as the socket takes; ``keeps``: whether the whole answer is needed.

        Raises `OSError` as `write` does.
        """
        self.number = number
        self.keeps, self.answer = keeps, bytearray()
        self._unsent = memoryview(request)
        self.expected = -1
        self.received = 0
        self.head = self.tail = b""
        self.write()

    def write(self) -> None:
        """Send more, as much as the socket takes. Raises `OSError` when the server has closed the connection."""
        with suppress(*_LATER):
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def read_answer(self, buffer: bytearray) -> int | None:
        """Read the received bytes; return the HTTP status once the answer is complete, else None.

        Raises `OSError` when the connection ends before the answer is complete.
        """
        while True:
            try:
                count = self.socket.recv_into(buffer)
            except _LATER:
                return None
            if not count:
                if self.expected == _UNTIL_CLOSED and not self.tail:
                    self.closing = True
                    return int(self.head[9:12])
                raise ConnectionResetError("closed by the server")
            if self.keeps:
                self.answer += memoryview(buffer)[:count]
            if self.expected < 0:
                # Keep only the beginning of a large answer: tensors follow the head, and copying them takes time.
                self.head += bytes(memoryview(buffer)[:count]) if self.head or count < 4096 else bytes(buffer[:4096])
                self._read_head()
            self.received += count
            if self.tail:
                # The server sends nothing after an answer before the next request.
                self.tail = (self.tail + buffer[max(0, count - len(_LAST_CHUNK)) : count])[-len(_LAST_CHUNK) :]
                if self.tail == _LAST_CHUNK:
                    return int(self.head[9:12])
            elif 0 <= self.expected <= self.received:
                return int(self.head[9:12])
            if not self.unread():  # select does not see decrypted bytes in the TLS buffer
                return None

    def _read_head(self) -> None:
        end = self.head.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.head[:end].lower()
        # Match the whole name: Triton's answers also have Inference-Header-Content-Length, and have it first.
        first, *lines = head.split(b"\r\n")
        fields = dict(line.split(b":", 1) for line in lines)
        options = fields.get(b"connection", b"")
        # Servers of HTTP/1.0 close the connection unless they announce keep-alive.
        self.closing = b"close" in options or (first.startswith(b"http/1.0") and b"keep-alive" not in options)
        length = fields.get(b"content-length")
        self.expected = _UNTIL_CLOSED if length is None else end + 4 + int(length)
        self.tail = b"-" if length is None and b"chunked" in fields.get(b"transfer-encoding", b"") else b""
        self.told = read_times(fields.get(b"server-timing", b""))


class LoadClient:
    """Sends a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._is_closed = bool(schedule.in_flight)
        #: Closed loop: the due time and the model of the next requests, a heap.
        self._due = [(0.0, model) for model, count in enumerate(schedule.in_flight) for _ in range(count)]
        heapify(self._due)
        self._idle: list[Connection] = []
        self._busy: dict[int, Connection] = {}
        self._events = select.epoll()
        self._buffer = bytearray(1 << 20)
        self._turns = [0] * len(schedule.requests)
        self._context = None if schedule.target is None else schedule.target.context()
        self._steps = schedule.steps or ((),) * len(schedule.requests)
        self._steps_done: dict[int, int] = {}  # by number of the request, of chains only
        count = len(schedule.times)
        self.sent = SentRequests(array("d", bytes(8 * count)), array("d", [-1.0]) * count, array("h", bytes(2 * count)))
        unknown = array("d", [math.nan]) * count
        self.sent.server_ms, self.sent.queue_ms, self.sent.infer_ms = unknown, unknown[:], unknown[:]

    def run(self, start: float) -> SentRequests:
        """Send everything; ``start``: beginning of the schedule on the monotonic clock."""
        shorten_wakeup_latency()
        gc.disable()  # a collection in the middle would be seen as latency
        cpu_s = time.thread_time()
        try:
            if self._is_closed:
                self._run_closed(start)
            else:
                self._run_open(start)
        finally:
            self.sent.cpu_s = time.thread_time() - cpu_s
            gc.enable()
            for connection in (*self._idle, *self._busy.values()):
                connection.socket.close()
            self._events.close()
        return self.sent

    def _run_closed(self, start: float) -> None:
        """Keep a number of requests of each model in flight; each answer releases the next request."""
        until_s = self._schedule.until_s
        while (now := time.monotonic() - start) < until_s or (
            self._busy and now <= until_s + self._schedule.patience_s
        ):
            while now < until_s and self._due and self._due[0][0] <= now:
                _, model = heappop(self._due)
                for column, value in ((self.sent.sent_s, 0.0), (self.sent.done_s, -1.0)):
                    column.append(value)
                for times in (self.sent.server_ms, self.sent.queue_ms, self.sent.infer_ms):
                    times.append(math.nan)
                self.sent.status.append(0)
                self.sent.models.append(model)
                self._send(len(self.sent.sent_s) - 1, model, now)
            self._receive(_LOOK_S, start)

    def _finish(self, number: int, now: float) -> None:
        """Release the next request of a closed loop; after a lost request with a delay, in case the server is down."""
        if self._is_closed:
            heappush(self._due, (now if self.sent.status[number] else now + _LOOK_S, self.sent.models[number]))

    def _run_open(self, start: float) -> None:
        times = self._schedule.times
        count = len(times)
        position = 0
        clock = time.monotonic
        deadline = start + (times[-1] if count else 0.0) + self._schedule.patience_s
        while position < count or (self._busy and clock() < deadline):
            now = clock() - start
            while position < count and times[position] <= now and len(self._busy) < _MAX_CONNECTIONS:
                self._send(position, self._schedule.models[position], now)
                position += 1
                now = clock() - start
            due = times[position] - now if position < count else _LOOK_S
            if len(self._busy) >= _MAX_CONNECTIONS or due > _LOOK_S:
                due = _LOOK_S
            self._receive(max(0.0, due), start)

    def _send(self, number: int, model: int, now: float) -> None:
        requests = self._schedule.requests[model]
        self._turns[model] += 1
        request = requests[self._turns[model] % len(requests)]
        self.sent.sent_s[number] = now
        self._transmit(number, request, now, bool(self._steps[model] and self._steps[model][0].sources))

    def _transmit(self, number: int, request: bytes, now: float, keeps: bool) -> None:
        try:
            connection = self._idle.pop() if self._idle else self._connect()
        except OSError:
            self._finish(number, now)
            return  # counted as lost: no server listens
        try:
            self._busy[connection.fileno()] = connection
            connection.begin(number, request, keeps)
            if connection.is_sending:
                self._events.modify(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)
        except OSError:
            pass  # counted as lost: no answer will come
            if self._busy.get(connection.fileno()) is connection:
                self._drop(connection, now)

    def _connect(self) -> Connection:
        connection = Connection(self._schedule.host, self._schedule.port, self._context)
        self._events.register(connection.fileno(), select.EPOLLIN)
        return connection

    def _receive(self, timeout: float, start: float) -> None:
        select.select([self._events], [], [], timeout)
        for descriptor, event in self._events.poll(0):
            connection = self._busy.get(descriptor)
            if connection is None:
                # The server has closed an idle connection, or sends unrequested data on it.
                for idle in [idle for idle in self._idle if idle.fileno() == descriptor]:
                    self._idle.remove(idle)
                    idle.socket.close()
                continue
            if event & select.EPOLLOUT and not self._write(connection, start):
                continue
            if event & ~select.EPOLLOUT:
                self._read_answer(connection, start)

    def _write(self, connection: Connection, start: float) -> bool:
        """Send more of a request; return whether the connection is still open."""
        try:
            connection.write()
        except OSError:
            self._drop(connection, time.monotonic() - start)
            return False
        if not connection.is_sending:
            self._events.modify(connection.fileno(), select.EPOLLIN)
        return True

    def _read_answer(self, connection: Connection, start: float) -> None:
        try:
            status = connection.read_answer(self._buffer)
        except (OSError, ValueError, KeyError):
            self._drop(connection, time.monotonic() - start)
            return
        if status is None:
            return
        number, now = connection.number, time.monotonic() - start
        self._add_server_times(number, connection.told)
        model = (self.sent if self._is_closed else self._schedule).models[number]
        request, keeps = b"", False
        if self._steps[model] and status == HTTPStatus.OK:
            request, keeps = self._make_next_request(number, model, bytes(connection.answer))
        if not request:
            self.sent.done_s[number], self.sent.status[number] = now, status
        del self._busy[connection.fileno()]
        if connection.closing or connection.is_sending:
            connection.socket.close()  # epoll removes closed sockets by itself
        else:
            self._idle.append(connection)
        if request:
            self._transmit(number, request, now, keeps)
        else:
            self._finish(number, now)

    def _add_server_times(self, number: int, told: ServerTimes) -> None:
        """Add the server times of an answer to those of the chain's earlier steps."""
        columns = self.sent.queue_ms, self.sent.infer_ms, self.sent.server_ms
        for column, spent_ms in zip(columns, told, strict=True):
            is_first = number not in self._steps_done
            column[number] = spent_ms if is_first else column[number] + spent_ms

    def _make_next_request(self, number: int, model: int, answer: bytes) -> tuple[bytes, bool]:
        """Return the request of the chain's next step, and whether its answer is passed on; empty after the last."""
        done = self._steps_done.get(number, 0)
        self._steps_done[number] = done + 1
        if done == len(self._steps[model]):
            del self._steps_done[number]
            return b"", False
        following = self._steps[model][done + 1 : done + 2]
        return self._steps[model][done].make_request(answer, number), any(step.sources for step in following)

    def _drop(self, connection: Connection, now: float) -> None:
        self._busy.pop(connection.fileno(), None)
        connection.socket.close()  # epoll removes closed sockets by itself
        self._finish(connection.number, now)


def run_clients(schedules: Sequence[Schedule]) -> list[SentRequests]:
    """Run a client for each schedule, the first in this process, the others in child processes."""
    context = multiprocessing.get_context("spawn")
    children = []
    for schedule in schedules[1:]:
        parent_end, child_end = context.Pipe()
        process = context.Process(target=_run_in_child, args=(schedule, child_end), daemon=True)
        process.start()
        child_end.close()
        children.append((process, parent_end))
    for _, pipe in children:
        pipe.recv()  # the child has started
    gc.collect()  # before the start: it can take a second
    # All clients start at the same time of the machine's monotonic clock, late enough for all to have received it.
    start = time.monotonic() + 0.05
    for _, pipe in children:
        pipe.send(start)
    results = [LoadClient(schedules[0]).run(start)]
    for process, pipe in children:
        results.append(pipe.recv())
        process.join()
    return results


def _run_in_child(schedule: Schedule, pipe: Pipe) -> None:
    pipe.send(True)
    pipe.send(LoadClient(schedule).run(pipe.recv()))
