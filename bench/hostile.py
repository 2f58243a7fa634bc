"""How long a server stands still under clients that mean it ill; memory before and after.

    python -m bench.hostile [--seconds S]

Each attack goes on for S seconds against a server of its own, while somebody else asks every 10 ms whether it lives:
for how long does the router stand still at most, as it says itself, how much of that is its own, without the time in
which it waits for a core that others have, and how much does it compute; how late is a process that only sleeps, which
the machine alone holds up; for how long do others wait, over HTTP and for a call of gRPC (inf: one failed); and what do
the router and its relay have in memory before, at most, and afterwards, and after how many seconds is it nearly what it
was?

A stall is too long where the router computes for too long in it, or where its own part is so much longer than the
machine's. What memory does not come back within 40 s may be held for good or grow with every attack: so the attack is
repeated until a round adds hardly anything, four times at most, and what is left after each round is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from bench import grpc_attacks, http2_attacks, http_attacks, tls_attacks
from bench.bystander import run_bystander
from bench.hostile_server import STRINGS, Attack, AttackTarget, hostile_server
from bench.strange_clients import Endpoint, open_channel

_PROBE_S = 0.01
_WEIGH_S = 0.1
#: For so long memory is looked at, and is back when it is so near to what it was: the arena keeps 16 MiB, too.
_REST_S, _KEPT_BYTES = 40.0, 24 << 20
#: What is not back grows without end if each of so many rounds adds more than this.
_ROUNDS, _ADDED_MB = 4, 8.0
_ATTACKERS = 4
#: For so long the router may stand still under what a client can send without a token, and with one.
_STALL_MS, _STALL_WITH_TOKEN_MS = 100.0, 300.0


@dataclass(frozen=True)
class Suffered:
    """What one attack did: the router's longest stall and other clients' longest waits, in ms; memory in MB.

    ``own_ms`` is a stall without the time in which the router's thread waited for a core, ``computed_ms`` its processor
    time in one; ``machine_ms`` how late a process was meanwhile that only sleeps: so much may be the machine's.
    ``left_mb`` is the memory after each round, ``rested_s`` for how long memory was looked at after the first until it
    was back, or no longer.
    """

    stall_ms: float
    own_ms: float
    computed_ms: float
    machine_ms: float
    wait_ms: float
    call_wait_ms: float
    before_mb: float
    peak_mb: float
    left_mb: tuple[float, ...]
    rested_s: float

    @property
    def after_mb(self) -> float:
        """Memory after the first round."""
        return self.left_mb[0]

    @property
    def grows(self) -> bool:
        """Whether memory was not back and every round left more than those before it."""
        if self.rested_s <= _REST_S:
            return False
        return len(self.left_mb) == _ROUNDS and self.left_mb[-1] > max(self.left_mb[:-1]) + _ADDED_MB


@dataclass(frozen=True)
class AttackCase:
    """An attack, whether it needs the token, and the server that it is meant for: what ``m`` is, with TLS or not."""

    attack: Attack
    needs_token: bool
    model: str = "null:600k"
    secured: bool = False


ATTACKS: dict[str, AttackCase] = {
    "heads, a byte at a time": AttackCase(http_attacks.slow_heads, False),
    "heads of many headers": AttackCase(http_attacks.many_headers, False),
    "requests, pipelined": AttackCase(http_attacks.pipelined_requests, False),
    "chunks of a byte": AttackCase(http_attacks.chunks_of_a_byte, False),
    "connections that end": AttackCase(http_attacks.connections_that_end, False),
    "TLS handshakes": AttackCase(http_attacks.handshakes, False, secured=True),
    "TLS, nothing said": AttackCase(http_attacks.silent_handshakes, False, secured=True),
    "TLS, records of a byte": AttackCase(tls_attacks.http_records_of_a_byte, False, secured=True),
    "bodies for nothing": AttackCase(http_attacks.bodies_for_nothing, False),
    "chunks for nothing": AttackCase(http_attacks.chunks_for_nothing, False),
    "trailers without end": AttackCase(http_attacks.endless_trailers, False),
    "answers unread, no token": AttackCase(http_attacks.unread_health, False),
    "half-closed": AttackCase(http_attacks.half_closed, False),
    "calls, no token": AttackCase(http_attacks.calls_for_nobody, False),
    "JSON, 15 MB, no token": AttackCase(http_attacks.json_without_token, False),
    "HTTP/2 settings": AttackCase(grpc_attacks.settings_frames, False),
    "HTTP/2 pings": AttackCase(grpc_attacks.pings, False),
    "HTTP/2 random frames": AttackCase(grpc_attacks.random_frames, False),
    "HTTP/2 rapid resets": AttackCase(grpc_attacks.rapid_resets, False),
    "HTTP/2 endless heads": AttackCase(grpc_attacks.endless_heads, False),
    "HTTP/2 indexed heads": AttackCase(grpc_attacks.indexed_heads, False),
    "HTTP/2 small indexed heads": AttackCase(grpc_attacks.small_indexed_heads, False),
    "HTTP/2 indexed, at once": AttackCase(grpc_attacks.indexed_heads_at_once, False),
    "HTTP/2 indexed, held": AttackCase(grpc_attacks.indexed_heads_held, False),
    "HTTP/2 empty data": AttackCase(http2_attacks.empty_data, False),
    "HTTP/2 data of a byte": AttackCase(http2_attacks.data_of_a_byte, False),
    "HTTP/2 padded data": AttackCase(http2_attacks.padded_data, False),
    "HTTP/2 priorities": AttackCase(http2_attacks.priorities, False),
    "HTTP/2 window updates": AttackCase(http2_attacks.window_updates, False),
    "HTTP/2 windows too wide": AttackCase(http2_attacks.too_wide_windows, False),
    "HTTP/2 answers to no ping": AttackCase(http2_attacks.ping_answers, False),
    "HTTP/2 goaways": AttackCase(http2_attacks.goaways, False),
    "HTTP/2 unknown frames": AttackCase(http2_attacks.unknown_frames, False),
    "HTTP/2 table sizes": AttackCase(http2_attacks.table_sizes, False),
    "HTTP/2 wrong heads": AttackCase(http2_attacks.wrong_heads, False),
    "HTTP/2 long heads": AttackCase(http2_attacks.long_paths, False),
    "HTTP/2 trailers": AttackCase(http2_attacks.trailers, False),
    "HTTP/2 late resets": AttackCase(http2_attacks.late_resets, False),
    "HTTP/2 idle connections": AttackCase(http2_attacks.idle_connections, False),
    "gRPC TLS, half hellos": AttackCase(http2_attacks.half_hellos, False, secured=True),
    "gRPC TLS, hellos": AttackCase(http2_attacks.whole_hellos, False, secured=True),
    "gRPC TLS, records of a byte": AttackCase(tls_attacks.grpc_records_of_a_byte, False, secured=True),
    "gRPC, deadlines": AttackCase(http2_attacks.timeouts, False),
    "gRPC, calls, no token": AttackCase(grpc_attacks.calls_without_token, False),
    "gRPC, health checks": AttackCase(grpc_attacks.health_checks, False),
    "bodies announced": AttackCase(http_attacks.announced_bodies, True),
    "bodies by the byte": AttackCase(http_attacks.bodies_by_the_byte, True),
    "metrics, pipelined": AttackCase(http_attacks.pipelined_metrics, True),
    "models unknown": AttackCase(http_attacks.unknown_models, True),
    "answers unread": AttackCase(http_attacks.unread_answers, True),
    "strings, millions": AttackCase(http_attacks.many_strings, True, STRINGS),
    "shapes, long": AttackCase(http_attacks.long_shapes, True),
    "JSON, 15 MB": AttackCase(http_attacks.large_json, True),
    "identifiers, 10 MB": AttackCase(http_attacks.long_identifiers, True),
    "numbers, long": AttackCase(http_attacks.long_numbers, True),
    "JSON, deep": AttackCase(http_attacks.deep_json, True),
    "JSON, wide": AttackCase(http_attacks.wide_json, True),
    "gRPC, unfinished messages": AttackCase(grpc_attacks.unfinished_messages, True),
    "gRPC, lying lengths": AttackCase(http2_attacks.lying_lengths, True),
    "gRPC, endless streams": AttackCase(http2_attacks.endless_streams, True),
    "gRPC, held streams": AttackCase(http2_attacks.held_streams, True),
    "gRPC, ten addresses": AttackCase(http2_attacks.calls_of_ten_addresses, True),
    "gRPC, inflating": AttackCase(grpc_attacks.inflating_messages, True),
    "gRPC, nonsense": AttackCase(grpc_attacks.inflating_nonsense, True),
    "gRPC, empty fields": AttackCase(grpc_attacks.empty_fields, True),
    "gRPC, empty texts": AttackCase(grpc_attacks.empty_texts, True, STRINGS),
    "gRPC, long names": AttackCase(grpc_attacks.long_names, True),
    "gRPC, reflection": AttackCase(grpc_attacks.reflection, True),
    "gRPC, statistics": AttackCase(grpc_attacks.statistics, True),
    "gRPC, 40 MB": AttackCase(grpc_attacks.large_messages, True, "null:40m"),
    "gRPC, answers unread": AttackCase(grpc_attacks.unread_answers, True),
}


def suffer(case: AttackCase, seconds: float) -> Suffered:
    """Attack a server of its own for so long, by several threads at once; again where memory does not come back."""
    with (
        hostile_server(models={"m": case.model}, secured=case.secured) as target,
        _probe(partial(_ask_by_http, target)) as waits,
        _probe(partial(_ask_by_grpc, target)) as call_waits,
        run_bystander() as end_watch,
    ):
        time.sleep(1.0)
        weights = [target.weigh()]
        waits.clear()
        call_waits.clear()
        weights += _attack(case, target, seconds)
        wait_ms, call_wait_ms = (1000.0 * max(asked, default=float("inf")) for asked in (waits, call_waits))
        stalls_ms, machine_ms, ended = _longest_stalls_ms(target), end_watch(), time.monotonic()
        left_mb = [_rest(target, weights[0] + _KEPT_BYTES)]
        rested_s = time.monotonic() - ended
        while left_mb[0] > (weights[0] + _KEPT_BYTES) / 1e6 and len(left_mb) < _ROUNDS:
            weights += _attack(case, target, seconds)
            most_mb = max(left_mb) + _ADDED_MB
            left_mb.append(_rest(target, 1e6 * most_mb))
            if left_mb[-1] <= most_mb:
                break
        before_mb, peak_mb = weights[0] / 1e6, max(weights) / 1e6
        return Suffered(*stalls_ms, machine_ms, wait_ms, call_wait_ms, before_mb, peak_mb, tuple(left_mb), rested_s)


def _attack(case: AttackCase, target: AttackTarget, seconds: float) -> list[int]:
    """Attack for so long; return what the server had in memory meanwhile."""
    weights, deadline = [], time.monotonic() + seconds
    attackers = [
        threading.Thread(target=case.attack, args=(target, lambda: time.monotonic() < deadline), daemon=True)
        for _ in range(_ATTACKERS)
    ]
    for attacker in attackers:
        attacker.start()
    while any(attacker.is_alive() for attacker in attackers) and time.monotonic() < deadline + 30.0:
        weights.append(target.weigh())
        time.sleep(_WEIGH_S)
    return weights


def _rest(target: AttackTarget, enough: float) -> float:
    """Wait until the server has no more than so many bytes in memory, or for `_REST_S`; return what it has, in MB."""
    ended = time.monotonic()
    while (after := target.weigh()) > enough and time.monotonic() < ended + _REST_S:
        time.sleep(_WEIGH_S)
    return after / 1e6


@contextmanager
def _probe(make: Callable[[], AbstractContextManager[Callable[[], bool]]]) -> Iterator[list[float]]:
    """Ask again and again; what is yielded is filled with seconds until the answers, infinite for one that failed."""
    waits: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        with make() as is_answered:
            while not ended.wait(_PROBE_S):
                began, answered = time.monotonic(), is_answered()
                waits.append(time.monotonic() - began if answered else float("inf"))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield waits
    finally:
        ended.set()
        asking.join(70.0)


@contextmanager
def _ask_by_http(target: AttackTarget) -> Iterator[Callable[[], bool]]:
    """Yield what asks whether the server lives; a connection that is closed is none that failed: it is made anew."""
    with closing(target.client()) as connection:

        def ask() -> bool:
            with suppress(OSError):
                connection.request("GET", "/v2/health/live")
                connection.getresponse().read()
            return True

        yield ask


@contextmanager
def _ask_by_grpc(target: AttackTarget) -> Iterator[Callable[[], bool]]:
    """Yield what makes a call, and returns whether it was answered."""
    import grpc

    scheme = "grpcs" if target.authority else "grpc"
    with open_channel(Endpoint(scheme, "127.0.0.1", target.grpc, target.authority)) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")

        def ask() -> bool:
            try:
                call(b"", timeout=60.0)
            except grpc.RpcError:
                return False
            return True

        yield ask


def _longest_stalls_ms(target: AttackTarget) -> tuple[float, float, float]:
    """Return the longest stall, the longest without waiting for a core, and the most that was computed in one."""
    with closing(target.client()) as connection:
        connection.request("GET", "/v2/health/ready")
        told = json.loads(connection.getresponse().read())["stalls"]
    return 1000.0 * told["longest_s"], 1000.0 * told["longest_own_s"], 1000.0 * told["longest_computed_s"]


def main() -> int:
    """Print all of it; 0 when no attack did more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    options = parser.parse_args()
    return 0 if show_hostile(options.seconds, options.only) else 1


