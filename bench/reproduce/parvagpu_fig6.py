"""Internal slack of each policy's shares in ParvaGPU's six scenarios (SC'24, Figure 6 and equation 3).

    python -m bench.reproduce.parvagpu_fig6 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profiles that its authors publish: put prof_data and SLO of https://github.com/MunQ-Lee/ParvaGPU_SC24 into
DIRECTORY/parvagpu_a100.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.parvagpu_profiles import read_latencies
from bench.reproduce import command
from bench.reproduce.parvagpu_runs import IGNITER_RUNS, POLICIES, SCENARIOS, SOURCE, list_lines, scenarios, slack, sound
from bench.reproduce.reproduction import Fact, Reproduction, mean
from gpuprof.domain.deployment import Replica
from gpuprof.domain.estimate import Workload
from gpuprof.placement.comparison import Outcome
from gpuprof.reporting.chart import Axis, Chart, group_bars

#: §IV-B2: more internal slack than ParvaGPU's on average, in points of percent.
_MORE = {"gpulet": 26.0, "igniter": 32.0, "mig-serving": 30.0, "parvagpu-single": 4.7}
#: §IV-B2: the range of ParvaGPU's own.
_OWN = (3.0, 5.0)
_ASKED, _BUSY = "at the asked rates", "always busy"

_WHY = (
    "The paper measures SM activity by DCGM, which nobody published. Here the activity of a share is the rate that it "
    "serves over the most that any batch and number of processes reaches in it: a share that works as well as it can "
    "counts as fully active. DCGM also counts the pauses between kernels, which no batch and no process fills.",
    "The slack at the asked rates counts what a share has in hand, which is most in S1, where six small services "
    "have a share each; the paper does not say whether its servers ran at those rates or at full load, so that the "
    "slack of shares that are always busy stands beside it.",
    "gpulet and igniter run on shares by MPS interpolated from the instances, without interference (see Figure 5).",
)


@dataclass(frozen=True, slots=True)
class Saturation:
    """The most that each instance reaches, and each share by MPS: the throughput at full activity."""

    most_rps: Mapping[tuple[str, float], float]

    def activity(self, device: str, replica: Replica, slices: float) -> float:
        """Return the part of the share's most throughput that the replica reaches while it is busy."""
        low = max((size for model, size in self.most_rps if model == replica.model and size <= slices), default=0.0)
        high = min(size for model, size in self.most_rps if model == replica.model and size >= slices - 1e-9)
        below = self.most_rps.get((replica.model, low), 0.0)
        weight = (slices - low) / (high - low) if high > low else 0.0
        most = below + weight * (self.most_rps[replica.model, high] - below)
        return min(1.0, replica.predicted.throughput_rps / most)


def saturation(latency_ms: Mapping[Workload, float]) -> Saturation:
    """Return what the profiles reach at most in each instance."""
    most: dict[tuple[str, float], float] = {}
    for workload, time in latency_ms.items():
        key = (workload.model, float(str(workload.share.mig).partition("g")[0]))
        most[key] = max(most.get(key, 0.0), 1000.0 * workload.batch * workload.processes / time)
    return Saturation(most)


def compute(reference: Path, numbers: Sequence[int] = SCENARIOS) -> Reproduction:
    """Place the scenarios by all policies, and see how well each fills its shares."""
    runs = scenarios(reference, numbers)
    full = saturation(read_latencies(command.find_published(reference, "parvagpu_a100", SOURCE)))
    asked = {name: [_pct(run[name], full, busy=False) for run in runs] for name in POLICIES}
    busy = {name: [_pct(run[name], full, busy=True) for run in runs] for name in POLICIES}
    rows = [
        (f"{name}, {how}", *values, mean(values))
        for how, by_policy in ((_ASKED, asked), (_BUSY, busy))
        for name, values in by_policy.items()
    ]
    return Reproduction(
        title="ParvaGPU Figure 6: internal slack in percent, by scenario",
        header=("policy", *(f"S{number}" for number in numbers), "mean"),
        rows=tuple(rows),
        facts=_facts(busy, _BUSY) + _facts(asked, _ASKED),
        differences=_WHY,
        charts=(_chart(asked, numbers),),
        sound=sound(runs),
        commands=list_lines(reference, numbers),
    )


def _pct(outcome: Outcome, full: Saturation, *, busy: bool) -> float | None:
    """Return the internal slack in percent; ``busy``: as if every share were busy all the time."""
    found = slack(outcome, _activity(outcome, full, busy=busy))
    return None if found is None else 100.0 * found


def _activity(outcome: Outcome, full: Saturation, *, busy: bool) -> Callable[[str, Replica], float]:
    slices: dict[int, float] = {}
    for _, _, partition, replica in () if outcome.deployment is None else outcome.deployment.places():
        part = 7.0 if partition.mig is None else float(partition.mig.profile.partition("g")[0])
        slices[id(replica)] = part * replica.sm_share_pct / 100.0

    def activity(device: str, replica: Replica) -> float:
        own = full.activity(device, replica, slices[id(replica)])
        used = replica.predicted.utilization or 0.0
        return own / min(1.0, used) if busy and used > 0 else own

    return activity


def _facts(slack_pct: Mapping[str, list[float | None]], how: str) -> tuple[Fact, ...]:
    own = slack_pct["parvagpu"]
    facts = [Fact(f"parvagpu's slack, mean, {how}, %", "§IV-B2", _OWN, mean(own))]
    for other, printed in _MORE.items():
        count = IGNITER_RUNS if other == "igniter" else len(own)
        more = [
            a - b for a, b in zip(slack_pct[other][:count], own[:count], strict=True) if a is not None and b is not None
        ]
        digits = 1 if other == "parvagpu-single" else 0
        facts.append(Fact(f"more slack in {other}, {how}, points", "§IV-B2", printed, mean(more), digits))
    return tuple(facts)


def _chart(asked: Mapping[str, list[float | None]], numbers: Sequence[int]) -> Chart:
    groups = tuple(f"S{number}" for number in numbers)
    title = "Internal slack by scenario and policy (ParvaGPU, Figure 6)"
    bars = group_bars(groups, asked, "%")
    return Chart(title, Axis("scenario", names=groups), Axis("internal slack (%)"), boxes=bars)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
