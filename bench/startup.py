"""Times how long gpuprof takes before it does anything: ``import gpuprof``, ``gpuprof --help`` and a verb's help.

Each is started in a process of its own, in turn with a Python that does nothing, whose time is subtracted; the median
over the rounds is printed beside the limit. Exit code 1: one is above it.

    python -m bench.startup
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

_NOTHING = [sys.executable, "-c", "pass"]
#: What is started → limit in ms above a Python that does nothing.
_STARTS = {
    "import gpuprof": ([sys.executable, "-c", "import gpuprof"], 50.0),
    "gpuprof --help": ([sys.executable, "-m", "gpuprof", "--help"], 300.0),
    "gpuprof estimate --help": ([sys.executable, "-m", "gpuprof", "estimate", "--help"], 300.0),
}


def main() -> int:
    """Print a line for each start; return 1 when one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in _STARTS}
    bare: list[float] = []
    for _ in range(rounds):
        bare.append(_start_ms(_NOTHING))
        for name, (command, _) in _STARTS.items():
            times[name].append(_start_ms(command))
    nothing = statistics.median(bare)
    print(f"{'':28}{'median ms':>10}{'fastest':>10}{'limit':>8}   above Python alone")
    late = False
    for name, (_, limit) in _STARTS.items():
        median, fastest = statistics.median(times[name]) - nothing, min(times[name]) - min(bare)
        late |= median > limit
        print(f"{name:28}{median:10.0f}{fastest:10.0f}{limit:8.0f}   {'too slow' if median > limit else 'ok'}")
    return int(late)


def _start_ms(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
