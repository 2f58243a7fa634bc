"""Looks for bytes of others in a million answers, over HTTP and gRPC, plain and with TLS.

    python -m bench.foreign_bytes [--answers N] [--minutes M] [--seed S]

Two servers overwrite memory as soon as it is given back, one of them with TLS. Most answers are asked for by processes
that do little else than compare: each request has a byte of its own of which its tensor is made, requests of HTTP are
pipelined, calls of gRPC are many on a channel. Tensors travel in messages (4 bytes, 4 KB), in the arena (40 KB), and
in more of it than sockets take (600 KB). Beside them clients of all manners (`bench.strange_clients`) read slowly,
half-close, close and cancel until the others have what they want.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

from bench.hostile_server import TOKEN, hostile_server
from bench.strange_clients import (
    ClientRequest,
    Endpoint,
    Got,
    connect,
    draw_requests,
    grpc_message,
    http_request,
    open_channel,
    send_all,
)

#: Bytes of a tensor, and how many requests of this size are sent at once: as many as buffers hold the answers of.
SIZES = {4: 16, 4000: 8, 40_000: 1, 600_000: 1}
#: How often each size is asked for.
_WEIGHTS = (60, 20, 19, 1)
_PROCESSES = 2
#: Connections, and calls in flight, of a process with each endpoint.
_CONNECTIONS, _CALLS = 2, 8
_AT_ONCE = 8
_STRANGE = 200
#: Seeds of the clients of all manners grow by what they have sent; those of another run begin so far away.
_SEEDS_APART = 10_000_000


def ask_many(endpoint: Endpoint, answers: int, seconds: float, seed: int) -> Got:
    """Ask until there were so many answers, or for so long; each is compared with what was sent."""
    rng, until = random.Random(seed), time.monotonic() + seconds
    if endpoint.scheme.startswith("grpc"):
        return _ask_calls(endpoint, answers, until, rng)
    got = Got()
    with connect(endpoint) as connection:
        reader = _AnswerReader(connection)
        while got.answers < answers and time.monotonic() < until:
            (size,) = rng.choices(list(SIZES), _WEIGHTS)
            marks = [rng.randrange(1, 200) for _ in range(SIZES[size])]
            connection.sendall(b"".join(_head(endpoint, size) + bytes([mark]) * size for mark in marks))
            for mark in marks:
                got += _compare(reader.read_tensor(), size, mark)
    return got


def _ask_calls(endpoint: Endpoint, answers: int, until: float, rng: random.Random) -> Got:
    got = Got()
    metadata = (("authorization", f"Bearer {endpoint.token}"),)
    with open_channel(endpoint) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        while got.answers < answers and time.monotonic() < until:
            drawn = [(size, rng.randrange(1, 200)) for size in rng.choices(list(SIZES), _WEIGHTS, k=_CALLS)]
            sent = [_head(endpoint, size) + bytes([mark]) * size for size, mark in drawn]
            begun = [call.future(message, metadata=metadata) for message in sent]
            for (size, mark), answer in zip(drawn, begun, strict=True):
                got += _compare(answer.result()[-size:], size, mark)  # the tensor is the message's last field
    return got


def _compare(tensor: bytes | None, size: int, mark: int) -> Got:
    if tensor is None:
        return Got(refused=1)
    if tensor == bytes([mark]) * size:
        return Got(1)
    return Got(1, abs(len(tensor) - size) + len(tensor) - tensor.count(mark))


@cache
def _head(endpoint: Endpoint, size: int) -> bytes:
    """Return what a request or message of this size has before its tensor."""
    request = ClientRequest(endpoint, "reads", _name(size), size, 1)
    return (grpc_message if endpoint.scheme.startswith("grpc") else http_request)(request)[:-size]


def _name(size: int) -> str:
    return f"m{size}"


class _AnswerReader:
    """Takes the answers of a connection apart."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._data = bytearray()

    def read_tensor(self) -> bytes | None:
        """Return the tensor of the next answer; None where it is a refusal.

        Raises
        ------
        ConnectionError
            When the server closes the connection.
        """
        while (end := self._data.find(b"\r\n\r\n")) < 0:
            self._receive()
        lines = bytes(self._data[:end]).lower().split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines[1:])
        begin, length = end + 4, int(headers[b"content-length"])
        while len(self._data) < begin + length:
            self._receive()
        body = bytes(self._data[begin : begin + length])
        del self._data[: begin + length]
        if not lines[0].startswith(b"http/1.1 200 "):
            return None
        return body[int(headers[b"inference-header-content-length"]) :]

    def _receive(self) -> None:
        data = self._connection.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed a connection in the middle")
        self._data += data


