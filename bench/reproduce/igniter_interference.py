"""iGniter's model beside its published measurements (TPDS'22, Figures 4, 5, 7, 8, 9, 11 and 12).

    python -m bench.reproduce.igniter_interference --data FOLDER

FOLDER/igniter_v100 holds config.jsonl (i-Gniter/Algorithm/config) and the measured pairs (pairs.csv: pair, model,
batch, mps_share_pct, latency_ms, beside, beside_batch, beside_mps_share_pct) of
https://github.com/icloud-ecnu/igniter.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.published_pairs import read_igniter_profile
from gpuprof.cli.output import Format, print_rows, print_text
from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import Estimator, Workload
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.share import Share
from gpuprof.domain.table import Column
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.igniter.igniter import (
    HardwareCoefficients,
    HardwareProfile,
    WorkloadCoefficients,
    WorkloadProfile,
    added_launch_ms,
    clock_mhz,
    fit_hardware,
    fit_published_workload,
)
from gpuprof.kernel_db.store import KernelDb
from gpuprof.lab.laboratory import PrintedNumber
from gpuprof.lab.scenarios import IGNITER_DEVICE, build_database, find_published

Cell = str | float | None
_MODEL = "resnet50"
_HALF_PCT, _BATCH = 50.0, 16
#: §2.2: slow-down of ResNet-50 beside AlexNet and VGG-19 at batches of 1 to 32, in percent.
_SLOWER = (6.36, 13.93)
#: §5.2: least and largest error in percent, each at 50% of the GPU (Figure 12).
_ERRORS_AT_HALF = {"alexnet": (3.91, 5.90), "resnet50": (1.10, 9.29)}
_REASONS = (
    "The published pairs are other runs than the figures': TensorRT's own end-to-end latency (trtexec), not Triton's, "
    "from batches of 2 on, and without SSD, which Figures 11 and 13 set beside VGG-19. The coefficients are those of "
    "iGniter's published profile, which the pairs did not shape.",
    "Figures 5 and 7: the published profile holds 1 to 5 copies of one model; the paper draws three models and two.",
    "Figures 8 and 9: nine configurations are published; L2 utilisation at three of them. The model is iGniter's "
    "equations with the coefficients of the authors' own fit.",
)


@dataclass(frozen=True)
class Pair:
    """A workload beside another: observed and predicted latency, and its latency alone, in ms."""

    workload: Workload
    beside: Workload
    observed_ms: float
    predicted_ms: float
    solo_ms: float = 0.0

    @property
    def error_pct(self) -> float:
        """Error of the prediction in percent of the observed latency."""
        return 100.0 * abs(self.predicted_ms / self.observed_ms - 1.0)


def main() -> int:
    """Print measurements beside the model, and the errors of the published pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of published data")
    folder = find_published(parser.parse_args().data, "igniter_v100")
    with tempfile.TemporaryDirectory() as work:
        database = KernelDb(build_database("igniter", Path(work), folder.parent))
        pairs = read_pairs(folder / "pairs.csv", make_estimator("igniter", database))
    rows, numbers = compare_profile(folder / "config.jsonl", pairs)
    heads = ("figure", "quantity", "at", "measured", "modelled", "error %")
    columns = [Column(str(i), head, NumberFormat(4)) for i, head in enumerate(heads)]
    records = [{str(i): cell for i, cell in enumerate(row)} for row in rows]
    print_rows(records, columns, Format.TABLE, "Figures 4, 5, 7, 8 and 9: a V100 beside iGniter's model")
    errors = list_errors(pairs)
    shown = [Column(key, key) for key in errors[0]]
    print_rows(errors, shown, Format.TABLE, "Figures 11 and 12: mean error of the predicted latency, %")
    printed = [number.row() for number in (*numbers, *list_printed_errors(pairs))]
    print_rows(printed, [Column(key, key) for key in printed[0]], Format.TABLE)
    for reason in _REASONS:
        print_text(f"* {reason}")
    return 0


def read_pairs(path: Path, estimator: Estimator) -> list[Pair]:
    """Return the published pairs with the predictions of iGniter's model."""
    v100, pairs = device(IGNITER_DEVICE), []
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        workload = Workload(row["model"], int(row["batch"]), Share(float(row["mps_share_pct"])))
        beside = Workload(row["beside"], int(row["beside_batch"]), Share(float(row["beside_mps_share_pct"])))
        predicted = estimator.estimate(workload.model, v100, workload.batch, workload.share, [beside]).latency_ms
        solo_ms = float(row.get("solo_latency_ms") or 0.0)
        pairs.append(Pair(workload, beside, float(row["latency_ms"]), predicted.value, solo_ms))
    return pairs


def list_errors(pairs: Sequence[Pair]) -> list[dict[str, Cell]]:
    """Return the mean error of each model, in all and by its share of the GPU."""
    shares = sorted({pair.workload.share.sm_pct for pair in pairs})
    rows: list[dict[str, Cell]] = []
    for model in sorted({pair.workload.model for pair in pairs}):
        model_pairs = [pair for pair in pairs if pair.workload.model == model]
        row: dict[str, Cell] = {
            "model": model,
            "pairs": float(len(model_pairs)),
            "all": fmean(pair.error_pct for pair in model_pairs),
        }
        for share in shares:
            errors = [pair.error_pct for pair in model_pairs if pair.workload.share.sm_pct == share]
            row[f"{share:g}%"] = fmean(errors) if errors else None
        rows.append(row)
    return rows


