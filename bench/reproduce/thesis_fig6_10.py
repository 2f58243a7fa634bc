"""Goodput of two vision and two language models on one to eight V100, by policy (Elvinger, ETH 2024, Figure 6.10).

python -m bench.reproduce.thesis_fig6_10 [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.reproduction import Fact, Reproduction, lines
from bench.reproduce.thesis_cluster import Experiment, arrived_rps, goodput, list_lines, plan
from gpuprof.reporting.chart import Axis

#: §6.2.2; ao-milp is left out there, because it puts no two models on a GPU.
EXPERIMENT = Experiment(("resnet50", "mobilenet_v2", "bert", "gpt2"), 300.0, 300.0)
_POLICIES = ("usher", "wao-usher", "wsm-milp", "igniter", "optimal")
_GPUS = (1, 2, 3, 4, 5, 6, 7, 8)
#: "Near-ideal" and "near-optimal" of the text, as a part of what arrives.
_NEAR = 0.9

_WHY = (
    "The figure's bars carry no numbers; what the text says of them stands below the table.",
    "wsm-milp on five GPUs: two replicas of bert and two of gpt2, none enough for its model, as in the thesis.",
    "usher on five GPUs: three replicas of gpt2, as in the thesis, but most of its requests are late here. They reach "
    "303 requests/s of the 300 that come, since a share of 91% (the maximum occupancy) is put down as slower than a "
    "batch that keeps 98% of the SMs busy; the testbed shows no such loss at large shares.",
    "wao-usher: bert (batch 4) under 31.8% takes 104 ms here and 180 ms on the testbed; either way it fails.",
    "igniter plans with what the table says of batches and shares, since the thesis does not print the coefficients "
    "that it measured: seven GPUs here, and large batches that lose a seventh of the requests. Below its number of "
    "GPUs the whole load goes to those that are there, as in the thesis.",
    "optimal is gpuprof's own, planned with queues and shares in steps of 2.5% within 5 s, served by its own rules.",
)


def compute(_: Path, gpus: Sequence[int] = _GPUS) -> Reproduction:
    """Place by every policy on so many GPUs, and simulate what the clients would see."""
    plans = {policy: {count: plan(policy, EXPERIMENT, count) for count in gpus} for policy in _POLICIES}
    totals = {
        policy: {float(count): sum(goodput(made, EXPERIMENT).values()) for count, made in own.items()}
        for policy, own in plans.items()
    }
    ideal = sum(arrived_rps(EXPERIMENT).values())
    axes = (Axis("V100 GPUs", low=0.5, high=max(gpus) + 0.5), Axis("goodput (requests/s)", low=0.0))
    facts = [
        Fact("GPUs that wao-usher takes for enough", "observation 1", 3, plan("wao-usher", EXPERIMENT, None).gpus),
        Fact("GPUs that igniter plans with", "observation 3", 6, plan("igniter", EXPERIMENT, None).gpus),
        Fact("GPUs with which wsm-milp is near-optimal", "observation 2", 7, _first_near(totals["wsm-milp"], ideal)),
    ]
    for model in ("bert", "gpt2") if 5 in gpus else ():
        what, made = f"wsm-milp's replicas of {model} on five", plans["wsm-milp"][5]
        facts.append(Fact(what, "Figure 6.12", 2, len(made.replicas(model))))
    if 5 in gpus:
        what = "usher's replicas of gpt2 on five"
        facts.append(Fact(what, "Figure 6.12", 3, len(plans["usher"][5].replicas("gpt2"))))
    return Reproduction(
        title="Thesis Figure 6.10: goodput in requests/s, two vision and two language models at 300/s each, SLO 300 ms",
        header=("policy", *(f"{count} GPUs" for count in gpus)),
        rows=(*((policy, *values.values()) for policy, values in totals.items()), ("ideal", *[ideal] * len(gpus))),
        facts=tuple(facts),
        differences=_WHY,
        charts=(lines("Goodput of vision and language models (thesis, Figure 6.10)", *axes, totals),),
        sound=all(made.sound for own in plans.values() for made in own.values()),
        commands=list_lines(made for own in plans.values() for made in own.values()),
    )


def _first_near(totals: dict[float, float], ideal: float) -> float | None:
    """Return the fewest GPUs with which the goodput is near the ideal."""
    return min((count for count, total in totals.items() if total >= _NEAR * ideal), default=None)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
