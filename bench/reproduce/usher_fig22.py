"""Goodput in a fixed cluster over the SLO, by scheduler: what is decided for USHER's Figures 22 and 23 (OSDI'24).

python -m bench.reproduce.usher_fig22 [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.place_lines import WORK
from bench.reproduce.reproduction import Reproduction, lines
from bench.reproduce.usher_runs import MOST_RPS, SCALE, Decision, commands, decide, demands, schedulers, why
from gpuprof.domain.demand import Demand, Slo
from gpuprof.reporting.chart import Axis

_SCALES = (0.5, 0.75, 1.0, 1.5, 2.0)
_GPUS = 3000
_MILLION = 1e6

_TESTBED = (
    "The paper measures on its testbed, with requests that wait and neighbours that interfere. Here stands what the "
    "schedulers decide for the eight models with published profiles on the simulated cluster of Figure 15: a tighter "
    "SLO leaves smaller batches, whatever the scheduler.",
)


def compute(
    _: Path, scales: Sequence[float] = _SCALES, scale: float = SCALE, gpus: int = _GPUS, work: Path = WORK
) -> Reproduction:
    """Decide for 15 million requests/s with all SLOs times each of ``scales``."""
    wanted, count = demands(MOST_RPS, scale), round(gpus / scale)
    runs = [decide(_with_slos(wanted, times), ("v100",), count, work) for times in scales]
    found = {name: [_goodput(run[name]) * scale / _MILLION for run in runs] for name in schedulers()}
    series = {name: dict(zip(scales, values, strict=True)) for name, values in found.items()}
    axes = (Axis("SLO over the paper's"), Axis("goodput (million requests/s)", low=0.0))
    return Reproduction(
        title=f"USHER Figures 22 and 23: goodput in million requests/s of 15 million that come, {gpus:,} V100, by SLO",
        header=("scheduler", *(f"SLO × {times:g}" for times in scales)),
        rows=tuple((name, *values) for name, values in found.items()),
        facts=(),
        differences=why(scale) + _TESTBED,
        charts=(lines("Goodput by SLO (USHER, Figures 22 and 23)", *axes, series),),
        commands=commands(runs, work),
    )


def _with_slos(wanted: Sequence[Demand], times: float) -> tuple[Demand, ...]:
    return tuple(replace(one, slo=Slo(one.slo.latency_ms * times, one.slo.percentile)) for one in wanted)


def _goodput(decision: Decision) -> float:
    return decision.goodput_rps


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
