"""Errors of interference models on measured co-locations, by leaving out what is to be predicted."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpuprof.errors import InputError
from gpuprof.estimators.igniter.igniter import HardwareCoefficients, WorkloadCoefficients
from gpuprof.estimators.interference.models import ColocatedWorkload, InterferenceModel, RunningWorkload

#: Co-locations below which nothing is fitted.
ENOUGH_ROWS = 8


@dataclass(frozen=True, slots=True)
class InterferenceError:
    """Error of a model."""

    model: str
    left_out: str  #: ``"pair"`` of models, ``"victim"`` model, or ``"nothing"``: fitted and tested on the same rows.
    rows: int
    #: ``mean_pct``, ``p95_pct``, ``worst_pct``: Of the absolute relative error of the latency.
    mean_pct: float
    p95_pct: float
    worst_pct: float


def by_pair(row: ColocatedWorkload) -> str:
    """Return the models of a co-location as one name."""
    return "+".join(sorted([row.victim.model, *(one.model for one in row.beside)]))


def by_victim(row: ColocatedWorkload) -> str:
    """Return the model that was slowed down."""
    return row.victim.model


_GROUPS: dict[str, Callable[[ColocatedWorkload], str]] = {
    "pair": by_pair,
    "victim": by_victim,
    "nothing": lambda row: "all",
}


def evaluate(
    name: str, make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload], left_out: str
) -> InterferenceError:
    """Fit a fresh model without each group in turn and predict the group.

    Parameters
    ----------
    left_out : {"pair", "victim", "nothing"}
    """
    errors = np.abs(1.0 / np.array(ratios(make, measured, left_out)) - 1.0)
    percent = 100.0 * errors
    return InterferenceError(
        name, left_out, len(errors), float(percent.mean()), float(np.percentile(percent, 95)), float(percent.max())
    )


def ratios(make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload], left_out: str) -> list[float]:
    """Return measured over predicted latency of each row, predicted by a fit without its group."""
    group = _GROUPS[left_out]
    all_ratios = []
    for held in sorted({group(row) for row in measured}):
        # All rows are one group where nothing is left out: then it is fitted to what it predicts.
        training = [row for row in measured if group(row) != held] or list(measured)
        model = make().fit(training)
        all_ratios += [
            row.latency_ms / (model.slowdown(row.victim, row.beside) * row.victim.solo_ms)
            for row in measured
            if group(row) == held
        ]
    return all_ratios


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """A co-location predicted by a fit that has seen nothing of one of its models, in neither role."""

    model: str  #: Which was left out.
    is_victim: bool  #: Whether it was slowed down; else it was a neighbour.
    ratio: float  #: Measured over predicted latency.


def leave_models_out(make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload]) -> list[LeftOutRow]:
    """Leave every model out in turn, as victim and as neighbour, and predict all rows in which it takes part.

    A model is passed over where too few rows remain without it.
    """
    rows = []
    for name in sorted({one.model for row in measured for one in (row.victim, *row.beside)}):
        training = [row for row in measured if not _takes_part(name, row)]
        if len(training) < ENOUGH_ROWS:
            continue
        model = make().fit(training)
        for row in measured:
            if _takes_part(name, row):
                ratio = row.latency_ms / (model.slowdown(row.victim, row.beside) * row.victim.solo_ms)
                rows.append(LeftOutRow(name, row.victim.model == name, ratio))
    return rows


def _takes_part(name: str, row: ColocatedWorkload) -> bool:
    return name in (row.victim.model, *(one.model for one in row.beside))


def read_pairs(
    path: Path, hardware: HardwareCoefficients, workloads: Mapping[str, WorkloadCoefficients]
) -> list[ColocatedWorkload]:
    """Read a CSV of pairs with the columns of the published V100 measurement.

    Parameters
    ----------
    hardware, workloads
        For transfers, kernels and power, which the file does not have.

    Raises
    ------
    InputError
        When a column is missing, a number is none or a model has no coefficients.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        solo = {(r["model"], r["batch"], r["mps_share_pct"]): float(r["solo_latency_ms"]) for r in rows}
        pairs = [_pair(row, solo, hardware, workloads) for row in rows]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (KeyError, ValueError) as error:
        raise InputError(f"{path}: the co-locations lack or garble {error}") from None
    if not pairs:
        raise InputError(f"{path} holds no co-locations")
    return pairs


def _pair(
    row: Mapping[str, str],
    solo: Mapping[tuple[str, str, str], float],
    hardware: HardwareCoefficients,
    workloads: Mapping[str, WorkloadCoefficients],
) -> ColocatedWorkload:
    def running(prefix: str, model: str, solo_ms: float) -> RunningWorkload:
        workload = workloads[model]
        batch = int(row[f"{prefix}batch"])
        moved = (workload.load_bytes + workload.feedback_bytes) * batch
        # The processing ability as it was measured, rather than by equation 11, from one step less of modelling.
        power = max(0.0, workload.power[0] * batch / solo_ms + workload.power[1])
        return RunningWorkload(
            model=model,
            batch=batch,
            share=float(row[f"{prefix}mps_share_pct"]) / 100.0,
            solo_ms=solo_ms,
            l2_pct=float(row[f"{prefix}l2_utilization_pct"]),
            dram_pct=float(row[f"{prefix}dram_utilization_pct"]),
            kernels=workload.kernels,
            transfer_ms=moved / hardware.pcie_bytes_per_ms,
            power_w=power,
        )

    other = solo[row["beside"], row["beside_batch"], row["beside_mps_share_pct"]]
    victim = running("", row["model"], float(row["solo_latency_ms"]))
    return ColocatedWorkload(victim, (running("beside_", row["beside"], other),), float(row["latency_ms"]))
