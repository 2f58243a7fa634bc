"""How long a server stands still under clients that mean it ill; memory before and after.

    python -m bench.hostile [--seconds S]

Each attack goes on for S seconds against a server of its own, while somebody else asks every 10 ms whether it lives:
for how long does the router stand still at most, as it says itself (and a process that only sleeps, which the machine
alone holds up), how long does the other wait, and what do the router and its relay have in memory before, at most, and
afterwards, and after how many seconds is it nearly what it was?
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from bench import grpc_attacks, http_attacks
from bench.bystander import run_bystander
from bench.hostile_server import STRINGS, Attack, AttackTarget, hostile_server

_PROBE_S = 0.01
_WEIGH_S = 0.1
#: For so long memory is looked at, and is back when it is so near to what it was: the arena keeps 16 MiB, too.
_REST_S, _KEPT_BYTES = 40.0, 24 << 20
_ATTACKERS = 4
#: For so long the router may stand still under what a client can send without a token, and with one.
_STALL_MS, _STALL_WITH_TOKEN_MS = 100.0, 300.0


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
    "gRPC, inflating": AttackCase(grpc_attacks.inflating_messages, True),
    "gRPC, empty fields": AttackCase(grpc_attacks.empty_fields, True),
    "gRPC, empty texts": AttackCase(grpc_attacks.empty_texts, True, STRINGS),
    "gRPC, long names": AttackCase(grpc_attacks.long_names, True),
    "gRPC, reflection": AttackCase(grpc_attacks.reflection, True),
    "gRPC, statistics": AttackCase(grpc_attacks.statistics, True),
    "gRPC, 40 MB": AttackCase(grpc_attacks.large_messages, True, "null:40m"),
    "gRPC, answers unread": AttackCase(grpc_attacks.unread_answers, True),
}


def suffer(case: AttackCase, seconds: float) -> Suffered:
    """Attack a server of its own for so long, by several threads at once."""
    with (
        hostile_server(models={"m": case.model}, secured=case.secured) as target,
        _probe(target) as waits,
        run_bystander() as end_watch,
    ):
        time.sleep(1.0)
        weights, deadline = [target.weigh()], time.monotonic() + seconds
        attackers = [
            threading.Thread(target=case.attack, args=(target, lambda: time.monotonic() < deadline), daemon=True)
            for _ in range(_ATTACKERS)
        ]
        waits.clear()
        for attacker in attackers:
            attacker.start()
        while any(attacker.is_alive() for attacker in attackers) and time.monotonic() < deadline + 30.0:
            weights.append(target.weigh())
            time.sleep(_WEIGH_S)
        worst_s = max(waits, default=float("inf"))
        stall_ms, machine_ms, ended = _longest_stall_ms(target), end_watch(), time.monotonic()
        while (after := target.weigh()) > weights[0] + _KEPT_BYTES:
            if time.monotonic() > ended + _REST_S:
                break
            time.sleep(_WEIGH_S)
        before, peak = weights[0], max(weights)
        rested_s = time.monotonic() - ended
        return Suffered(stall_ms, machine_ms, 1000.0 * worst_s, before / 1e6, peak / 1e6, after / 1e6, rested_s)


@contextmanager
def _probe(target: AttackTarget) -> Iterator[list[float]]:
    """Ask whether the server lives, again and again; what is yielded is filled with seconds until the answer."""
    waits: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        connection = target.client()
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
    with closing(target.client()) as connection:
        connection.request("GET", "/v2/health/ready")
        told = json.loads(connection.getresponse().read())
    return 1000.0 * float(told["stalls"]["longest_s"])


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
        f"{'stall ms':>9s} {'machine ms':>10s} {'others wait ms':>15s}",
        f"{'MB before':>10s} {'peak':>6s} {'after':>6s} {'s':>4s}",
    )
    print(f"{'attack':26s} {'token':>5s} {waits} {memory}")
    good = True
    for name, case in ATTACKS.items():
        if only in name:
            got = suffer(case, seconds)
            wrong = _find_excess(case, got)
            good &= not wrong
            figures = (
                f"{got.stall_ms:9.0f} {got.machine_ms:10.0f} {got.wait_ms:15.0f} "
                f"{got.before_mb:10.0f} {got.peak_mb:6.0f} {got.after_mb:6.0f} {got.rested_s:4.0f}"
            )
            print(f"{name:26s} {'yes' if case.needs_token else 'no':>5s} {figures}  {wrong}".rstrip(), flush=True)
    return good


def _find_excess(case: AttackCase, got: Suffered) -> str:
    """Return what an attack did more than it may; of a stall, what the machine was late is not the router's."""
    allowed_ms = _STALL_WITH_TOKEN_MS if case.needs_token else _STALL_MS
    wrong = ["STALL"] if got.stall_ms - got.machine_ms > allowed_ms else []
    wrong += ["MEMORY"] if got.rested_s > _REST_S else []
    return " ".join(wrong)


if __name__ == "__main__":
    sys.exit(main())
