"""Goodput over the number of V100 in a fixed cluster, by scheduler (USHER, OSDI'24, Figure 15).

python -m bench.reproduce.usher_fig15 [--plot FILE.svg|FILE.png] [--json]
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

_GPUS = (1000, 2000, 3000, 4000, 5000, 6000)
#: §5.2.1: USHER's goodput over the others'.
_PRINTED = (1.5, 1.9)
_MILLION = 1e6

_FIXED = (
    "A model whose least number of replicas does not fit the fleet is not served by USHER (thesis §5.2.2), and more "
    "replicas come in multiples of it: its lines rise in steps.",
)


def compute(_: Path, gpus: Sequence[int] = _GPUS, scale: float = SCALE, work: Path = WORK) -> Reproduction:
    """Decide for 15 million requests/s on so many GPUs."""
    wanted = demands(MOST_RPS, scale)
    runs = [decide(wanted, ("v100",), round(count / scale), work) for count in gpus]
    found = {name: [_goodput(run[name]) * scale / _MILLION for run in runs] for name in schedulers()}
    series = {name: dict(zip(map(float, gpus), values, strict=True)) for name, values in found.items()}
    axes = (Axis("V100 GPUs", low=0.0), Axis("goodput (million requests/s)", low=0.0))
    return Reproduction(
        title="USHER Figure 15: goodput in million requests/s of 15 million that come, fixed cluster of V100",
        header=("scheduler", *(f"{count} GPUs" for count in gpus)),
        rows=tuple((name, *values) for name, values in found.items()),
        facts=ratios(runs, _goodput, _PRINTED, "§5.2.1", more=True),
        differences=why(scale) + _FIXED,
        charts=(lines("Goodput in a fixed cluster (USHER, Figure 15)", *axes, series),),
        commands=commands(runs, work),
    )


def _goodput(decision: Decision) -> float:
    return decision.goodput_rps


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