def list_printed_errors(pairs: Sequence[Pair]) -> Iterator[PrintedNumber]:
    """Yield the printed ends of the errors at half of the GPU, by batch."""
    for model, (least, largest) in _ERRORS_AT_HALF.items():
        by_batch: defaultdict[int, list[float]] = defaultdict(list)
        for pair in pairs:
            if pair.workload.model == model and pair.workload.share.sm_pct == _HALF_PCT:
                by_batch[pair.workload.batch].append(pair.error_pct)
        means = [fmean(errors) for errors in by_batch.values()]
        for what, printed, ours in (("least", least, min), ("largest", largest, max)):
            number = ours(means) if means else None
            yield PrintedNumber(f"{what} error of {model} at half of the GPU, %", "§5.2", (printed, printed), number, 2)


def compare_profile(profile: Path, pairs: Sequence[Pair]) -> tuple[list[tuple[Cell, ...]], list[PrintedNumber]]:
    """Return the profile's measurements beside iGniter's equations, and the printed numbers of Figures 4 and 7."""
    measured, workloads = read_igniter_profile(profile)
    hardware = fit_hardware(measured)
    fitted = fit_published_workload(workloads[_MODEL], hardware)
    beside = _slowed_pct(pairs)
    rows = [
        *_beside_rows(beside),
        *_copies_rows(measured, hardware),
        *_active_rows(workloads[_MODEL], fitted, hardware),
        *_demand_rows(workloads[_MODEL], fitted, hardware),
    ]
    slower = [observed for by_batch in beside.values() for observed, _ in by_batch.values()]
    least, most = _SLOWER
    numbers = [
        PrintedNumber(f"least slow-down of {_MODEL}, %", "§2.2", (least, least), min(slower, default=None), 2),
        PrintedNumber(f"largest slow-down of {_MODEL}, %", "§2.2", (most, most), max(slower, default=None), 2),
        PrintedNumber("copies at whose power the clock falls", "Figure 7", (4.0, 4.0), _first_slow_copy(measured), 0),
    ]
    return rows, numbers


def _slowed_pct(pairs: Sequence[Pair]) -> dict[str, dict[float, tuple[float, float]]]:
    """Return the measured and predicted slow-down in percent, by neighbour and its batch."""
    slowed: dict[str, dict[float, tuple[float, float]]] = {}
    for pair in pairs:
        workload, neighbour = pair.workload, pair.beside
        shares = (workload.share.sm_pct, neighbour.share.sm_pct)
        if (
            workload.model != _MODEL
            or workload.batch != _BATCH
            or neighbour.model == _MODEL
            or shares != (_HALF_PCT, _HALF_PCT)
        ):
            continue
        if not pair.solo_ms:
            continue
        observed, predicted = (100.0 * (ms / pair.solo_ms - 1.0) for ms in (pair.observed_ms, pair.predicted_ms))
        slowed.setdefault(neighbour.model, {})[float(neighbour.batch)] = (observed, predicted)
    return slowed


def _row(figure: str, what: str, at: str, measured: float, modelled: float) -> tuple[Cell, ...]:
    return figure, what, at, measured, modelled, 100.0 * (modelled / measured - 1.0) if measured else None


def _beside_rows(beside: Mapping[str, Mapping[float, tuple[float, float]]]) -> Iterator[tuple[Cell, ...]]:
    for model, by_batch in sorted(beside.items()):
        for batch, (observed, predicted) in sorted(by_batch.items()):
            yield "4", f"{_MODEL} slower by, %", f"beside {model}, batch {batch:g}", observed, predicted, None


def _copies_rows(measured: HardwareProfile, hardware: HardwareCoefficients) -> Iterator[tuple[Cell, ...]]:
    """Yield by the number of copies the scheduling delay (equation 6), the power and the frequency (9)."""
    alone = measured.launch_ms[0] or 0.0
    each = (measured.power_w[1] - measured.power_w[0]) if len(measured.power_w) > 1 else 0.0
    for count, (delay, power, clock) in enumerate(
        zip(measured.launch_ms, measured.power_w, measured.clock_mhz, strict=True), start=1
    ):
        at = f"{count} copies" if count > 1 else "1 copy"
        if delay is not None:
            added = added_launch_ms(hardware, count) if count > 1 else 0.0
            yield _row("5", "scheduling delay of a kernel, ms", at, delay, alone + added)
        demand = measured.power_w[0] + each * (count - 1)
        yield _row("7", "power, W", at, power, min(hardware.max_power_w, demand))
        yield _row("7", "frequency, MHz", at, clock, clock_mhz(hardware, demand))


def _active_rows(
    profile: WorkloadProfile, fitted: WorkloadCoefficients, hardware: HardwareCoefficients
) -> Iterator[tuple[Cell, ...]]:
    for point in profile.configurations:
        active = point.gpu_ms * point.clock_mhz / hardware.max_clock_mhz - fitted.launch_ms * fitted.kernels
        at = f"batch {point.batch}, {100.0 * point.share:g}%"
        yield _row("8", f"GPU active time of {_MODEL}, ms", at, active, fitted.active_ms(point.batch, point.share))


def _demand_rows(
    profile: WorkloadProfile, fitted: WorkloadCoefficients, hardware: HardwareCoefficients
) -> Iterator[tuple[Cell, ...]]:
    for point in profile.configurations:
        ability = point.batch / fitted.active_ms(point.batch, point.share)
        at = f"{ability:.3g} inferences/ms"
        power = point.power_w - hardware.idle_power_w
        yield _row("9", "power above idle, W", at, power, fitted.power_w(point.batch, point.share))
        if point.l2_pct is not None:
            yield _row("9", "L2 utilisation, %", at, point.l2_pct, fitted.l2_pct(point.batch, point.share))


def _first_slow_copy(measured: HardwareProfile) -> float | None:
    slow = [n for n, clock in enumerate(measured.clock_mhz, 1) if clock < 0.999 * measured.max_clock_mhz]
    return float(slow[0]) if slow else None


if __name__ == "__main__":
    sys.exit(main())
