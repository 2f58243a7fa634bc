"""GPUs that each policy takes as the services of scenario 5 are multiplied (ParvaGPU, SC'24, Figure 10).

    python -m bench.reproduce.parvagpu_fig10 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profiles that its authors publish: put prof_data and SLO of https://github.com/MunQ-Lee/ParvaGPU_SC24 into
DIRECTORY/parvagpu_a100.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.parvagpu_runs import POLICIES, gpus, list_lines, saved_pct, scenarios, sound
from bench.reproduce.reproduction import Fact, Reproduction, lines
from gpuprof.reporting.chart import Axis

_SCENARIO = 5
_FOLD = tuple(range(1, 11))
#: §IV-D1: how many fewer GPUs than each baseline ParvaGPU takes on average, in percent.
_SAVED = {"gpulet": 45.2, "mig-serving": 30.0, "parvagpu-single": 7.4}

_WHY = (
    "The paper prints no heights of bars, only the averages.",
    "gpulet runs on shares by MPS interpolated from the instances, without interference: see Figure 5. The paper "
    "leaves igniter out, which does not run in S5; here it splits what needs more than a GPU.",
    "mig-serving mixes services on a GPU as the score of its configurations says, and never gives an instance to a "
    "service that needs no more. It stays a tenth above parvagpu here, where the paper's is well above that.",
    "A copy of a service is a service of its own, with segments of its own.",
)


def compute(reference: Path, fold: Sequence[int] = _FOLD) -> Reproduction:
    """Place scenario 5 with every service 1, 2, … times over by all policies."""
    runs = [scenarios(reference, (_SCENARIO,), copies)[0] for copies in fold]
    counts = {name: [gpus(run[name]) for run in runs] for name in POLICIES}
    facts = tuple(
        Fact(f"fewer GPUs than {other} on average, %", "§IV-D1", printed, saved_pct(runs, other), 1)
        for other, printed in _SAVED.items()
    )
    series = {name: dict(zip(map(float, fold), values, strict=True)) for name, values in counts.items()}
    axes = (
        "GPUs as services multiply (ParvaGPU, Figure 10)",
        Axis("copies of each of S5's 11 services", low=0.5, high=max(fold) + 0.5),
        Axis("A100-80GB GPUs", low=0.0),
    )
    return Reproduction(
        title="ParvaGPU Figure 10: number of A100-80GB, services of S5 multiplied",
        header=("policy", *(f"×{copies}" for copies in fold)),
        rows=tuple((name, *values) for name, values in counts.items()),
        facts=facts,
        differences=_WHY,
        charts=(lines(*axes, series),),
        sound=sound(runs),
        commands=list_lines(reference, (_SCENARIO,), fold),
    )


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
