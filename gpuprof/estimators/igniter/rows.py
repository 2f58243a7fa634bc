"""iGniter's profile of a GPU, read from the kernel database instead of from its own tools' files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gpuprof.domain.device import Device
from gpuprof.domain.runtime_variant import comparable_rows
from gpuprof.errors import InputError
from gpuprof.estimators.igniter.fit import Configuration, HardwareProfile, WorkloadProfile
from gpuprof.estimators.igniter.profile import profile_of_tables
from gpuprof.kernel_db.schema import workload_label
from gpuprof.kernel_db.store import KernelDb

Row = Mapping[str, Any]
_NEEDED = ("latency_mean_ms", "power_w", "clock_mhz", "dispatch_ms", "kernel_count", "h2d_bytes", "d2h_bytes")
_LEAST_CONFIGURATIONS = 5
#: Clocks are means of samples: one that is within this of the highest is the highest.
_SAME_CLOCK = 0.99
_NEEDED_BESIDE = ("latency_mean_ms", "power_w", "clock_mhz", "dispatch_ms")
_IMPORTED = "import:igniter"
#: Where the link to the host was not measured: iGniter's 10 GB/s of a V100 on PCIe 3.0 x16, doubled with each
#: generation; by the least compute capability that came with it.
_PCIE_3_BYTES_PER_MS = 1e7
_PCIE_GENERATIONS = ((9.0, 5), (8.0, 4), (7.0, 3))


def profile_of(db: KernelDb, device: Device) -> tuple[HardwareProfile, dict[str, WorkloadProfile]]:
    """Return the profiles of ``device`` and of every model measured on it in enough configurations.

    A profile by iGniter's own tools that was imported counts as it is. What is needed of measurements: for each model
    at least five (the paper: eleven) configurations of batch and share with power, clock, launch delay
    (``dispatch_ms``), kernels and bytes copied; for one model, one to five copies at once.

    Raises
    ------
    InputError
        Saying what is missing.
    """
    imported = _imported(db, device)
    if imported is not None:
        return imported
    measured = db.read("models", where={"device": device.name, "processes": 1}).to_pylist()
    models = [dict(row) for row in comparable_rows(measured)]
    complete = [row for row in models if row["error"] is None and all(row[name] is not None for name in _NEEDED)]
    if not complete:
        missing = [name for name in _NEEDED if not any(row[name] is not None for row in models)]
        raise InputError(
            f"no model was measured on {device.name} with all of iGniter's metrics: "
            f"{', '.join(missing) or 'never all of them in one row'} missing",
            "profile on a GPU with nsys, or give iGniter's own profile with --profile",
        )
    beside = [dict(row) for row in comparable_rows(db.read("colocations", where={"device": device.name}).to_pylist())]
    pcie = _pcie_bytes_per_ms(db, device)
    by_model: dict[str, list[Row]] = {}
    for row in complete:
        by_model.setdefault(row["model"], []).append(row)
    workloads = {
        name: profile
        for name, rows in by_model.items()
        if len(rows) >= _LEAST_CONFIGURATIONS and (profile := _workload(rows, beside, pcie, complete)) is not None
    }
    return _hardware(device, complete, beside, pcie), workloads


def _imported(db: KernelDb, device: Device) -> tuple[HardwareProfile, dict[str, WorkloadProfile]] | None:
    """Return the last profile of iGniter's own that was imported, which its run keeps whole."""
    runs = db.read("runs", ["run_id", "settings"], {"device": device.name, "collector": _IMPORTED}).to_pylist()
    for run in sorted(runs, key=lambda run: str(run["run_id"]), reverse=True):
        tables = json.loads(run["settings"] or "{}")
        if tables.get("hardware"):
            return profile_of_tables(tables, f"run {run['run_id']}")
    return None


def _pcie_bytes_per_ms(db: KernelDb, device: Device) -> float:
    """Return what copies achieved: those of the models themselves, in timelines, before a benchmark's."""
    names = ["run_id", "pcie_bytes_per_s", "dram_bytes_per_s"]
    rows = db.read("devices", columns=names, where={"device": device.name}).to_pylist()
    known = [row for row in rows if row["pcie_bytes_per_s"]]
    if known:
        # What a benchmark of the device measured stands beside its memory's bandwidth.
        of_models = [row["pcie_bytes_per_s"] for row in known if row["dram_bytes_per_s"] is None]
        latest = max(known, key=lambda row: str(row["run_id"]))["pcie_bytes_per_s"]
        return float(median(of_models) if of_models else latest) / 1000.0
    generation = next((g for least, g in _PCIE_GENERATIONS if float(device.compute_capability or 0) >= least), None)
    if generation is None:
        raise InputError(f"the bandwidth between host and {device.name} was not measured")
    return _PCIE_3_BYTES_PER_MS * 2.0 ** (generation - 3)


