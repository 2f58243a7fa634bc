"""V100 that are needed over the load, by scheduler (USHER, OSDI'24, Figure 18).

python -m bench.reproduce.usher_fig18 [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.place_lines import WORK
from bench.reproduce.reproduction import Reproduction, lines
from bench.reproduce.usher_runs import MOST_RPS, SCALE, Decision, commands, decide, demands, ratios, schedulers, why
from gpuprof.reporting.chart import Axis

_LOADS = tuple(MOST_RPS * part / 5 for part in range(1, 6))
#: §5.2.2: how many times fewer GPUs USHER uses.
_PRINTED = (1.7, 2.1)
_MILLION = 1e6


def compute(_: Path, loads: Sequence[float] = _LOADS, scale: float = SCALE, work: Path = WORK) -> Reproduction:
    """Decide for each load on as many GPUs as needed."""
    runs = [decide(demands(load, scale), ("v100",), work=work) for load in loads]
    found = {name: [_gpus(run[name]) * scale for run in runs] for name in schedulers()}
    series = {n: {load / _MILLION: v for load, v in zip(loads, values, strict=True)} for n, values in found.items()}
    axes = (Axis("load (million requests/s)", low=0.0), Axis("V100 GPUs", low=0.0))
    return Reproduction(
        title="USHER Figure 18: V100 GPUs by load",
        header=("scheduler", *(f"{load / _MILLION:g} million/s" for load in loads)),
        rows=tuple((name, *values) for name, values in found.items()),
        facts=ratios(runs, _gpus, _PRINTED, "§5.2.2", more=False),
        differences=why(scale),
        charts=(lines("GPUs by load (USHER, Figure 18)", *axes, series),),
        commands=commands(runs, work),
    )


def _gpus(decision: Decision) -> float:
    return decision.gpus


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
