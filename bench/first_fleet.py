"""Times what `gpuprof place --gpus any` does, phase by phase, for four models of which nothing was measured.

    python -m bench.first_fleet [--gpus any] [--repeats N] [--slo-file slo.csv]

Each repetition is a new process with compiled code kept from the one before, as a person waits for it. Prints the
medians of the time on the wall and of the processor. Without ``--slo-file`` four networks of the zoo are built.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

_RATES_AND_SLOS = {
    "resnet50": (300, 40),
    "transformer_encoder": (100, 60),
    "squeezenet": (500, 25),
    "inception_v1": (200, 30),
}
_PRUNING = "gpuprof.placement.optimal.fleet_pruning"
#: What is timed, in its order: phase → module and function.
_PHASES = {
    "read demands, files and devices": ("gpuprof.pipeline.place", "build_problem"),
    "guess what each kind costs": (_PRUNING, "_guess_costs"),
    "map of the first kind": (_PRUNING, "_try_kinds"),
    "bound of all kinds": (_PRUNING, "bound_whole_devices"),
    "maps of further kinds": (_PRUNING, "_try_kinds"),
    "exchange of single devices": (_PRUNING, "_replace_devices"),
    "search": ("gpuprof.placement.optimal.optimal:Optimal", "_place_pooled"),
    "check the map": ("gpuprof.pipeline.planning", "check"),
    "ends of the intervals": ("gpuprof.pipeline.place", "add_interval_ends"),
}
_START, _IMPORTS, _REST, _WHOLE = "start Python", "import the planner", "all else", "whole command"


def main() -> int:
    """Print one line a phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="any")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slo-file", type=Path)
    parser.add_argument("--inside", type=float, help=argparse.SUPPRESS)
    chosen, more = parser.parse_known_args()
    if chosen.inside is not None:
        return run_inside(chosen.inside, ["--gpus", chosen.gpus, "--slo-file", str(chosen.slo_file), *more])
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        slo_file = (chosen.slo_file or build_demands(Path(folder))).absolute()
        words = ["--gpus", chosen.gpus, "--slo-file", str(slo_file), "-o", f"{folder}/map.json", *more]
        runs = [run_once(words) for _ in range(chosen.repeats + 1)]
    print(f"first run {runs[0][_WHOLE][0]:.2f} s; medians of {chosen.repeats} more, s: on the wall, of the processor")
    for phase in runs[0]:
        wall, processor = (statistics.median(run[phase][of] for run in runs[1:]) for of in (0, 1))
        print(f"  {phase:35s} {wall:6.2f} {processor:6.2f}")
    return 0


def build_demands(folder: Path) -> Path:
    """Build the networks and return the file of what is demanded of them."""
    lines = ["model,rate_rps,slo_ms"]
    for name, (rate, slo) in _RATES_AND_SLOS.items():
        subprocess.run([sys.executable, "-m", "gpuprof", "zoo", "build", name], cwd=folder, check=True)
        lines.append(f"{folder / name}.onnx,{rate},{slo}")
    (folder / "slo.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "slo.csv"


def run_once(words: list[str]) -> dict[str, tuple[float, float]]:
    """Return by phase the seconds of one run, on the wall and of the processor."""
    command = [sys.executable, "-m", "bench.first_fleet", "--inside", str(time.monotonic()), *words]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    known = json.loads(done.stdout.splitlines()[-1])
    return {name: (wall, processor) for name, (wall, processor) in known.items()}


class _Clock:
    """Seconds by phase, on the wall and of the processor; those of a phase within another count for the outer one."""

    def __init__(self, started: float) -> None:
        self._started, self._inside = started, False
        self.seconds = {_START: self.now(), _IMPORTS: (0.0, 0.0)}

    def now(self) -> tuple[float, float]:
        """Return the seconds since the command was started."""
        return time.monotonic() - self._started, time.process_time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what passes meanwhile to a phase."""
        if self._inside:
            yield
            return
        before, self._inside = self.now(), True
        try:
            yield
        finally:
            self._inside = False
            known = self.seconds.get(name, (0.0, 0.0))
            self.seconds[name] = _add(known, _subtract(self.now(), before))

    def wrap(self, names: list[str], function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function each of whose calls is a phase; the last name is that of all further calls."""
        left = list(names)

        def time_call(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return function(*arguments, **named)
            with self.phase(left.pop(0) if len(left) > 1 else left[0]):
                return function(*arguments, **named)

        return time_call


def _add(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]


def _subtract(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] - other[0], one[1] - other[1]


def run_inside(started: float, words: list[str]) -> int:
    """Run the command in this process, and print what its phases took as the last line."""
    clock = _Clock(started)
    with clock.phase(_IMPORTS):
        from gpuprof.cli.main import main as gpuprof

        places: dict[tuple[str, str], list[str]] = {}
        for phase, place in _PHASES.items():
            places.setdefault(place, []).append(phase)
        for (owner_name, function_name), phases in places.items():
            owner = resolve_name(owner_name)
            setattr(owner, function_name, clock.wrap(phases, getattr(owner, function_name)))
    code = gpuprof(["place", *words])
    seconds, whole = clock.seconds, clock.now()
    known = (0.0, 0.0)
    for one in seconds.values():
        known = _add(known, one)
    told = {name: seconds[name] for name in (_START, _IMPORTS, *_PHASES) if name in seconds}
    sys.stdout.write(json.dumps({**told, _REST: _subtract(whole, known), _WHOLE: whole}) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