def show_hostile(seconds: float, only: str = "") -> bool:
    """Print what each attack did; return whether none did more than it may."""
    waits, memory = (
        f"{'stall ms':>9s} {'own':>5s} {'computed':>8s} {'machine':>8s} {'others wait':>12s} {'calls':>6s}",
        f"{'MB before':>10s} {'peak':>6s} {'s':>4s}  after",
    )
    print(f"{'attack':26s} {'token':>5s} {waits} {memory}")
    good = True
    for name, case in ATTACKS.items():
        if only in name:
            got = suffer(case, seconds)
            wrong = _find_excess(case, got)
            good &= not wrong
            left = ", ".join(f"{size_mb:.0f}" for size_mb in got.left_mb)
            figures = (
                f"{got.stall_ms:9.0f} {got.own_ms:5.0f} {got.computed_ms:8.0f} {got.machine_ms:8.0f} "
                f"{got.wait_ms:12.0f} {got.call_wait_ms:6.0f} "
                f"{got.before_mb:10.0f} {got.peak_mb:6.0f} {got.rested_s:4.0f}  {left}"
            )
            print(f"{name:26s} {'yes' if case.needs_token else 'no':>5s} {figures}  {wrong}".rstrip(), flush=True)
    return good


def _find_excess(case: AttackCase, got: Suffered) -> str:
    """Return what an attack did more than it may."""
    allowed_ms = _STALL_WITH_TOKEN_MS if case.needs_token else _STALL_MS
    wrong = ["STALL"] if max(got.computed_ms, got.own_ms - got.machine_ms) > allowed_ms else []
    wrong += ["MEMORY"] if got.grows else []
    return " ".join(wrong)


if __name__ == "__main__":
    sys.exit(main())
