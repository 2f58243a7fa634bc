"""Cost over the load where K80, V100, A100 and H100 can be had, by scheduler (USHER, OSDI'24, Figure 21).

python -m bench.reproduce.usher_fig21 [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.place_lines import WORK
from bench.reproduce.reproduction import Reproduction, lines
from bench.reproduce.usher_runs import KINDS, MOST_RPS, Decision, commands, decide, demands, ratios, schedulers, why
from gpuprof.reporting.chart import Axis

_LOADS = tuple(MOST_RPS * part / 3 for part in range(1, 4))
#: As `SCALE`, but larger, for configurations of four kinds of GPU are more.
_SCALE = 250.0
#: §5.2.2: how many times less USHER costs.
_PRINTED = (1.9, 2.2)
_MILLION, _THOUSAND = 1e6, 1e3

_KINDS_WHY = (
    "Prices are the catalogue's (AWS on demand), the paper's those of its time. Other kinds than the V100 are as much "
    "quicker or slower as their float32 peaks, for the paper's profiles of them are not published.",
    "USHER opens the GPU of the lowest price that can host a model (Algorithm 2), be it a K80; for what they serve the "
    "H100 are the cheapest by half, which the baselines find and it does not.",
    "gpulet takes the kind of GPU that is cheapest for it; the others mix kinds.",
)


def compute(_: Path, loads: Sequence[float] = _LOADS, scale: float = _SCALE, work: Path = WORK) -> Reproduction:
    """Decide for each load on the kinds of GPU that are cheapest."""
    runs = [decide(demands(load, scale), KINDS, work=work) for load in loads]
    found = {name: [_cost(run[name]) * scale / _THOUSAND for run in runs] for name in schedulers()}
    series = {n: {load / _MILLION: v for load, v in zip(loads, values, strict=True)} for n, values in found.items()}
    axes = (Axis("load (million requests/s)", low=0.0), Axis("cost (thousand $ per hour)", low=0.0))
    return Reproduction(
        title="USHER Figure 21: thousand $ per hour by load, K80, V100, A100 and H100",
        header=("scheduler", *(f"{load / _MILLION:g} million/s" for load in loads)),
        rows=tuple((name, *values) for name, values in found.items()),
        facts=ratios(runs, _cost, _PRINTED, "§5.2.2", more=False),
        differences=why(scale) + _KINDS_WHY,
        charts=(lines("Cost by load (USHER, Figure 21)", *axes, series),),
        commands=commands(runs, work),
    )


def _cost(decision: Decision) -> float:
    return decision.cost_per_hour


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
