"""Times what is asked of GPUs that nobody measured: an estimate, plans of one and of four models, on one kind to any.

Each command is started in a process of its own, without a database, in turns with that of another checkout of gpuprof
where one is given. Printed are medians over the rounds: time on the clock, which grows with what else runs, and on a
core; and what the last round's map costs an hour. Compiled code is kept from a first round that is not counted.

Last come a thousand of iGniter's workloads in 1, 5 and 30 s, once (`bench.planning_scale`), where its profile is there.

    python -m bench.planning_speed --rounds 3 --beside ../older-checkout
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import planning_scale
from bench.igniter_profiles import table_3
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build

#: Model → requests per second, SLO in ms.
_DEMANDS = {"resnet50": (800, 60), "densenet121": (300, 80), "squeezenet": (500, 50), "transformer_encoder": (1500, 30)}
_THREE_KINDS = "t4,l4,a100-80"
_CHECKOUT = Path(__file__).parents[1]


def main() -> None:
    """Print a line for each command, one beside the other where another checkout is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout of gpuprof")
    parser.add_argument("--gpu", default="a100-80")
    given = parser.parse_args()
    checkouts = [_CHECKOUT, *([given.beside.resolve()] if given.beside else [])]
    with tempfile.TemporaryDirectory(prefix="gpuprof-planning-") as made:
        commands = _write_demands(Path(made), given.gpu)
        times: dict[tuple[str, Path], list[tuple[float, float]]] = {}
        costs: dict[tuple[str, Path], str] = {}
        for number in range(given.rounds + 1):
            for name, command in commands.items():
                for checkout in checkouts:
                    took = _start_s(command, checkout, Path(made))
                    costs[name, checkout] = _read_cost(Path(made) / "map.json") if "place" in command else ""
                    if number:
                        times.setdefault((name, checkout), []).append(took)
        print(f"{'':32}" + "".join(f"{'clock s':>10}{'core s':>8}{'$/h':>8}" for _ in checkouts))
        for name in commands:
            line = f"{name:32}"
            for own in checkouts:
                clock, core = (statistics.median(one) for one in zip(*times[name, own], strict=True))
                line += f"{clock:10.1f}{core:8.1f}{costs[name, own]:>8}"
            print(line)
    if planning_scale.PROFILE.is_file():
        mixes = [table_3(planning_scale.COPIES)]
        for line in planning_scale.list_lines(planning_scale.PROFILE, (1.0, 5.0, 30.0), mixes):
            print(line)


def _write_demands(directory: Path, gpu: str) -> dict[str, list[str]]:
    """Build the models and return the commands by what they do."""
    for name in _DEMANDS:
        build(find_architecture(name), directory / f"{name}.onnx")
    place = ["place", "--gpus", gpu, "-o", "map.json", "--slo-file"]
    commands = {"estimate one model": ["estimate", "resnet50.onnx", "--device", gpu]}
    for count in (1, len(_DEMANDS)):
        rows = [f"{name}.onnx,{rate},{slo}" for name, (rate, slo) in list(_DEMANDS.items())[:count]]
        (directory / f"{count}.csv").write_text("\n".join(["model,rate_rps,slo_ms", *rows]) + "\n", encoding="utf-8")
        commands[f"place models: {count}"] = [*place, f"{count}.csv"]
    four = ["-o", "map.json", "--slo-file", f"{len(_DEMANDS)}.csv"]
    commands["place on three kinds, 5 s"] = ["place", "--gpus", _THREE_KINDS, "--time-limit", "5", *four]
    commands["place on any kind"] = ["place", "--gpus", "any", *four]
    return commands


def _read_cost(path: Path) -> str:
    """Return what a map costs an hour."""
    return f"{json.loads(path.read_text(encoding='utf-8'))['predicted']['cost_per_hour']:.2f}"


def _start_s(command: list[str], checkout: Path, directory: Path) -> tuple[float, float]:
    """Return the time of a process on the clock, and on the cores that it ran on."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "GPUPROF_DB": str(directory / "no-database")}
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    started = [sys.executable, "-m", "gpuprof", *command]
    subprocess.run(started, cwd=directory, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    core_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, core_s


if __name__ == "__main__":
    main()
