"""The plans of gpu-lets, GSLICE and iGniter for three workloads, and whose SLOs break (iGniter, TPDS'22, Table 1).

    python -m bench.reproduce.igniter_table1 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profile that its authors publish, as bench.reproduce.igniter_fig14 says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bench.igniter_profiles import table_1
from bench.published_measurements import published_estimator
from bench.reproduce import command
from bench.reproduce.igniter_fig14 import POLICIES, UNAWARE
from bench.reproduce.igniter_runs import BUDGET, find_missed, find_profile, list_lines, place
from bench.reproduce.reproduction import Fact, Reproduction
from gpuprof.domain.catalogue import device
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.comparison import Outcome
from gpuprof.placement.problem import ModelFile, Options, Problem
from gpuprof.reporting.chart import Axis, Chart, group_bars

#: Share in percent and batch of each model, GPUs, and the models that break their SLO, as Table 1 prints them.
_PRINTED: Mapping[str, tuple[Mapping[str, tuple[float, int]], int, int]] = {
    "gslice": ({"alexnet": (37.5, 18), "resnet50": (30.0, 8), "vgg19": (40.0, 6)}, 1, 2),
    "gpulet blind": ({"alexnet": (40.0, 23), "resnet50": (60.0, 18), "vgg19": (40.0, 6)}, 2, 2),
    "igniter": ({"alexnet": (10.0, 4), "resnet50": (30.0, 8), "vgg19": (37.5, 6)}, 1, 0),
}
_NAMES = ("igniter", "gpulet", "gpulet blind", "gslice", "optimal")

_WHY = (
    "Whose SLO breaks is simulated for 30 s with iGniter's model of interference, as in igniter_fig14; the paper "
    "measures.",
    "gslice's shares add up to 107.5% in the paper: GSLICE tunes each workload alone and lets SMs be contended for. "
    "Here no map gives more than the whole GPU.",
    "The paper's gpu-lets and GSLICE take the largest batches within the SLO; here they take the smallest that serve "
    "the rate, as gpu-lets+ and GSLICE+ of §5 do, with which Figure 14 compares. Smaller batches need other shares.",
    "gpu-lets does not see what interference does: it is 'gpulet blind'. gpulet asks iGniter's model.",
    "Of policies that regard no neighbours 'gpuprof place' says which SLO their maps break, and writes none.",
    "optimal is gpuprof's own, with the same model of interference.",
)


def compute(reference: Path) -> Reproduction:
    """Place the three workloads by each policy, and simulate each map with interference."""
    lines = list_lines(reference, [POLICIES[name] for name in _NAMES], table_1(), "table1")
    return replace(compare_plans(published_estimator("igniter", find_profile(reference))), commands=lines)


def compare_plans(estimator: Estimator) -> Reproduction:
    """Return the table for iGniter's model with these coefficients."""
    models, demands = table_1()
    given = Problem(
        demands=demands,
        fleet=Fleet((FleetEntry(device("v100")),)),
        estimator=estimator,
        queueing=BatchQueue(),
        options=Options(latency_budget=BUDGET),
        files={name: ModelFile(None, model) for name, model in models.items()},
    )
    outcomes = {name: place(given, name, POLICIES[name]) for name in _NAMES}
    broken = {name: _broken(outcome, estimator) for name, outcome in outcomes.items()}
    used = {name: None if one.objective is None else float(one.objective.gpus) for name, one in outcomes.items()}
    bars = group_bars(
        _NAMES,
        {
            "here": [used[name] for name in _NAMES],
            "as printed": [float(_PRINTED[name][1]) if name in _PRINTED else None for name in _NAMES],
        },
        "GPUs",
    )
    return Reproduction(
        title="iGniter Table 1: alexnet, resnet50 and vgg19 at 500, 400 and 200 requests/s, SLOs of 15, 40 and 60 ms",
        header=("policy", "GPUs", "plan: model (share, batch)", "broken"),
        rows=tuple(
            (name, used[name], _describe(outcomes[name].deployment), " ".join(broken[name]) or "none")
            for name in _NAMES
        ),
        facts=_facts(outcomes, used, broken),
        differences=_WHY,
        charts=(Chart("GPUs (iGniter, Table 1)", Axis("policy", names=_NAMES), Axis("GPUs"), boxes=bars),),
        sound=not any(one.violations for name, one in outcomes.items() if name not in UNAWARE),
    )


def _broken(outcome: Outcome, estimator: Estimator) -> tuple[str, ...]:
    return () if outcome.deployment is None else find_missed(outcome.deployment, estimator)


def _describe(deployment: DeploymentMap | None) -> str:
    """Return ``GPU1: alexnet (10%, 4) …``."""
    if deployment is None:
        return "none"
    gpus = [gpu for node in deployment.nodes for gpu in node.gpus]
    held = [[one for partition in gpu.partitions for one in partition.replicas] for gpu in gpus]
    return " ".join(
        f"GPU{number}: " + ", ".join(f"{one.model} ({one.sm_share_pct:g}%, {one.batch})" for one in replicas)
        for number, replicas in enumerate(held, start=1)
    )


def _facts(
    outcomes: Mapping[str, Outcome], used: Mapping[str, float | None], broken: Mapping[str, tuple[str, ...]]
) -> tuple[Fact, ...]:
    facts = []
    for name, (plan, gpus, late) in _PRINTED.items():
        facts.append(Fact(f"{name}: GPUs", "Table 1", float(gpus), used[name]))
        facts.append(Fact(f"{name}: models that break", "Table 1", float(late), float(len(broken[name]))))
        deployment = outcomes[name].deployment
        replicas = [] if deployment is None else [replica for *_, replica in deployment.places()]
        for model, (share, batch) in plan.items():
            own = [one for one in replicas if one.model == model]
            one = own[0] if len(own) == 1 else None
            facts.append(
                Fact(f"{name}: share of {model}, %", "Table 1", share, None if one is None else one.sm_share_pct, 1)
            )
            facts.append(Fact(f"{name}: batch of {model}", "Table 1", batch, None if one is None else one.batch))
    return tuple(facts)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
