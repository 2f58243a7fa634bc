"""What each part of USHER's scheduler saves: V100 over load without it (OSDI'24, Figure 25).

python -m bench.reproduce.usher_fig25 [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from bench.reproduce import command
from bench.reproduce.place_lines import WORK
from bench.reproduce.reproduction import Reproduction, lines
from bench.reproduce.usher_runs import MOST_RPS, SCALE, Decision, Scheduler, commands, decide_one, demands, why
from gpuprof.placement.published.requirement import CreqMetric
from gpuprof.placement.published.usher_placement import Ablation
from gpuprof.reporting.chart import Axis

_LOADS = tuple(MOST_RPS * part / 5 for part in (1, 3, 5))
_METRICS: tuple[CreqMetric, ...] = ("max-occupancy", "wao")
_MILLION = 1e6

_VARIANTS = (
    "The paper measures the goodput of its variants on the testbed. Here stands how many GPUs they decide to take, by "
    "`-O without=CM` (no compute- and memory-heavy classes), `WD` (no workload division) and `S` (no sorting).",
    "USHER/M, without merging, is not there: whether models merge is a matter of trained weights, which are not "
    "published.",
)


def compute(_: Path, loads: Sequence[float] = _LOADS, scale: float = SCALE, work: Path = WORK) -> Reproduction:
    """Decide for each load on as many GPUs as needed."""
    variants = {
        f"usher{f' without {part}' if part else ''} by {metric}": Scheduler(
            f"usher -O creq={metric}{f' -O without={part}' if part else ''}", "usher", "whole"
        )
        for metric in _METRICS
        for part in get_args(Ablation)
    }
    runs = [
        {name: decide_one(one, demands(load, scale), ("v100",), work=work) for name, one in variants.items()}
        for load in loads
    ]
    found = {name: [_gpus(run[name]) * scale for run in runs] for name in variants}
    series = {n: {load / _MILLION: v for load, v in zip(loads, values, strict=True)} for n, values in found.items()}
    axes = (Axis("load (million requests/s)", low=0.0), Axis("V100 GPUs", low=0.0))
    return Reproduction(
        title="USHER Figure 25: V100 GPUs by load, without parts of the scheduler",
        header=("variant", *(f"{load / _MILLION:g} million/s" for load in loads)),
        rows=tuple((name, *values) for name, values in found.items()),
        facts=(),
        differences=(*why(scale)[:1], *why(scale)[-1:], *_VARIANTS),
        charts=(lines("GPUs by variant (USHER, Figure 25)", *axes, series),),
        commands=commands(runs, work),
    )


def _gpus(decision: Decision) -> float:
    return decision.gpus


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
