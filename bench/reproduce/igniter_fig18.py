"""Shares of the twelve workloads, and where W2 goes, by policy (iGniter, TPDS'22, Figures 18 and 19).

    python -m bench.reproduce.igniter_fig18 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profile that its authors publish: put config.jsonl of i-Gniter/Algorithm/config of
https://github.com/icloud-ecnu/igniter into DIRECTORY/igniter_v100.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.igniter_fig14 import POLICIES, UNAWARE, place_all
from bench.reproduce.igniter_runs import list_lines, v100_estimator
from bench.reproduce.reproduction import Fact, Reproduction
from gpuprof.placement.comparison import Outcome
from gpuprof.reporting.chart import Axis, Chart, group_bars

_WORKLOADS = tuple(f"W{number}" for number in range(1, 13))
#: §5.3: shares in percent.
_SAID = {
    ("igniter", "W4"): 32.5, ("igniter", "W9"): 37.5, ("igniter", "W2"): 7.5,
    ("gpulet blind", "W4"): 60.0, ("gpulet blind", "W9"): 40.0, ("gpulet blind", "W2"): 40.0,
}  # fmt: skip

_WHY = (
    "The paper measures what its GPUs need; here shares are those of the maps, and a workload in several replicas has "
    "the sum of theirs.",
    "FFD++ (first fit with iGniter's Algorithm 2) is not among gpuprof's policies.",
    "Of policies that regard no neighbours 'gpuprof place' says which SLO their maps break, and writes none.",
    "optimal is gpuprof's own, with the same model of interference.",
)


def compute(reference: Path) -> Reproduction:
    """Place the workloads by every policy, and read shares and neighbours off the maps."""
    outcomes = place_all(v100_estimator(reference))
    shares = {name: [_share_pct(outcomes[name], workload) for workload in _WORKLOADS] for name in POLICIES}
    facts = tuple(
        Fact(f"{name}: share of {workload}, %", "§5.3", printed, _share_pct(outcomes[name], workload), 1)
        for (name, workload), printed in _SAID.items()
    )
    bars = group_bars(_WORKLOADS, shares, "% of a V100")
    title = "Shares of the twelve workloads (iGniter, Figure 18)"
    return Reproduction(
        title="iGniter Figures 18 and 19: shares of W1 … W12 in percent of a V100, and the neighbours of W2",
        header=("policy", *_WORKLOADS, "beside W2"),
        rows=tuple((name, *shares[name], " ".join(find_neighbours(outcomes[name], "W2"))) for name in POLICIES),
        facts=facts,
        differences=_WHY,
        charts=(Chart(title, Axis("workload", names=_WORKLOADS), Axis("share (%)"), boxes=bars),),
        sound=not any(one.violations for name, one in outcomes.items() if name not in UNAWARE),
        commands=list_lines(reference, POLICIES.values()),
    )


def _share_pct(outcome: Outcome, workload: str) -> float | None:
    places = () if outcome.deployment is None else outcome.deployment.places()
    own = [replica.sm_share_pct for *_, replica in places if replica.model == workload]
    return sum(own) if own else None


def find_neighbours(outcome: Outcome, workload: str) -> list[str]:
    """Return the workloads on the devices of one."""
    nodes = () if outcome.deployment is None else outcome.deployment.nodes
    found = set()
    for gpu in (gpu for node in nodes for gpu in node.gpus):
        names = {replica.model for part in gpu.partitions for replica in part.replicas}
        found |= names - {workload} if workload in names else set()
    return sorted(found, key=lambda name: int(name[1:]))


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
