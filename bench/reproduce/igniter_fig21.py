"""Time and memory of the decision, by the number of workloads (iGniter, TPDS'22, Figure 21).

    python -m bench.reproduce.igniter_fig21 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profile that its authors publish: put config.jsonl of i-Gniter/Algorithm/config of
https://github.com/icloud-ecnu/igniter into DIRECTORY/igniter_v100.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.igniter_profiles import DEVICE, table_3
from bench.published_measurements import published_estimator
from bench.reproduce import command
from bench.reproduce.igniter_runs import find_profile, list_lines, problem
from bench.reproduce.place_lines import make_named_policy
from bench.reproduce.reproduction import Fact, Reproduction, lines
from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.share import Share
from gpuprof.estimators.services import name_services
from gpuprof.placement.problem import Problem
from gpuprof.reporting.chart import Axis

_COUNTS = (10, 50, 100, 200, 500, 1000)
_LIMIT_S = 10.0
#: §5.4: seconds and MB with 1,000 workloads, as upper ends.
_SAID_S, _SAID_MB = 4.61, 55.0

_WHY = (
    "The paper draws its workloads from Table 3, as here: W1 … W12 again and again. Equal ones are worked out once, "
    "which is why the time hardly grows.",
    "Memory is what the decision takes at most beside the profiles (tracemalloc); the paper counts its whole program.",
    "optimal is gpuprof's own, with a time limit of 10 s: fewer GPUs for more time.",
)


def compute(reference: Path, counts: Sequence[int] = _COUNTS) -> Reproduction:
    """Place growing numbers of workloads by iGniter's policy and by optimal."""
    profiled = published_estimator("igniter", find_profile(reference))
    profiled.batches("alexnet", device(DEVICE), Share())  # read and fitted before the clock starts
    rows: list[tuple[str, float, float, float, float, float]] = []
    for count in counts:
        given = _first_workloads(profiled, count)
        seconds, gpus = _decide("igniter", given)
        tracemalloc.start()
        _decide("igniter", _first_workloads(profiled, count))
        megabytes = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        limited = replace(given, options=replace(given.options, time_limit_s=_LIMIT_S))
        own_seconds, own_gpus = _decide("optimal", limited)
        rows.append((str(count), seconds, megabytes, float(gpus), own_seconds, float(own_gpus)))
    last = rows[-1]
    by_count = {"igniter": {float(row[0]): row[1] for row in rows}, "optimal": {float(row[0]): row[4] for row in rows}}
    return Reproduction(
        title="iGniter Figure 21: time and memory of the decision",
        header=("workloads", "igniter s", "MB", "GPUs", "optimal s", "GPUs of optimal"),
        rows=tuple(rows),
        facts=(
            Fact("seconds with 1,000 workloads, at most", "§5.4", (0.0, _SAID_S), last[1], 2),
            Fact("MB with 1,000 workloads, below", "§5.4", (0.0, _SAID_MB), last[2]),
        ),
        differences=_WHY,
        charts=(lines("Time of the decision (iGniter, Figure 21)", Axis("workloads"), Axis("s", low=0.0), by_count),),
        commands=tuple(dict.fromkeys(line for count in counts for line in _list_lines(reference, count))),
    )


def _list_lines(reference: Path, count: int) -> tuple[str, ...]:
    models, demands = table_3(-(-count // 12))
    chosen, limit = (models, demands[:count]), ("--time-limit", f"{_LIMIT_S:g}")
    own = list_lines(reference, ["optimal"], chosen, f"workloads{count}", limit)
    return (*list_lines(reference, ["igniter"], chosen, f"workloads{count}"), *own)


def _first_workloads(profiled: Estimator, count: int) -> Problem:
    models, demands = table_3(-(-count // 12))
    own = {demand.model: models[demand.model] for demand in demands[:count]}
    whole = problem(name_services(profiled, own), (DEVICE,))
    files = {name: replace(next(iter(whole.files.values())), sha256=model) for name, model in own.items()}
    return replace(whole, demands=demands[:count], files=files)


def _decide(named: str, given: Problem) -> tuple[float, int]:
    policy = make_named_policy(named)
    started = time.perf_counter()
    placement = policy.place(given)
    return time.perf_counter() - started, len(placement.gpus)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
