"""How long a server stands still under clients that mean it ill; memory before and after.

    python -m bench.hostile [--seconds S]

Each attack goes on for S seconds against a server of its own, while somebody else asks every 10 ms whether it lives:
for how long does the router stand still at most, as it says itself (and a process that only sleeps, which the machine
alone holds up), how long does the other wait, and what does the router have in memory before, at most, and afterwards,
and after how many seconds is it nearly what it was?
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import h2.connection
import h2.exceptions
import psutil

from bench.bystander import run_bystander
from bench.serving import deployment

TOKEN = "a-token-of-the-benchmark-0123456789"
_PROBE_S = 0.01
_WEIGH_S = 0.1
#: For so long memory is looked at, and is back when it is so near to what it was: the arena keeps 16 MiB, too.
_REST_S, _KEPT_BYTES = 40.0, 24 << 20
_ATTACKERS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_INFER = "/inference.GRPCInferenceService/ModelInfer"
BUFFER_MB = 256
_UNFINISHED_BYTES = 50 << 20


@dataclass(frozen=True)
class AttackTarget:
    """A server: its process, and its ports."""

    process: psutil.Process
    http: int
    grpc: int


@dataclass(frozen=True)
class Suffered:
    """What one attack did: the router's longest stall and the other client's longest wait, in ms; memory in MB.

    ``machine_ms`` is how late a process was meanwhile that only sleeps: of the stall, so much may be the machine's.
    ``rested_s`` is for how long memory was looked at until it was back, or no longer.
    """

    stall_ms: float
    machine_ms: float
    wait_ms: float
    before_mb: float
    peak_mb: float
    after_mb: float
    rested_s: float


Attack = Callable[[AttackTarget, Callable[[], bool]], None]


def slow_heads(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send heads a byte at a time on hundreds of connections."""
    connections = [socket.create_connection(("127.0.0.1", target.http)) for _ in range(200)]
    while goes_on():
        for connection in connections:
            with suppress(OSError):
                connection.sendall(b"a")
        time.sleep(0.05)
    for connection in connections:
        connection.close()


