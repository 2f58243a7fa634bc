"""Times how long gpuprof takes before it does anything: ``import gpuprof``, ``gpuprof --help`` and a verb's help.

Each is started in a process of its own, in turn with a Python that does nothing, whose time is subtracted. Printed are
medians over the rounds: time on the clock, which grows with what else runs, and on a core, which is held against the
limit. Modules are compiled once, before, as an installed package's are. Exit code 1: one is above it.

    python -m bench.startup
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
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
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("nothing", *_STARTS)}
    with tempfile.TemporaryDirectory(prefix="gpuprof-startup-") as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for counted in (False, *(True for _ in range(rounds))):
            for name, command in (("nothing", _NOTHING), *((name, command) for name, (command, _) in _STARTS.items())):
                took = _start_ms(command, environment)
                if counted:
                    times[name].append(took)
    medians = {name: [statistics.median(one) for one in zip(*found, strict=True)] for name, found in times.items()}
    print(f"{'':28}{'on the clock ms':>16}{'on a core ms':>14}{'limit':>8}   above Python alone")
    late = False
    for name, (_, limit) in _STARTS.items():
        clock, core = (own - bare for own, bare in zip(medians[name], medians["nothing"], strict=True))
        late |= core > limit
        print(f"{name:28}{clock:16.0f}{core:14.0f}{limit:8.0f}   {'too slow' if core > limit else 'ok'}")
    return int(late)


def _start_ms(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return the time of a process on the clock, and on the cores that it ran on."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    core_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1e3 * (time.perf_counter() - began), 1e3 * core_s


if __name__ == "__main__":
    sys.exit(main())
