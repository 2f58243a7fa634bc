"""iGniter's measured profile of a V100 beside its model (TPDS'22, Figures 4, 5, 7, 8 and 9).

    python -m bench.reproduce.igniter_fig4 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the measurements that its authors publish: config.jsonl and pairs.csv, as bench.reproduce.igniter_fig12 says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.reproduce import command
from bench.reproduce.igniter_fig12 import Pair, read_pairs
from bench.reproduce.igniter_runs import SOURCE
from bench.reproduce.reproduction import Cell, Fact, Reproduction, lines
from gpuprof.estimators.igniter.fit import HardwareProfile, WorkloadProfile, fit_hardware, fit_published_workload
from gpuprof.estimators.igniter.igniter import HardwareCoefficients, WorkloadCoefficients, added_launch_ms, clock_mhz
from gpuprof.estimators.igniter.profile import read_igniter_profile
from gpuprof.reporting.chart import Axis, Chart

_MODEL = "resnet50"
_HALF_PCT, _BATCH = 50.0, 16
#: §2.2: how much slower ResNet-50 is beside AlexNet and VGG-19 at batches of 1 to 32, in percent.
_SLOWER = (6.36, 13.93)

_WHY = (
    "Figure 4: the published pairs start at batches of 2; the paper's at 1. They are other runs than the figure's, "
    "and solo latency is what the same file has for ResNet-50 alone.",
    "Figures 5 and 7: the published profile holds 1 to 5 copies of one model, by which the hardware's coefficients "
    "are fitted; the paper draws three models and two.",
    "Figures 8 and 9: nine configurations are published, and the lines are iGniter's equations with the coefficients"
    " that the authors' own fit gives. Figure 9's L2 utilisation was published at three of them.",
    "The paper prints no numbers on Figures 5, 7, 8 and 9: measured and modelled stand beside one another instead.",
    "optimal has no part in measurements.",
)


def compute(reference: Path) -> Reproduction:
    """Set what was published beside what iGniter's equations say of it."""
    directory = command.find_published(reference, "igniter_v100", SOURCE)
    measured, workloads = read_igniter_profile(directory / "config.jsonl")
    hardware = fit_hardware(measured)
    own = workloads[_MODEL]
    fitted = fit_published_workload(own, hardware)
    beside = _slowed_pct(read_pairs(directory))
    rows = (
        *_beside_rows(beside),
        *_copies_rows(measured, hardware),
        *_active_rows(own, fitted, hardware),
        *_demand_rows(own, fitted, hardware),
    )
    slower = [seen for by_batch in beside.values() for seen, _ in by_batch.values()]
    return Reproduction(
        title="iGniter Figures 4, 5, 7, 8 and 9: published measurements of a V100 beside iGniter's model",
        header=("figure", "what", "at", "measured", "modelled", "error (%)"),
        rows=rows,
        facts=(
            Fact(f"least that {_MODEL} is slower beside others, %", "§2.2", _SLOWER[0], min(slower, default=None), 2),
            Fact("most that it is slower, %", "§2.2", _SLOWER[1], max(slower, default=None), 2),
            Fact("copies at whose power the clock falls first", "Figure 7", 4.0, _first_slow_copy(measured)),
        ),
        differences=_WHY,
        charts=tuple(_charts(beside, rows)),
    )


def _slowed_pct(pairs: Sequence[Pair]) -> dict[str, dict[float, tuple[float, float]]]:
    """Return by neighbour and its batch how much slower the model was measured, and is predicted, in percent."""
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for pair in pairs:
        own, other = pair.workload, pair.beside
        shares = (own.share.sm_pct, other.share.sm_pct)
        if own.model != _MODEL or own.batch != _BATCH or other.model == _MODEL or shares != (_HALF_PCT, _HALF_PCT):
            continue
        if not pair.solo_ms:
            continue
        seen, said = (100.0 * (ms / pair.solo_ms - 1.0) for ms in (pair.observed_ms, pair.predicted_ms))
        found.setdefault(other.model, {})[float(other.batch)] = (seen, said)
    return found


def _row(figure: str, what: str, at: str, measured: float, modelled: float) -> tuple[Cell, ...]:
    return figure, what, at, measured, modelled, 100.0 * (modelled / measured - 1.0) if measured else None


def _beside_rows(beside: Mapping[str, Mapping[float, tuple[float, float]]]) -> Iterator[tuple[Cell, ...]]:
    for model, by_batch in sorted(beside.items()):
        for batch, (seen, said) in sorted(by_batch.items()):
            yield "4", f"{_MODEL} slower by, %", f"beside {model}, batch {batch:g}", seen, said, None


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
    own: WorkloadProfile, fitted: WorkloadCoefficients, hardware: HardwareCoefficients
) -> Iterator[tuple[Cell, ...]]:
    for one in own.configurations:
        active = one.gpu_ms * one.clock_mhz / hardware.max_clock_mhz - fitted.launch_ms * fitted.kernels
        at = f"batch {one.batch}, {100.0 * one.share:g}%"
        yield _row("8", f"GPU active time of {_MODEL}, ms", at, active, fitted.active_ms(one.batch, one.share))


def _demand_rows(
    own: WorkloadProfile, fitted: WorkloadCoefficients, hardware: HardwareCoefficients
) -> Iterator[tuple[Cell, ...]]:
    for one in own.configurations:
        ability = one.batch / fitted.active_ms(one.batch, one.share)
        at = f"{ability:.3g} inferences/ms"
        power = one.power_w - hardware.idle_power_w
        yield _row("9", "power above idle, W", at, power, fitted.power_w(one.batch, one.share))
        if one.l2_pct is not None:
            yield _row("9", "L2 utilisation, %", at, one.l2_pct, fitted.l2_pct(one.batch, one.share))


def _first_slow_copy(measured: HardwareProfile) -> float | None:
    slow = [n for n, clock in enumerate(measured.clock_mhz, 1) if clock < 0.999 * measured.max_clock_mhz]
    return float(slow[0]) if slow else None


def _charts(
    beside: Mapping[str, Mapping[float, tuple[float, float]]], rows: Sequence[tuple[Cell, ...]]
) -> Iterator[Chart]:
    series: dict[str, dict[float, float | None]] = {}
    for model, by_batch in sorted(beside.items()):
        series[f"beside {model}, measured"] = {batch: seen for batch, (seen, _) in sorted(by_batch.items())}
        series[f"beside {model}, modelled"] = {batch: said for batch, (_, said) in sorted(by_batch.items())}
    axes = (Axis("batch of the neighbour"), Axis("slower by (%)", low=0.0))
    yield lines(f"{_MODEL} beside others (iGniter, Figure 4)", *axes, series)
    for figure, what in (("8", "GPU active time"), ("9", "power above idle")):
        own = [row for row in rows if row[0] == figure and str(row[1]).startswith(what)]
        both = {
            name: {float(n): row[column] for n, row in enumerate(own, 1) if not isinstance(row[column], str)}
            for name, column in (("measured", 3), ("modelled", 4))
        }
        axis = Axis(f"configuration, 1 to {len(own)} of the table")
        yield lines(f"{what} (iGniter, Figure {figure})", axis, Axis(what, low=0.0), both)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