def _copies(row: Row, beside: list[dict[str, Any]]) -> dict[int, Row]:
    """Return what was measured of a workload by the number of its copies, itself included."""
    share = row["sm_share_pct"]
    label = workload_label(row["model"], row["batch"], share, row["mig_profile"], 1)
    found: dict[int, Row] = {1: row}
    for other in beside:
        same = (other["model"], other["batch"], other["sm_share_pct"]) == (row["model"], row["batch"], share)
        others = other["beside"].split(" + ")
        if same and set(others) == {label} and all(other[name] is not None for name in _NEEDED_BESIDE):
            found[1 + len(others)] = other
    return found


def _hardware(device: Device, rows: list[dict[str, Any]], beside: list[dict[str, Any]], pcie: float) -> HardwareProfile:
    copies, kernels = max(
        ((_copies(row, beside), row["kernel_count"]) for row in rows), key=lambda one: len(one[0])
    )  # fmt: skip
    counts = range(1, len(copies) + 1)
    idle = next((row["idle_power_w"] for row in rows if row["idle_power_w"] is not None), None)
    if len(copies) < 3 or sorted(copies) != list(counts) or idle is None or device.max_power_w is None:
        raise InputError(
            f"iGniter's hardware coefficients need one to five copies of a model at once on {device.name}, "
            f"and its idle power, but there are {len(copies)} copies",
            "profile one model --beside itself",
        )
    return HardwareProfile(
        device.max_power_w,
        _highest_clock(rows),
        float(idle),
        pcie,
        tuple(float(copies[count]["power_w"]) for count in counts),
        tuple(_steady(copies[count]["clock_mhz"], rows) for count in counts),
        tuple(float(copies[count]["dispatch_ms"]) / kernels for count in counts),
    )


def _highest_clock(rows: Sequence[Row]) -> float:
    """Return what the GPU runs at below its limits: some never reach the clock of their data sheet."""
    return max(float(row["clock_mhz"]) for row in rows)


def _steady(clock_mhz: float, rows: Sequence[Row]) -> float:
    highest = _highest_clock(rows)
    return highest if clock_mhz >= _SAME_CLOCK * highest else float(clock_mhz)


def _workload(
    rows: list[Row], beside: list[dict[str, Any]], pcie: float, everything: Sequence[Row]
) -> WorkloadProfile | None:
    """Return the profile of a model, None if it was never measured beside a copy of itself."""
    pair = next(((row, found[2]) for row in rows if 2 in (found := _copies(row, beside))), None)
    if pair is None:
        return None
    alone, together = pair
    return WorkloadProfile(
        load_bytes=alone["h2d_bytes"] / alone["batch"],
        feedback_bytes=alone["d2h_bytes"] / alone["batch"],
        kernels=alone["kernel_count"],
        idle_ms=alone["dispatch_ms"],
        active_ms=_gpu_ms(alone, alone, pcie) - alone["dispatch_ms"],
        active_beside_ms=_gpu_ms(together, alone, pcie) - together["dispatch_ms"],
        clock_beside_mhz=_steady(together["clock_mhz"], everything),
        l2_beside_pct=_l2_pct(alone, rows, pcie),
        configurations=tuple(
            Configuration(
                row["batch"],
                row["sm_share_pct"] / 100.0,
                _gpu_ms(row, row, pcie),
                row["power_w"],
                _steady(row["clock_mhz"], everything),
                row["l2_pct"],
            )
            for row in rows
        ),
    )


def _l2_pct(alone: Row, rows: Sequence[Row], pcie: float) -> float:
    """Return the use of L2, of the most alike configuration where that one was timed without counters.

    iGniter ties it to the requests in a unit of time (section 3.2), so that decides which is most alike.
    """

    def rate(row: Row) -> float:
        return float(row["batch"]) / _gpu_ms(row, row, pcie)

    known = [row for row in rows if row["l2_pct"] is not None]
    return float(min(known, key=lambda row: abs(rate(row) - rate(alone)))["l2_pct"]) if known else 0.0


def _gpu_ms(row: Row, copied: Row, pcie: float) -> float:
    """Return the time on the GPU: latency less the transfers."""
    return float(row["latency_mean_ms"] - (copied["h2d_bytes"] + copied["d2h_bytes"]) / pcie)
