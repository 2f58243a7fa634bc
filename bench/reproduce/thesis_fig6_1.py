"""Goodput of five vision models on one to six V100, by policy (Elvinger, ETH 2024, Figure 6.1).

python -m bench.reproduce.thesis_fig6_1 [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.reproduction import Fact, Reproduction, lines
from bench.reproduce.thesis_cluster import (
    POLICIES,
    Experiment,
    Plan,
    arrived_rps,
    goodput,
    list_lines,
    plan,
    rebuild_map,
)
from gpuprof.reporting.chart import Axis

#: §6.2.1. Of 500 requests/s that a client aims at, 433.34 arrive (observation 4).
EXPERIMENT = Experiment(
    ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19"), 500.0, 200.0, arrived=433.34 / 500.0
)
_GPUS = (1, 2, 3, 4, 5, 6)
_HEAVY = "efficientnet_b7"
#: Goodput and throughput of efficientnet_b7 on six GPUs (§6.2.1, observation 3), in requests/s.
_USHER, _MILP = (360.61, 425.75), (143.73, 425.25)

_WHY = (
    "The figure's bars carry no numbers; what the text says of them stands below the table.",
    "ao-milp: the thesis's solver took batch 64 for efficientnet_b7 and resnet50, of several that its objective cannot "
    "tell apart; ours takes the least requirements among equals, here batch 8 and 4, and loses nothing by waiting for "
    "large batches. With the two replicas of batch 64 put down by hand, most are late here too (last line): few of "
    "their batches are full after 100 ms, and a full one takes 161 ms. Some more are in time than on the testbed.",
    "usher with two replicas of batch 8 serves efficientnet_b7 fully here; on the testbed 15% are late, by queueing at "
    "the worker. The table holds times of the GPU, not those of the worker's CPU and of copying results.",
    "wao-usher is as bad here as there, and for the same reason: its shares are smaller than what the models keep "
    "busy. It puts everything on two GPUs of four, the thesis on three, both with the same predicted goodput.",
    "igniter plans with what the table says of batches and shares; the thesis measured its coefficients, which it does "
    "not print, and splits efficientnet_b7 into four replicas, here two. With large batches it loses a sixth here too "
    "(observation 5), and the thesis lost more, by interference.",
    "Interference other than by shares is not in the table, and so not here: wsm-milp's models on one GPU do not "
    "disturb one another. Its four GPUs are as good as usher's six here; in the thesis they come close.",
    "optimal is gpuprof's own, planned with queues and shares in steps of 2.5% within 5 s, served by its own rules.",
)


def compute(_: Path, gpus: Sequence[int] = _GPUS) -> Reproduction:
    """Place by every policy on so many GPUs, and simulate what the clients would see."""
    plans = {policy: [plan(policy, EXPERIMENT, count) for count in gpus] for policy in POLICIES}
    seen = {policy: [goodput(made, EXPERIMENT) for made in own] for policy, own in plans.items()}
    totals = {policy: [sum(each.values()) for each in own] for policy, own in seen.items()}
    ideal = sum(arrived_rps(EXPERIMENT).values())
    series = {policy: dict(zip(map(float, gpus), values, strict=True)) for policy, values in totals.items()}
    axes = (Axis("V100 GPUs", low=0.5, high=max(gpus) + 0.5), Axis("goodput (requests/s)", low=0.0))
    return Reproduction(
        title="Thesis Figure 6.1: goodput in requests/s, five vision models at 500/s each, SLO 200 ms",
        header=("policy", *(f"{count} GPUs" for count in gpus)),
        rows=(*((policy, *values) for policy, values in totals.items()), ("ideal", *[ideal] * len(gpus))),
        facts=_facts(dict(zip(gpus, plans["usher"], strict=True))),
        differences=_WHY,
        charts=(lines("Goodput of five vision models (thesis, Figure 6.1)", *axes, series),),
        sound=all(made.sound for own in plans.values() for made in own),
        commands=list_lines(made for own in plans.values() for made in own),
    )


def _facts(usher: Mapping[int, Plan]) -> tuple[Fact, ...]:
    facts = [
        Fact("GPUs that usher needs for all", "§6.2.1", 6, plan("usher", EXPERIMENT, None).gpus),
        Fact("GPUs that igniter needs for all", "§6.2.1", 5, plan("igniter", EXPERIMENT, None).gpus),
        Fact("GPUs that wao-usher uses of four", "Figure 6.3", 3, plan("wao-usher", EXPERIMENT, 4).gpus),
    ]
    if 4 in usher:
        replicas = usher[4].replicas(_HEAVY)
        facts.append(Fact(f"usher's replicas of {_HEAVY} on four", "Figure 6.2", 2, len(replicas)))
        facts.append(Fact("their batch size", "Figure 6.2", 8, usher[4].batch(_HEAVY)))
    for batch, (good, arrived) in ((8, _USHER), (64, _MILP)):
        what = f"{_HEAVY}, two replicas of batch {batch}: in time, %"
        facts.append(Fact(what, "observation 3", 100.0 * good / arrived, in_time_pct(batch)))
    return tuple(facts)


def in_time_pct(batch: int) -> float:
    """Return how many of efficientnet_b7's requests two replicas of this batch, alone on a GPU each, answer in time."""
    alone = Experiment((_HEAVY,), EXPERIMENT.rate_rps, EXPERIMENT.slo_ms, EXPERIMENT.arrived)
    served = goodput(rebuild_map(alone, [{_HEAVY: batch}] * 2), alone)[_HEAVY]
    return 100.0 * served / arrived_rps(alone)[_HEAVY]


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
