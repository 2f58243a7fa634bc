"""Goodput of five vision models on four V100 over the load, by SLO and policy (Elvinger, ETH 2024, Figure 6.15).

python -m bench.reproduce.thesis_fig6_15 [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.reproduction import Fact, Reproduction, lines
from bench.reproduce.thesis_cluster import POLICIES, Experiment, Plan, goodput, list_lines, plan
from gpuprof.reporting.chart import Axis, Chart

_MODELS = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
_GPUS = 4
_LOADS = (1000, 2000, 3000, 4000, 5000)
_SLOS = (150, 250, 350)
#: GPUs that iGniter needs at an SLO of 350 ms, by load (§6.3).
_IGNITER_GPUS = {1000: 2, 2000: 3, 3000: 8, 4000: 8, 5000: 8}

_WHY = (
    "The figure's bars carry no numbers; what the text says of them stands below the table.",
    "Clients reach less than the target in the thesis; here they reach it, so that high loads are higher.",
    "wsm-milp falls from 3000 to 4000 requests/s as in the thesis: one replica of a heavy model cannot serve its rate "
    "any more, its queue grows, and everything in it is late.",
    "ao-milp takes the least requirements among batches that its objective cannot tell apart, the thesis's solver took "
    "batch 64 for densenet121; waiting 100 ms for such batches is what it loses by there, and not here.",
    "igniter plans with what the table says of batches and shares, since the thesis does not print the coefficients "
    "that it measured, and without interference: the thesis's needs eight GPUs (all that there are) from 3000/s on. "
    "Its plan is cut off after four GPUs, as in the thesis.",
    "optimal is gpuprof's own, planned with queues and shares in steps of 2.5% within 5 s, served by its own rules.",
)


def compute(_: Path, loads: Sequence[int] = _LOADS, slos: Sequence[int] = _SLOS) -> Reproduction:
    """Place by every policy for each load and SLO, and simulate what the clients would see."""
    seen: dict[int, dict[str, dict[float, float]]] = {slo: {policy: {} for policy in POLICIES} for slo in slos}
    plans: list[Plan] = []
    for slo in slos:
        for policy in POLICIES:
            for load in loads:
                given = experiment(load, slo)
                made = plan(policy, given, _GPUS)
                seen[slo][policy][float(load)] = sum(goodput(made, given).values())
                plans.append(made)
    return Reproduction(
        title="Thesis Figure 6.15: goodput in requests/s on four V100, by target rate of all five models",
        header=("policy", "SLO ms", *(f"{load}/s" for load in loads)),
        rows=tuple((policy, float(slo), *seen[slo][policy].values()) for slo in slos for policy in POLICIES),
        facts=_facts(loads, slos, seen),
        differences=_WHY,
        charts=tuple(_chart(slo, seen[slo]) for slo in slos),
        sound=all(made.sound for made in plans),
        commands=list_lines(plans),
    )


def experiment(load_rps: float, slo_ms: float) -> Experiment:
    """Return the five models at this rate together."""
    return Experiment(_MODELS, load_rps / len(_MODELS), slo_ms)


def _facts(
    loads: Sequence[int], slos: Sequence[int], seen: dict[int, dict[str, dict[float, float]]]
) -> tuple[Fact, ...]:
    facts = []
    if 350 in slos:
        for load in loads:
            gpus = plan("igniter", experiment(load, 350.0), None).gpus
            facts.append(Fact(f"GPUs that igniter needs for {load}/s at 350 ms", "§6.3", _IGNITER_GPUS[load], gpus))
    for slo in slos if {3000, 4000, 5000} <= set(loads) else ():
        own = seen[slo]["wsm-milp"]
        falls = float(own[4000.0] < own[3000.0])
        facts.append(Fact(f"wsm-milp falls from 3000/s to 4000/s at {slo} ms (1: yes)", "observation 1", 1, falls))
        rises = float(own[5000.0] > own[4000.0])
        facts.append(Fact(f"wsm-milp rises from 4000/s to 5000/s at {slo} ms (1: yes)", "observation 1", 1, rises))
    if 250 in slos and {3000, 5000} <= set(loads):
        for load in (3000, 5000):
            batch = plan("ao-milp", experiment(load, 250.0), _GPUS).batch("densenet121")
            facts.append(Fact(f"ao-milp's batch of densenet121 at {load}/s, 250 ms", "observation 2", 64, batch))
    return tuple(facts)


def _chart(slo: int, totals: dict[str, dict[float, float]]) -> Chart:
    x = Axis("target rate of all models (requests/s)", low=0.0)
    title = f"Goodput on four V100, SLO {slo} ms (thesis, Figure 6.15)"
    return lines(title, x, Axis("goodput (requests/s)", low=0.0), totals)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
