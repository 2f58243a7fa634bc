"""How often a time beyond what was measured lies within the interval that is given for it, on published measurements.

    python -m bench.extrapolation [--reference DIRECTORY]

Of each model on its GPU the largest or smallest batches, the largest or smallest shares, or the larger numbers of
processes are left out, and each time left out is held against the interval made of the rest: that of
`gpuprof.estimators.measured.measured`, with the slack that ships and with one learned from all other models. Nine of
ten must be inside. DIRECTORY holds ParvaGPU's table of an A100 (parvagpu_a100) and iGniter's of a V100 (igniter_v100);
that of Elvinger's thesis is in the catalogue.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.domain.catalogue import datasets, device
from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.estimators.conformal import interval_factor
from gpuprof.estimators.constants import constant
from gpuprof.estimators.measured.measured import LatencyEnvelope, Point, read_measured
from gpuprof.kernel_db.store import KernelDb
from gpuprof.pipeline.db import import_measurements

_Key = Callable[[Point, Device], float]
#: What is left out: beyond a value of this quantity, upwards or downwards.
_AXES: Mapping[str, tuple[_Key, bool]] = {
    "larger batches": (lambda point, _: float(point.batch), True),
    "smaller batches": (lambda point, _: float(point.batch), False),
    "larger shares": (lambda point, gpu: gpu.fraction(point.share), True),
    "smaller shares": (lambda point, gpu: gpu.fraction(point.share), False),
    "more processes": (lambda point, _: float(point.processes), True),
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A time that was predicted from others: the least slack that holds it, and the bounds without any."""

    source: str
    model: str
    axis: str
    outside: float
    width: float


def read_points(reference: Path) -> dict[tuple[str, str, str], list[Point]]:
    """Return what was published, by source, model and name of the GPU."""
    points_of: dict[tuple[str, str, str], list[Point]] = {}
    for source, path in (("ParvaGPU", reference / "parvagpu_a100"), ("thesis", datasets() / "v100_profiles.csv")):
        with tempfile.TemporaryDirectory() as folder:
            import_measurements([Path(str(path))], db=Path(folder) / "db")
            for model, measured in read_measured(KernelDb(Path(folder) / "db")).items():
                points_of |= {(source, model, gpu): points for gpu, points in measured.points.items()}
    for row in csv.DictReader((reference / "igniter_v100" / "solo.csv").read_text(encoding="utf-8").splitlines()):
        share, latency = Share(float(row["mps_share_pct"])), float(row["latency_ms"])
        point = Point(int(row["batch"]), share, 1, latency, 0.0, 0.0, 1.0, 0.0, {})
        points_of.setdefault(("iGniter", row["model"], "v100"), []).append(point)
    return points_of


def leave_ends_out(points: Sequence[Point], gpu: Device) -> Iterator[tuple[str, LatencyEnvelope, list[Point]]]:
    """Yield for each quantity and each of its values what is left out beyond it, and what the rest says."""
    for axis, (key, upwards) in _AXES.items():
        values = sorted({key(point, gpu) for point in points}, reverse=not upwards)
        for end in values[:-1]:
            kept = [point for point in points if (key(point, gpu) <= end) == upwards or key(point, gpu) == end]
            yield axis, LatencyEnvelope(kept, gpu), [point for point in points if point not in kept]


def predict_left_out(published: Mapping[tuple[str, str, str], Sequence[Point]]) -> list[LeftOut]:
    """Return every time that was left out and how far it is outside of the bounds."""
    predictions = []
    for (source, model, name), points in published.items():
        for axis, envelope, left_out in leave_ends_out(points, device(name)):
            for point in left_out:
                least, most = envelope.bounds([point.batch], point.share, point.processes)
                low, high = sorted((float(least[0]), float(most[0])))
                outside = max(low / point.latency_ms, point.latency_ms / high, 1.0)
                predictions.append(LeftOut(source, model, axis, outside, high / low))
    return predictions


def learn_slack(rows: Sequence[LeftOut]) -> float:
    """Return the factor that holds nine of ten times of a model that is not among them, for each way to leave out."""
    slack = 1.0
    for axis in _AXES:
        by_model: defaultdict[str, list[float]] = defaultdict(list)
        for row in rows:
            if row.axis == axis:
                by_model[f"{row.source} {row.model}"].append(math.log(row.outside))
        slack = max(slack, interval_factor(by_model) or 1.0)
    return slack


def main() -> int:
    """Print the coverage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=Path("../shared/reference"))
    rows = predict_left_out(read_points(parser.parse_args().reference))
    ships = constant("published", "extrapolation_slack")
    models = sorted({(row.source, row.model) for row in rows})
    learned = {model: learn_slack([row for row in rows if (row.source, row.model) != model]) for model in models}
    print(f"{'published by':13}{'left out':18}{'times':>7}{'width':>8}{'inside':>8}{'of a model left out':>21}")
    for source in dict.fromkeys(row.source for row in rows):
        for axis in _AXES:
            kept = [row for row in rows if (row.source, row.axis) == (source, axis)]
            if kept:
                shipped = sum(row.outside <= ships for row in kept) / len(kept)
                unseen = sum(row.outside <= learned[row.source, row.model] for row in kept) / len(kept)
                width = sorted(row.width for row in kept)[len(kept) // 2] * ships**2
                print(f"{source:13}{axis:18}{len(kept):7}{width:8.2f}{shipped:8.1%}{unseen:21.1%}")
    print(
        f"slack: {ships:g} ships; of all models {learn_slack(rows):.3f}; without one of {len(models)} models", end=" "
    )
    print(f"{min(learned.values()):.3f} to {max(learned.values()):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
