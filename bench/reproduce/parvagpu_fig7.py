"""External fragmentation of each policy's maps in ParvaGPU's six scenarios (SC'24, Figure 7 and equation 4).

    python -m bench.reproduce.parvagpu_fig7 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profiles that its authors publish: put prof_data and SLO of https://github.com/MunQ-Lee/ParvaGPU_SC24 into
DIRECTORY/parvagpu_a100.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.parvagpu_runs import IGNITER_RUNS, POLICIES, SCENARIOS, fragmentation, list_lines, scenarios, sound
from bench.reproduce.reproduction import Fact, Reproduction, mean
from gpuprof.placement.comparison import Outcome
from gpuprof.reporting.chart import Axis, Chart, group_bars

_WHY = (
    "Equation 4 prints the part that is in use; its figure and text speak of what is left over, which is shown here.",
    "What is in use is counted in compute units, of those that MIG can give out (98 of 108); of an instance of three "
    "slices the fourth that it blocks counts as left over.",
    "gpuprof's maps of ParvaGPU have the published number of GPUs and keep what the last GPU has free: relocation "
    "fills gaps, it does not hand a service more than it needs. The paper's text says zero in all scenarios; the maps "
    "published with its code, of the same number of GPUs, cannot be full either where the segments do not add up to "
    "whole GPUs.",
    "gpulet gives the second workload all that is left of a GPU, as in the paper; a GPU with one gpu-let keeps the "
    "rest free. igniter's fragmentation hangs on how much it allows for interference, of which there is none here "
    "(see Figure 5).",
)


def compute(reference: Path, numbers: Sequence[int] = SCENARIOS) -> Reproduction:
    """Place the scenarios by all policies, and see what no share holds."""
    runs = scenarios(reference, numbers)
    left = {name: [_pct(run[name]) for run in runs] for name in POLICIES}
    return Reproduction(
        title="ParvaGPU Figure 7: external fragmentation in percent, by scenario",
        header=("policy", *(f"S{number}" for number in numbers), "mean"),
        rows=tuple((name, *values, mean(values)) for name, values in left.items()),
        facts=_facts(left),
        differences=_WHY,
        charts=(_chart(left, numbers),),
        sound=sound(runs),
        commands=list_lines(reference, numbers),
    )


def _pct(outcome: Outcome) -> float | None:
    found = fragmentation(outcome)
    return None if found is None else 100.0 * found


def _facts(left: Mapping[str, list[float | None]]) -> tuple[Fact, ...]:
    more = mean(left["parvagpu-unoptimized"]), mean(left["parvagpu"])
    optimised = None if more[0] is None or more[1] is None else more[0] - more[1]
    return (
        Fact("parvagpu, mean, %", "§IV-B2", 0.0, more[1]),
        Fact("parvagpu-unoptimized above parvagpu, mean, points", "§IV-B2", 29.0, optimised),
        Fact("igniter, mean of S1 to S4, %", "§IV-B2", 26.9, mean(left["igniter"][:IGNITER_RUNS]), 1),
        Fact("gpulet, mean, %", "§IV-B2", 0.0, mean(left["gpulet"])),
        Fact("mig-serving, mean, %", "§IV-B2", 0.0, mean(left["mig-serving"])),
    )


def _chart(left: Mapping[str, list[float | None]], numbers: Sequence[int]) -> Chart:
    groups = tuple(f"S{number}" for number in numbers)
    title = "External fragmentation by scenario and policy (ParvaGPU, Figure 7)"
    bars = group_bars(groups, left, "%")
    return Chart(title, Axis("scenario", names=groups), Axis("compute units in no share (%)"), boxes=bars)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
