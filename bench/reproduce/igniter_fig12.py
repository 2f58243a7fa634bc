"""Predicted and observed latency of two workloads on one V100 (iGniter, TPDS'22, Figures 11 and 12).

    python -m bench.reproduce.igniter_fig12 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the measurements that its authors publish: put config.jsonl of i-Gniter/Algorithm/config and the measured pairs
(pairs.csv: pair, model, batch, mps_share_pct, latency_ms, beside, beside_batch, beside_mps_share_pct) of
https://github.com/icloud-ecnu/igniter into DIRECTORY/igniter_v100.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.igniter_profiles import DEVICE
from bench.published_measurements import published_estimator
from bench.reproduce import command
from bench.reproduce.igniter_runs import SOURCE
from bench.reproduce.reproduction import Fact, Reproduction, lines, mean
from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.reporting.chart import Axis

#: §5.2: errors in percent, each at 50% of the GPU (Figure 12).
_SAID = {"alexnet": (3.91, 5.90), "resnet50": (1.10, 9.29)}
_HALF_PCT = 50.0

_WHY = (
    "The pairs that the authors publish are other runs than the figures': TensorRT's own end-to-end latency (trtexec), "
    "not Triton's, with batches of their own choice, and no SSD, which Figure 11 and 13 set beside VGG-19. The "
    "coefficients are those of iGniter's published profile, which the pairs did not shape.",
    "optimal has no part in a prediction.",
)


@dataclass(frozen=True)
class Pair:
    """One of two neighbours: what ran, beside what; what was observed, is predicted and was observed alone, in ms."""

    workload: Workload
    beside: Workload
    observed_ms: float
    predicted_ms: float
    solo_ms: float = 0.0

    @property
    def error_pct(self) -> float:
        """How far the prediction is off, in percent of what was observed."""
        return 100.0 * abs(self.predicted_ms / self.observed_ms - 1.0)


def compute(reference: Path) -> Reproduction:
    """Predict every published pair by ``--estimator igniter`` on the imported profile."""
    pairs = read_pairs(command.find_published(reference, "igniter_v100", SOURCE))
    by_share: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
    halves: defaultdict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in pairs:
        share = one.workload.share.sm_pct
        by_share[one.workload.model, share].append(one.error_pct)
        if share == _HALF_PCT:
            halves[one.workload.model][float(one.workload.batch)].append(one.error_pct)
    models = sorted({model for model, _ in by_share})
    shares = sorted({share for _, share in by_share})
    errors = {model: {share: mean(by_share.get((model, share), [])) for share in shares} for model in models}
    at_half = {model: {batch: mean(found) for batch, found in sorted(halves[model].items())} for model in models}
    return Reproduction(
        title="iGniter Figures 11 and 12: error of the predicted latency beside a neighbour, mean in percent",
        header=("model", "pairs", *(f"{share:g}% of the GPU" for share in shares), "all"),
        rows=tuple(
            (
                model,
                float(sum(one.workload.model == model for one in pairs)),
                *errors[model].values(),
                mean([one.error_pct for one in pairs if one.workload.model == model]),
            )
            for model in models
        ),
        facts=_facts(at_half),
        differences=_WHY,
        charts=(
            lines("Error by share (iGniter, Figure 11)", Axis("share (%)"), Axis("error (%)", low=0.0), errors),
            lines("Error at half of the GPU (iGniter, Figure 12)", Axis("batch"), Axis("error (%)", low=0.0), at_half),
        ),
    )


def read_pairs(directory: Path) -> list[Pair]:
    """Return the published pairs with what iGniter's model says of each."""
    estimator, v100 = published_estimator("igniter", directory / "config.jsonl"), device(DEVICE)
    found = []
    for row in csv.DictReader((directory / "pairs.csv").read_text(encoding="utf-8").splitlines()):
        workload = Workload(row["model"], int(row["batch"]), Share(float(row["mps_share_pct"])))
        beside = Workload(row["beside"], int(row["beside_batch"]), Share(float(row["beside_mps_share_pct"])))
        said = estimator.estimate(workload.model, v100, workload.batch, workload.share, [beside])
        solo_ms = float(row.get("solo_latency_ms") or 0.0)
        found.append(Pair(workload, beside, float(row["latency_ms"]), said.latency_ms.value, solo_ms))
    return found


def _facts(at_half: Mapping[str, Mapping[float, float | None]]) -> tuple[Fact, ...]:
    facts = []
    for model, said in _SAID.items():
        known = [value for value in at_half.get(model, {}).values() if value is not None]
        facts.append(
            Fact(f"least error of {model} at half of the GPU, %", "§5.2", said[0], min(known, default=None), 2)
        )
        facts.append(Fact(f"largest error of {model} there, %", "§5.2", said[1], max(known, default=None), 2))
    return tuple(facts)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
