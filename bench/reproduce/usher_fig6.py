"""What models require of a V100, compute over memory (USHER, OSDI'24, Figure 6a), for those of Elvinger's thesis.

python -m bench.reproduce.usher_fig6 [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from bench.published_measurements import thesis_estimator, v100
from bench.reproduce import command
from bench.reproduce.reproduction import Reproduction
from bench.v100_profiles import v100_profiles
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.reporting.chart import Axis, Chart, Points

_METRICS = {"maximum": "max_occupancy", "WAO": "wavg_occupancy", "WSM": "wavg_sm_util"}

_WHY = (
    "The paper's 20 models were profiled by its authors, and their figures are drawn without numbers. Here stand the "
    "models of the thesis's V100 table, imported as by `gpuprof db import`.",
    "Each figure is the mean over the batches of the table, which is what USHER groups models by (§3.3.1). By each "
    "metric every model requires more compute than memory, so that none of them balances another.",
)


def compute(_: Path) -> Reproduction:
    """Return the mean requirements over all batches of the table."""
    estimator, device = thesis_estimator(), v100()
    rows = []
    for model in dict.fromkeys(row.model for row in v100_profiles().rows):
        seen: dict[str, list[float]] = {name: [] for name in ("memory", *_METRICS)}
        for batch in estimator.batches(model, device, Share()):
            try:
                estimate = estimator.estimate(model, device, batch, Share())
            except InputError:
                continue
            for name, metric in _METRICS.items():
                creq = estimate.creq(metric)
                seen[name] += [] if creq is None else [creq.value]
            memory = estimate.memory_bytes
            seen["memory"] += [] if memory is None else [100.0 * memory.value / device.dram_bytes]
        means = {name: fmean(values) if values else None for name, values in seen.items()}
        rows.append((model, *means.values()))
    return Reproduction(
        title="USHER Figure 6a: requirements in % of a V100, mean over the batches that were profiled",
        header=("model", "Mreq", *(f"Creq by {name}" for name in _METRICS)),
        rows=tuple(rows),
        facts=(),
        differences=_WHY,
        charts=(_draw(rows),),
    )


def _draw(rows: list[tuple[str | float | None, ...]]) -> Chart:
    points = []
    for number, name in enumerate(_METRICS):
        known = [
            (str(row[0]), x, y)
            for row in rows
            if isinstance(x := row[1], float) and isinstance(y := row[2 + number], float)
        ]
        names, xs, ys = zip(*known, strict=True)
        points.append(Points(f"by {name}", tuple(xs), tuple(ys), tuple(names), number))
    axes = (Axis("Mreq (% of memory)", low=0.0), Axis("Creq (% of compute)", low=0.0, high=100.0))
    return Chart("Compute over memory (USHER, Figure 6a)", *axes, points=tuple(points))


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
