"""How long each policy takes to decide, by scenario and as services multiply (ParvaGPU, SC'24, Figures 9 and 11).

    python -m bench.reproduce.parvagpu_fig9 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profiles that its authors publish: put prof_data and SLO of https://github.com/MunQ-Lee/ParvaGPU_SC24 into
DIRECTORY/parvagpu_a100.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.parvagpu_runs import POLICIES, SCENARIOS, list_lines, scenarios, sound
from bench.reproduce.reproduction import Fact, Reproduction, lines, mean
from gpuprof.placement.comparison import Outcome
from gpuprof.reporting.chart import Axis, Chart, group_bars

_MULTIPLIED, _FOLD = 5, (1, 2, 4, 7, 10)
#: §IV-C2 and §IV-D2: how much shorter ParvaGPU's delay is on average, in percent.
_SHORTER = {"gpulet": 80.0, "mig-serving": 97.2}
_SHORTER_MULTIPLIED = {"gpulet": 15.8, "mig-serving": 99.9}

_WHY = (
    "Times of gpuprof's own implementations on this machine, which has other work, too: what they show is how each "
    "grows, not how the authors' programs compare.",
    "mig-serving keeps no list of all configurations and fills them one by one, which takes a small part of what the "
    "paper's takes.",
    "optimal searches until it has proven its map, or its time limit; the others do not search.",
)


def compute(reference: Path, numbers: Sequence[int] = SCENARIOS, fold: Sequence[int] = _FOLD) -> Reproduction:
    """Place the scenarios, and the multiplied services of one, by all policies."""
    runs = scenarios(reference, numbers)
    chosen = _MULTIPLIED if _MULTIPLIED in numbers else numbers[-1]
    many = [scenarios(reference, (chosen,), copies)[0] for copies in fold]
    groups = tuple(f"S{number}" for number in numbers)
    single = {name: [1000.0 * run[name].seconds for run in runs] for name in POLICIES}
    multiplied = {name: [1000.0 * run[name].seconds for run in many] for name in POLICIES}
    bars = group_bars(groups, single, "ms")
    title = "Scheduling delay (ParvaGPU, Figure 9)"
    series = {name: dict(zip(map(float, fold), values, strict=True)) for name, values in multiplied.items()}
    axes = (Axis(f"copies of each service of S{chosen}"), Axis("ms", log=True))
    return Reproduction(
        title="ParvaGPU Figures 9 and 11: time of the decision in ms",
        header=("policy", *groups, *(f"S{chosen} ×{copies}" for copies in fold)),
        rows=tuple((name, *single[name], *multiplied[name]) for name in POLICIES),
        facts=(*_facts(runs, _SHORTER, "§IV-C2"), *_facts(many, _SHORTER_MULTIPLIED, "§IV-D2")),
        differences=_WHY,
        charts=(
            Chart(title, Axis("scenario", names=groups), Axis("ms", log=True), boxes=bars),
            lines("Scheduling delay as services multiply (ParvaGPU, Figure 11)", *axes, series),
        ),
        sound=sound([*runs, *many]),
        commands=tuple(dict.fromkeys((*list_lines(reference, numbers), *list_lines(reference, (chosen,), fold)))),
    )


def _facts(runs: Sequence[Mapping[str, Outcome]], said: Mapping[str, float], where: str) -> list[Fact]:
    return [
        Fact(
            f"shorter than {other}'s on average, %",
            where,
            printed,
            mean([100.0 * (1.0 - run["parvagpu"].seconds / run[other].seconds) for run in runs]),
            1,
        )
        for other, printed in said.items()
    ]


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
