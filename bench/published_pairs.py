"""The published latencies of pairs under MPS, as co-locations."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from gpuprof.errors import InputError
from gpuprof.estimators.igniter.igniter import (
    HardwareCoefficients,
    HardwareProfile,
    WorkloadCoefficients,
    WorkloadProfile,
    fit_hardware,
    fit_workload,
    profile_of_tables,
)
from gpuprof.estimators.interference.colocation import ColocatedWorkload, RunningWorkload
from gpuprof.kernel_db.importing import parse_igniter_tables


def fit_all(
    hardware: HardwareProfile, workloads: Mapping[str, WorkloadProfile]
) -> tuple[HardwareCoefficients, dict[str, WorkloadCoefficients]]:
    """Return the coefficients of the GPU and of each model."""
    fitted = fit_hardware(hardware)
    return fitted, {name: fit_workload(profile, fitted) for name, profile in workloads.items()}


def read_igniter_profile(path: Path) -> tuple[HardwareProfile, dict[str, WorkloadProfile]]:
    """Return the profile in a file of lines ``{"model or hardware": {"key": value}}`` as iGniter publishes.

    Raises `InputError` when the file has another format or lacks a key; the message names the key.
    """
    return profile_of_tables(parse_igniter_tables(path.read_text(encoding="utf-8"), path), str(path))


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

    neighbour = solo[row["beside"], row["beside_batch"], row["beside_mps_share_pct"]]
    victim = running("", row["model"], float(row["solo_latency_ms"]))
    return ColocatedWorkload(victim, (running("beside_", row["beside"], neighbour),), float(row["latency_ms"]))
