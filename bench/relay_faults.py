"""What clients of gRPC notice when the relay in front of grpcio is stopped or killed.

    python -m bench.relay_faults

Four calls are in flight on one channel all the time. For each fault: calls that were answered in a second before it and
at the end, the time from its end to the first answer, how calls ended, and what router and relay hold before and after.
``bench.reliability`` prints it, too.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import psutil

from bench.serving import infer_message, read_port, serve_model

_BEFORE_S, _AFTER_S, _COUNTED_S = 3.0, 10.0, 2.0
_KILLS, _KILLING_S = 50, 120.0
_PATIENCE_S = 90.0
#: When each call began and ended (monotonic seconds), and its status.
Calls = list[tuple[float, float, str]]


def find_relay(router: psutil.Process) -> psutil.Process | None:
    """Return the relay that a router has at the moment."""
    for child in router.children():
        try:
            if "gpuprof.serving.protocol.grpc_relay" in child.cmdline():
                return child
        except psutil.Error:  # it has just ended
            pass
    return None


def await_relay(router: psutil.Process) -> psutil.Process:
    """Return the relay as soon as there is one."""
    while (relay := find_relay(router)) is None:
        time.sleep(0.01)
    return relay


def stop_for(seconds: float) -> Callable[[psutil.Process], None]:
    """Return what stops the relay for so long."""

    def stop(router: psutil.Process) -> None:
        relay = await_relay(router)
        relay.suspend()
        time.sleep(seconds)
        relay.resume()

    return stop


def stop_until_replaced(router: psutil.Process) -> None:
    """Stop the relay and wait until the router has another."""
    stopped, until = await_relay(router), time.monotonic() + _KILLING_S
    stopped.suspend()
    while await_relay(router).pid == stopped.pid and time.monotonic() < until:
        time.sleep(0.01)


def kill_times(count: int) -> Callable[[psutil.Process], None]:
    """Return what kills so many relays, each as soon as it is there."""

    def kill(router: psutil.Process) -> None:
        killed, until = set[int](), time.monotonic() + _KILLING_S
        while len(killed) < count and time.monotonic() < until:
            relay = await_relay(router)
            if relay.pid not in killed:
                killed.add(relay.pid)
                relay.kill()
            time.sleep(0.01)

    return kill


def show_relay_faults() -> bool:
    """Print what became of each fault; return whether calls were answered after all of them."""
    faults = {f"stopped for {seconds} s": stop_for(seconds) for seconds in (1, 5)}
    faults["stopped for good"] = stop_until_replaced
    faults |= {"killed": kill_times(1), f"killed {_KILLS} times in a row": kill_times(_KILLS)}
    good = True
    with serve_model("null:4", 1, 2000.0, "--grpc-port", "0") as (router, line):
        port = read_port(line, "grpc://")
        message = infer_message("null:4", read_port(line, "http://"))
        for name, inflict in faults.items():
            good &= show_relay_fault(name, inflict, router, port, message)
    return good


def show_relay_fault(
    name: str, inflict: Callable[[psutil.Process], None], router: psutil.Process, port: int, message: bytes
) -> bool:
    """Inflict one fault while calls are made and print what came of it."""
    calls, ended = Calls(), threading.Event()
    client = threading.Thread(target=lambda: asyncio.run(_call_until(ended, port, message, calls)))
    client.start()
    time.sleep(_BEFORE_S)
    before, began = _describe_held(router), time.monotonic()
    inflict(router)
    over = time.monotonic()
    time.sleep(_AFTER_S)
    last = time.monotonic()
    ended.set()
    client.join()
    answered = [done for _, done, status in calls if status == "OK"]
    rates = [sum(end - _COUNTED_S < done <= end for done in answered) / _COUNTED_S for end in (began, last)]
    first_s = min((done for done in answered if done > over), default=float("inf")) - over
    print(f"relay {name}: {rates[0]:.0f}/s before, {rates[1]:.0f}/s at the end, first answer after {first_s:.2f} s")
    print(f"  calls: {dict(Counter(status for *_, status in calls))}, the longest ", end="")
    print(f"{max(done - start for start, done, _ in calls):.1f} s; {before} before, {_describe_held(router)} after")
    sys.stdout.flush()
    return first_s < _AFTER_S


async def _call_until(ended: threading.Event, port: int, message: bytes, calls: Calls) -> None:
    import grpc.aio

    options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        async def call() -> None:
            while not ended.is_set():
                start, status = time.monotonic(), "OK"
                try:
                    await infer(message, timeout=_PATIENCE_S)
                except grpc.aio.AioRpcError as error:
                    status = error.code().name
                    await asyncio.sleep(0.02)
                calls.append((start, time.monotonic(), status))

        await asyncio.gather(*(call() for _ in range(4)))


def _describe_held(router: psutil.Process) -> str:
    relay = await_relay(router)
    memory = f"{router.memory_info().rss / 1e6:.0f} + {relay.memory_info().rss / 1e6:.0f} MB"
    return f"{memory}, {router.num_fds()} + {relay.num_fds()} files"


if __name__ == "__main__":
    sys.exit(0 if show_relay_faults() else 1)