def announced_bodies(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Announce 64 MB again and again and send little of it."""
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Length: {64 << 20}\r\n\r\n"
    connections: list[socket.socket] = []
    while goes_on():
        if len(connections) < 200:
            connections.append(socket.create_connection(("127.0.0.1", target.http)))
            with suppress(OSError):
                connections[-1].sendall(head.encode() + bytes(50_000))
        time.sleep(0.001)
    for connection in connections:
        connection.close()


def large_json(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send 15 MB of JSON again and again."""
    _post_json(target, goes_on, b'{"inputs": [' + b"[]," * 5_000_000 + b"[]]}")


def deep_json(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send lists in lists as deep as 250 KB allow, which the router reads itself."""
    _post_json(target, goes_on, b"[" * 125_000 + b"]" * 125_000)


def wide_json(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send as many empty lists as 250 KB allow, which the router reads itself."""
    _post_json(target, goes_on, b'{"inputs": [' + b"[]," * 80_000 + b"[]]}")


def json_without_token(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send 15 MB of JSON without the token."""
    _post_json(target, goes_on, b"[" + b"[]," * 5_000_000 + b"[]]", token="")


def inflating_messages(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send compressed messages of gRPC that would be a gigabyte."""
    zeros = gzip.compress(bytes(1 << 26))
    _call(target, goes_on, b"\1" + struct.pack(">I", 16 * len(zeros)) + 16 * zeros, ("grpc-encoding", "gzip"))


def empty_fields(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send messages of a million empty inputs."""
    message = b"\x0a\1m" + b"\x2a\x00" * (1 << 20)
    _call(target, goes_on, b"\0" + struct.pack(">I", len(message)) + message)


def unfinished_messages(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send all of a large message but its end, on one connection after another."""
    body = struct.pack(">BI", 0, _UNFINISHED_BYTES + 1) + bytes(_UNFINISHED_BYTES)
    with ExitStack() as opened:
        while goes_on():
            with suppress(OSError, h2.exceptions.H2Error):
                http2, connection = _begin_call(target, ())
                opened.enter_context(connection)
                _send_body(http2, connection, body, goes_on)


def settings_frames(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send SETTINGS of HTTP/2 that change the window again and again, with streams open."""
    settings = struct.pack(">HI", 4, 65_535) * 100
    frame = len(settings).to_bytes(3, "big") + b"\4\0\0\0\0\0" + settings
    _frames(target, goes_on, frame * 50)


def pings(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send PING frames of HTTP/2."""
    _frames(target, goes_on, (b"\0\0\x08\6\0\0\0\0\0" + bytes(8)) * 2000)


def random_frames(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send random frames of HTTP/2."""
    rng = random.Random(0)
    while goes_on():
        frames = b"".join(
            len(body).to_bytes(3, "big") + bytes([rng.randrange(12), rng.randrange(256)]) + bytes(4) + body
            for body in (rng.randbytes(rng.randrange(60)) for _ in range(50))
        )
        _frames(target, goes_on, frames, once=True)


ATTACKS: dict[str, tuple[Attack, bool]] = {
    "heads, a byte at a time": (slow_heads, False),
    "JSON, 15 MB, no token": (json_without_token, False),
    "HTTP/2 settings": (settings_frames, False),
    "HTTP/2 pings": (pings, False),
    "HTTP/2 random frames": (random_frames, False),
    "bodies announced": (announced_bodies, True),
    "JSON, 15 MB": (large_json, True),
    "JSON, deep": (deep_json, True),
    "JSON, wide": (wide_json, True),
    "gRPC, unfinished messages": (unfinished_messages, True),
    "gRPC, inflating": (inflating_messages, True),
    "gRPC, empty fields": (empty_fields, True),
}


def suffer(attack: Attack, seconds: float) -> Suffered:
    """Attack a server of its own for so long, by several threads at once."""
    with hostile_server() as target, _probe(target) as waits, run_bystander() as end_watch:
        time.sleep(1.0)
        weights, deadline = [target.process.memory_info().rss], time.monotonic() + seconds
        attackers = [
            threading.Thread(target=attack, args=(target, lambda: time.monotonic() < deadline), daemon=True)
            for _ in range(_ATTACKERS)
        ]
        waits.clear()
        for attacker in attackers:
            attacker.start()
        while any(attacker.is_alive() for attacker in attackers) and time.monotonic() < deadline + 30.0:
            weights.append(target.process.memory_info().rss)
            time.sleep(_WEIGH_S)
        worst_s = max(waits, default=float("inf"))
        stall_ms, machine_ms, ended = _longest_stall_ms(target), end_watch(), time.monotonic()
        while (after := target.process.memory_info().rss) > weights[0] + _KEPT_BYTES:
            if time.monotonic() > ended + _REST_S:
                break
            time.sleep(_WEIGH_S)
        before, peak = weights[0], max(weights)
        rested_s = time.monotonic() - ended
        return Suffered(stall_ms, machine_ms, 1000.0 * worst_s, before / 1e6, peak / 1e6, after / 1e6, rested_s)


@contextmanager
def hostile_server(*options: str, models: Mapping[str, str] | None = None) -> Iterator[AttackTarget]:
    """Serve null models with a token, by HTTP and gRPC; memory that is given back is overwritten."""
    paths = {"m": "null:600k"} if models is None else models
    document = deployment("null:4", 1)
    (partition,) = document["nodes"][0]["gpus"][0]["partitions"]
    partition["replicas"] = [partition["replicas"][0] | {"model": name} for name in paths]
    document["models"] = {name: document["models"]["m"] | {"path": path} for name, path in paths.items()}
    with tempfile.TemporaryDirectory() as folder:
        path, token = Path(folder) / "map.json", Path(folder) / "token"
        path.write_text(json.dumps(document))
        token.write_text(TOKEN)
        token.chmod(0o600)
        command = [sys.executable, "-m", "gpuprof", "serve", str(path), "--port", "0", "--grpc-port", "0"]
        command += ["--buffer-mb", str(BUFFER_MB), "--token-file", str(token), *options]
        own = {**os.environ, "GPUPROF_POISON": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=own
        ) as process:
            assert process.stdout is not None
            words = [word for word in process.stdout.readline().split() if "://" in word]
            ports = [int(word.rsplit(":", 1)[1]) for word in words]
            try:
                yield AttackTarget(psutil.Process(process.pid), ports[0], ports[1])
            finally:
                process.terminate()


@contextmanager
def _probe(target: AttackTarget) -> Iterator[list[float]]:
    """Ask whether the server lives, again and again; what is yielded is filled with seconds until the answer."""
    waits: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        connection = HTTPConnection("127.0.0.1", target.http, timeout=60)
        while not ended.wait(_PROBE_S):
            began = time.monotonic()
            with suppress(OSError):
                connection.request("GET", "/v2/health/live")
                connection.getresponse().read()
            waits.append(time.monotonic() - began)
        connection.close()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield waits
    finally:
        ended.set()
        asking.join(70.0)


def _longest_stall_ms(target: AttackTarget) -> float:
    with closing(HTTPConnection("127.0.0.1", target.http, timeout=60)) as connection:
        connection.request("GET", "/v2/health/ready")
        told = json.loads(connection.getresponse().read())
    return 1000.0 * float(told["stalls"]["longest_s"])


def _post_json(target: AttackTarget, goes_on: Callable[[], bool], body: bytes, token: str = TOKEN) -> None:
    while goes_on():
        connection = HTTPConnection("127.0.0.1", target.http, timeout=60)
        with suppress(OSError):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request("POST", "/v2/models/m/infer", body, headers)
            connection.getresponse().read()
        connection.close()


def _call(target: AttackTarget, goes_on: Callable[[], bool], message: bytes, *headers: tuple[str, str]) -> None:
    """Send a message of gRPC as it is, again and again."""
    while goes_on():
        with suppress(OSError, h2.exceptions.H2Error):
            http2, connection = _begin_call(target, headers)
            with connection:
                _send_body(http2, connection, message, goes_on)
                connection.recv(1 << 16)


def _begin_call(
    target: AttackTarget, headers: Sequence[tuple[str, str]]
) -> tuple[h2.connection.H2Connection, socket.socket]:
    """Connect, and send the head of a call of ModelInfer."""
    own = [(":method", "POST"), (":path", _INFER), (":scheme", "http"), (":authority", "x"), ("te", "trailers")]
    own += [("content-type", "application/grpc"), ("authorization", f"Bearer {TOKEN}"), *headers]
    connection = socket.create_connection(("127.0.0.1", target.grpc))
    connection.settimeout(10.0)
    http2 = h2.connection.H2Connection()
    http2.initiate_connection()
    http2.send_headers(1, own)
    return http2, connection


def _send_body(
    http2: h2.connection.H2Connection, connection: socket.socket, body: bytes, goes_on: Callable[[], bool]
) -> None:
    """Send as much as the other side takes, for as long as the attack goes on."""
    left = memoryview(body)
    while left and goes_on():
        window = min(http2.local_flow_control_window(1), http2.max_outbound_frame_size, len(left))
        if window:
            http2.send_data(1, bytes(left[:window]))
            left = left[window:]
        connection.sendall(http2.data_to_send())
        if not window:
            http2.receive_data(connection.recv(1 << 16))


def _frames(target: AttackTarget, goes_on: Callable[[], bool], frames: bytes, once: bool = False) -> None:
    """Send frames of HTTP/2 on a connection with a hundred open streams, and on another when it is closed."""
    head = b"\x83\x86\x44\x01/\x41\x01x"  # POST, http, "/", authority
    streams = b"".join(
        len(head).to_bytes(3, "big") + b"\1\4" + number.to_bytes(4, "big") + head for number in range(1, 200, 2)
    )
    while goes_on():
        with suppress(OSError), socket.create_connection(("127.0.0.1", target.grpc)) as connection:
            connection.settimeout(1.0)
            connection.sendall(_PREFACE + b"\0\0\0\4\0\0\0\0\0" + streams)
            connection.sendall(frames)
            while not once and goes_on():
                connection.sendall(frames)
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.recv(1 << 16)
                connection.settimeout(1.0)
        if once:
            return


def main() -> int:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    options = parser.parse_args()
    show_hostile(options.seconds, options.only)
    return 0


def show_hostile(seconds: float, only: str = "") -> None:
    """Print what each attack did."""
    waits, memory = (
        f"{'stall ms':>9s} {'machine ms':>10s} {'others wait ms':>15s}",
        f"{'MB before':>10s} {'peak':>6s} {'after':>6s} {'s':>4s}",
    )
    print(f"{'attack':26s} {'token':>5s} {waits} {memory}")
    for name, (attack, needs_token) in ATTACKS.items():
        if only in name:
            got_here = suffer(attack, seconds)
            figures = (
                f"{got_here.stall_ms:9.0f} {got_here.machine_ms:10.0f} {got_here.wait_ms:15.0f} "
                f"{got_here.before_mb:10.0f} {got_here.peak_mb:6.0f} {got_here.after_mb:6.0f} {got_here.rested_s:4.0f}"
            )
            print(f"{name:26s} {'yes' if needs_token else 'no':>5s} {figures}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
