"""A process that only sleeps, beside what is measured: as late as it wakes up, anybody would have.

    python -m bench.bystander

It prints the longest lateness in ms when its standard input ends.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpuprof.machine.scheduling import shorten_wakeup_latency

_NAP_S = 0.005


@contextmanager
def run_bystander() -> Iterator[Callable[[], float]]:
    """Run one; what is yielded ends it and returns by how many ms it was late at most."""
    command = [sys.executable, "-m", "bench.bystander"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()

        def end() -> float:
            return float(process.communicate()[0])

        try:
            yield end
        finally:
            process.kill()


def main() -> int:
    """Sleep until nobody listens any more."""
    shorten_wakeup_latency()
    listening = threading.Thread(target=sys.stdin.read, daemon=True)
    listening.start()
    worst_s, woke = 0.0, time.monotonic()
    print("watching", flush=True)
    while listening.is_alive():
        time.sleep(_NAP_S)
        before, woke = woke, time.monotonic()
        worst_s = max(worst_s, woke - before - _NAP_S)
    print(f"{1000.0 * worst_s:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
