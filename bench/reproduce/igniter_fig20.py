"""iGniter's twelve workloads where V100 and T4 can be had (TPDS'22, Figure 20).

    python -m bench.reproduce.igniter_fig20 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profile that its authors publish: put config.jsonl of i-Gniter/Algorithm/config of
https://github.com/icloud-ecnu/igniter into DIRECTORY/igniter_v100.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.igniter_profiles import table_3
from bench.reproduce import command
from bench.reproduce.igniter_runs import find_missed, find_profile, list_stand_in_lines, place, problem
from bench.reproduce.reproduction import Fact, Reproduction
from bench.reproduce.stand_in_db import estimate_igniter
from gpuprof.estimators.services import name_services
from gpuprof.placement.comparison import Outcome
from gpuprof.reporting.chart import Axis, Chart, group_bars

#: GPUs and $ per hour on each kind (§5.3, Figure 20).
_PRINTED = {"t4": (15, 7.89), "v100": (6, 18.36)}
#: Workloads that take two T4 or more (§5.3).
_SPLIT = ("W7", "W8", "W10", "W12")
_CHOICES: Mapping[str, tuple[str, ...]] = {"t4": ("t4",), "v100": ("v100",), "t4 or v100": ("t4", "v100")}
_POLICY = "igniter"

_WHY = (
    "The T4's coefficients are not published. Here it is a V100 of half the speed (the ratio of the float32 peaks), "
    "and power, clock and cache in proportion, so that the number of GPUs need not agree. The paper also finds a "
    "third of the V100's memory bandwidth in it, which this leaves out.",
    "A workload that is too large for a GPU is split into the fewest equal parts that are not.",
)


def compute(reference: Path) -> Reproduction:
    """Place the workloads on T4, on V100, and on what is cheaper."""
    estimator = name_services(estimate_igniter(find_profile(reference), tuple(_PRINTED)), table_3()[0])
    outcomes = {name: place(problem(estimator, kinds), name, _POLICY) for name, kinds in _CHOICES.items()}
    rows = tuple(
        (name, *_figures(one), 0.0 if one.deployment is None else float(len(find_missed(one.deployment, estimator))))
        for name, one in outcomes.items()
    )
    return Reproduction(
        title="iGniter Figure 20: the twelve workloads W1 … W12 by kind of GPU",
        header=("GPUs to be had", "GPUs", "$ per hour", "broken"),
        rows=rows,
        facts=_facts(outcomes),
        differences=_WHY,
        charts=(_chart(outcomes),),
        sound=not any(one.violations for one in outcomes.values()),
        commands=list_stand_in_lines(find_profile(reference), tuple(_PRINTED), _CHOICES.values(), _POLICY),
    )


def _figures(outcome: Outcome) -> tuple[float | None, float | None]:
    figures = outcome.objective
    return (None, None) if figures is None else (float(figures.gpus), figures.cost_per_hour)


def _facts(outcomes: Mapping[str, Outcome]) -> tuple[Fact, ...]:
    facts = []
    for kind, (gpus, cost) in _PRINTED.items():
        own = _figures(outcomes[kind])
        facts.append(Fact(f"GPUs, only {kind}", "Figure 20", gpus, own[0]))
        facts.append(Fact(f"$ per hour, only {kind}", "Figure 20", cost, own[1], 2))
    chosen = _figures(outcomes["t4 or v100"])[1]
    facts.append(Fact("$ per hour, the cheaper kind", "§5.3", _PRINTED["t4"][1], chosen, 2))
    for workload in _SPLIT:
        facts.append(Fact(f"T4 that {workload} takes", "§5.3", (2.0, math.inf), replicas(outcomes["t4"], workload)))
    return tuple(facts)


def replicas(outcome: Outcome, model: str) -> int:
    """Return how many replicas of a workload a map has."""
    places = () if outcome.deployment is None else outcome.deployment.places()
    return sum(replica.model == model for _, _, _, replica in places)


def _chart(outcomes: Mapping[str, Outcome]) -> Chart:
    names = tuple(outcomes)
    costs = {"here": [_figures(outcomes[name])[1] for name in names]}
    costs["as printed"] = [_PRINTED[name][1] if name in _PRINTED else None for name in names]
    bars = group_bars(names, costs, "$ per hour")
    title = "Cost of twelve workloads by kind of GPU (iGniter, Figure 20)"
    return Chart(title, Axis("GPUs to be had", names=names), Axis("cost ($ per hour)"), boxes=bars)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
