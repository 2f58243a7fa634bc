"""GPUs, cost and broken SLOs of twelve workloads on V100, by policy (iGniter, TPDS'22, Figure 14).

    python -m bench.reproduce.igniter_fig14 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profile that its authors publish: put config.jsonl of i-Gniter/Algorithm/config of
https://github.com/icloud-ecnu/igniter into DIRECTORY/igniter_v100.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.igniter_runs import find_missed, list_lines, place, problem, v100_estimator
from bench.reproduce.reproduction import Fact, Reproduction
from gpuprof.domain.deployment import Replica
from gpuprof.domain.estimate import Estimator
from gpuprof.placement.comparison import Outcome
from gpuprof.reporting.chart import Axis, Chart, group_bars

#: As `gpuprof place` is told them.
POLICIES: Mapping[str, str] = {
    "igniter": "igniter",
    "gpulet": "gpulet",
    "gpulet blind": "gpulet -O aware=false",
    "ffd+": "igniter -O aware=false",
    "gslice": "gslice",
    "optimal": "optimal",
}
#: Those that regard no neighbours, whose maps need not be sound.
UNAWARE = ("gpulet blind", "ffd+")
#: GPUs, $ per hour and workloads that break their SLO (caption of Figure 14).
_PRINTED = {"igniter": (6, 18.36, 0), "gpulet blind": (8, 24.48, 3), "ffd+": (5, 15.30, 10), "gslice": (6, 18.36, 3)}
#: Shares in percent (§5.3).
_SHARES = {("igniter", "W4"): 32.5, ("igniter", "W9"): 37.5, ("igniter", "W2"): 7.5}
_SHARES |= {("gpulet blind", "W4"): 60.0, ("gpulet blind", "W9"): 40.0}
#: Batch sizes of W4 (§5.3).
_BATCHES = {"igniter": 4, "gpulet blind": 2}

_WHY = (
    "The paper measures; here a map is simulated for 30 s with the times that iGniter's model gives beside all that "
    "stand on the same GPU, requests coming evenly. A workload breaks when its p99 exceeds the SLO or it gets less "
    "than 99% of its rate.",
    "The paper's gpu-lets+ does not see what interference does to the throughput: it is 'gpulet blind'. Its sizes "
    "differ in part, which follow the paper's own profiles of full batches. gpulet asks the model whether two "
    "workloads bear each other, refuses those that do not, and so breaks nothing on more GPUs.",
    "ffd+ breaks fewer workloads here than on the testbed: what the model puts just below the SLO counts as kept, and "
    "the model errs by up to 9.8% (§5.2).",
    "gslice keeps the last state of its adjustments in which every SLO holds, and gives whoever finds none a further "
    "device; GSLICE+ stays with the fifth, good or bad.",
    "Of policies that regard no neighbours 'gpuprof place' says which SLO their maps break, and writes none.",
    "optimal is gpuprof's own, with the same model of interference.",
)


def compute(reference: Path) -> Reproduction:
    """Place the workloads by every policy, and simulate each map with interference."""
    estimator = v100_estimator(reference)
    outcomes = place_all(estimator)
    broken = {
        name: () if one.deployment is None else find_missed(one.deployment, estimator) for name, one in outcomes.items()
    }
    rows = tuple(
        (name, *_figures(outcomes[name]), float(len(broken[name])), " ".join(broken[name])) for name in POLICIES
    )
    return Reproduction(
        title="iGniter Figure 14: the twelve workloads W1 … W12 on V100",
        header=("policy", "GPUs", "$ per hour", "broken", "which"),
        rows=rows,
        facts=_facts(outcomes, broken),
        differences=_WHY,
        charts=(_chart(outcomes),),
        sound=not any(one.violations for name, one in outcomes.items() if name not in UNAWARE),
        commands=list_lines(reference, POLICIES.values()),
    )


def place_all(estimator: Estimator) -> dict[str, Outcome]:
    """Return what each policy makes of the workloads."""
    given = problem(estimator, ("v100",))
    return {name: place(given, name, one) for name, one in POLICIES.items()}


def _figures(outcome: Outcome) -> tuple[float | None, float | None]:
    figures = outcome.objective
    return (None, None) if figures is None else (float(figures.gpus), figures.cost_per_hour)


def _facts(outcomes: Mapping[str, Outcome], broken: Mapping[str, tuple[str, ...]]) -> tuple[Fact, ...]:
    facts = []
    for name, (gpus, cost, late) in _PRINTED.items():
        own = _figures(outcomes[name])
        facts.append(Fact(f"{name}: GPUs", "Figure 14", gpus, own[0]))
        facts.append(Fact(f"{name}: $ per hour", "Figure 14", cost, own[1], 2))
        facts.append(Fact(f"{name}: workloads that break", "Figure 14", late, len(broken[name])))
    for (name, workload), share in _SHARES.items():
        replica = _replica(outcomes[name], workload)
        ours = None if replica is None else replica.sm_share_pct
        facts.append(Fact(f"{name}: share of {workload}, %", "§5.3", share, ours, 1))
    for name, batch in _BATCHES.items():
        replica = _replica(outcomes[name], "W4")
        facts.append(Fact(f"{name}: batch of W4", "§5.3", batch, None if replica is None else replica.batch))
    return tuple(facts)


def _replica(outcome: Outcome, model: str) -> Replica | None:
    """Return the replica of a workload that has just one."""
    places = () if outcome.deployment is None else outcome.deployment.places()
    own = [replica for _, _, _, replica in places if replica.model == model]
    return own[0] if len(own) == 1 else None


def _chart(outcomes: Mapping[str, Outcome]) -> Chart:
    names = tuple(outcomes)
    costs = {"here": [_figures(outcomes[name])[1] for name in names]}
    costs["as printed"] = [_PRINTED[name][1] if name in _PRINTED else None for name in names]
    bars = group_bars(names, costs, "$ per hour")
    title = "Cost of twelve workloads on V100 (iGniter, Figure 14)"
    return Chart(title, Axis("policy", names=names), Axis("cost ($ per hour)"), boxes=bars)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