def look_for_foreign_bytes(answers: int, seconds: float, seed: int = 0) -> tuple[dict[str, Got], Got]:
    """Return what came of so many answers, or of so long, by scheme, and what clients of all manners got beside."""
    with endpoints() as every, ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        share = -(-answers // (_PROCESSES * len(every)))
        asking = [pool.submit(_ask_all, every, share, seconds, _PROCESSES * seed + i) for i in range(_PROCESSES)]
        strange, sent = Got(), 0
        while not all(one.done() for one in asking):
            batch = draw_requests(every, [(_name(size), size) for size in SIZES], _STRANGE, _SEEDS_APART * seed + sent)
            strange, sent = strange + send_all(batch, _AT_ONCE), sent + len(batch)
        results = [one.result() for one in asking]
    return {one.scheme: sum((result[i] for result in results), Got()) for i, one in enumerate(every)}, strange


def _ask_all(every: Sequence[Endpoint], answers: int, seconds: float, seed: int) -> list[Got]:
    """Ask all endpoints at once, on several connections each, for so many answers each, or for so long."""
    part = -(-answers // _CONNECTIONS)
    with ThreadPoolExecutor(len(every) * _CONNECTIONS) as pool:
        asking = [
            [pool.submit(ask_many, one, part, seconds, 1000 * seed + 10 * i + j) for j in range(_CONNECTIONS)]
            for i, one in enumerate(every)
        ]
        return [sum((one.result() for one in own), Got()) for own in asking]


@contextmanager
def endpoints() -> Iterator[list[Endpoint]]:
    """Serve a model of each size with and without TLS; yield where."""
    models = {_name(size): f"null:{size}" for size in SIZES}
    with hostile_server(models=models) as plain, hostile_server(models=models, secured=True) as guarded:
        yield [
            Endpoint("http", "127.0.0.1", plain.http, token=TOKEN),
            Endpoint("grpc", "127.0.0.1", plain.grpc, token=TOKEN),
            Endpoint("https", "127.0.0.1", guarded.http, guarded.authority, TOKEN),
            Endpoint("grpcs", "127.0.0.1", guarded.grpc, guarded.authority, TOKEN),
        ]


def show_foreign_bytes(answers: int, seconds: float, seed: int = 0) -> bool:
    """Print how many bytes of answers were not the client's own; return whether there were none."""
    began = time.monotonic()
    got, strange = look_for_foreign_bytes(answers, seconds, seed)
    total = sum(got.values(), strange)
    each = ", ".join(f"{scheme} {one.answers}" for scheme, one in got.items())
    print(f"{total.foreign} foreign bytes in {total.answers} answers within {time.monotonic() - began:.0f} s:", end=" ")
    print(f"{each}; {strange.answers} of clients that read slowly, half-close, close and cancel", flush=True)
    print(f"  {total.refused} requests were refused", flush=True)
    return not total.foreign


def main() -> int:
    """Print it; 0 when there was no foreign byte."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1_000_000, help="that are looked at")
    parser.add_argument("--minutes", type=float, default=30.0, help="at most")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked: another one adds to what was looked at")
    options = parser.parse_args()
    return 0 if show_foreign_bytes(options.answers, 60.0 * options.minutes, options.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
