"""The experiments of the thesis's appendix (Elvinger, ETH 2024, Figures A.1, A.2 and A.3).

python -m bench.reproduce.thesis_appendix [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.reproduce import command, thesis_fig6_1
from bench.reproduce.reproduction import Reproduction, lines
from bench.reproduce.thesis_cluster import POLICIES, Experiment, Plan, goodput, list_lines, plan
from gpuprof.reporting.chart import Axis, Chart

_VISION = thesis_fig6_1.EXPERIMENT
#: Vision models get twice the load of language models (§A.2.3).
_MIXED = Experiment(
    ("alexnet", "bert", "gpt2", "mobilenet_v2", "resnet50"), 1.0, 150.0, weights=(2.0, 1.0, 1.0, 2.0, 2.0)
)

_WHY = (
    "The appendix prints bars without numbers, and no text on them: there is nothing to compare ours with but their "
    "order, which is that of Figures 6.1 and 6.15.",
    "Without shares a model takes as long as alone: what neighbours cost is not in the thesis's table, so that "
    "wao-usher looks better in A.1 than on the testbed, where its neighbours disturb one another.",
    "usher plans less for three V100 than for two in A.2 (1,520 and 2,000 requests/s): two of the three go to "
    "efficientnet_b7, which at twice the rate takes three to be served, and resnet50 is left out.",
    "optimal is gpuprof's own, planned with queues and shares, which it may choose in steps of 2.5%, within 5 s, and "
    "served by its own rules. Policies that set no shares are served as if neighbours cost nothing: they may be above.",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One line's points: a figure, what varies along it, and how a policy is planned and served at each."""

    figure: str
    label: str
    at: tuple[tuple[float, Experiment, int], ...]
    shares: bool = True


def list_settings() -> Iterator[Setting]:
    """Yield the experiments of the three figures."""
    yield Setting("A.1", "V100 GPUs", tuple((float(n), _VISION, n) for n in range(1, 7)), shares=False)
    doubled = replace(_VISION, rate_rps=1000.0)
    yield Setting("A.2", "V100 GPUs", tuple((float(n), doubled, n) for n in range(1, 9)))
    for slo in (150.0, 250.0, 350.0):
        loads = (1000, 2000, 3000, 4000, 5000)
        at = tuple((float(n), replace(_MIXED, rate_rps=n / sum(_MIXED.weights), slo_ms=slo), 4) for n in loads)
        yield Setting(f"A.3, SLO {slo:g} ms", "target rate of all models (requests/s)", at)


def compute(_: Path, settings: Sequence[Setting] | None = None) -> Reproduction:
    """Place by every policy in every setting, and simulate what the clients would see."""
    rows: list[tuple[str | float | None, ...]] = []
    charts, made_plans = list[Chart](), list[Plan]()
    chosen = list(list_settings() if settings is None else settings)
    most = max(len(setting.at) for setting in chosen)
    for setting in chosen:
        series: dict[str, dict[float, float | None]] = {}
        for policy in POLICIES:
            plans = [
                (x, experiment, plan(policy, experiment, gpus, setting.shares)) for x, experiment, gpus in setting.at
            ]
            made_plans += [made for *_, made in plans]
            series[policy] = {x: sum(goodput(made, one).values()) for x, one, made in plans}
            rows.append((setting.figure, policy, *series[policy].values(), *[None] * (most - len(plans))))
        title = f"Goodput (thesis, Figure {setting.figure})"
        charts.append(lines(title, Axis(setting.label, low=0.0), Axis("goodput (requests/s)", low=0.0), series))
    return Reproduction(
        title="Thesis, appendix: goodput in requests/s; A.1 and A.2 over 1, 2 … GPUs, A.3 over 1000 … 5000 requests/s",
        header=("figure", "policy", *(f"{n}." for n in range(1, most + 1))),
        rows=tuple(rows),
        facts=(),
        differences=_WHY,
        charts=tuple(charts),
        sound=all(made.sound for made in made_plans),
        commands=list_lines(made_plans),
    )


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
