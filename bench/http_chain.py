"""Two processes that pass each HTTP request on and back and do nothing else: what `bench.serving` cannot go below.

    python -m bench.http_chain REQUEST_BYTES < ANSWER

The first counts the bytes of requests in uvloop and sends a message over a Unix socket; the second sends it back, and
the first then writes the given answer. It prints its port, and serves until it is ended.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from typing import cast

import uvloop

from gpuprof.machine.cores import shorten_wakeup_latency

#: About the size of the router's message for a small request.
_MESSAGE = bytes(64)


class _Peer(asyncio.BufferedProtocol):
    """A connection that receives into one buffer."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray(1 << 20)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, hint: int) -> bytearray:
        return self._buffer


class _Worker(_Peer):
    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.waiting: deque[asyncio.Transport] = deque()
        self._answer, self._received = answer, 0

    def buffer_updated(self, count: int) -> None:
        self._received += count
        while self._received >= len(_MESSAGE):
            self._received -= len(_MESSAGE)
            self.waiting.popleft().write(self._answer)


class _Client(_Peer):
    def __init__(self, worker: _Worker, request_bytes: int) -> None:
        super().__init__()
        self._worker, self._request_bytes, self._received = worker, request_bytes, 0

    def buffer_updated(self, count: int) -> None:
        self._received += count
        if self._received >= self._request_bytes:
            self._received -= self._request_bytes
            self._worker.waiting.append(self.transport)
            self._worker.transport.write(_MESSAGE)


async def _pass_on(channel: socket.socket, answer: bytes, request_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    _, worker = await loop.create_unix_connection(lambda: _Worker(answer), sock=channel)
    server = await loop.create_server(lambda: _Client(worker, request_bytes), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _send_back(channel: socket.socket) -> None:
    while message := channel.recv(1 << 16):
        channel.sendall(message)


def main() -> None:
    """Serve until ended."""
    ours, theirs = socket.socketpair()
    cores = sorted(os.sched_getaffinity(0))
    if not os.fork():
        ours.close()
        os.sched_setaffinity(0, cores[:1])  # as a worker that has a core of its own
        _send_back(theirs)
        os._exit(0)
    theirs.close()
    os.sched_setaffinity(0, cores[1:] or cores)
    shorten_wakeup_latency()
    uvloop.run(_pass_on(ours, sys.stdin.buffer.read(), int(sys.argv[1])))


if __name__ == "__main__":
    main()
