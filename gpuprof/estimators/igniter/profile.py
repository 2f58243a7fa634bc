"""Reads profiles of iGniter's tools, and keeps fitted coefficients in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuprof.domain.file_access import refuse_pipe
from gpuprof.errors import InputError, refuse_unwritable
from gpuprof.estimators.igniter.fit import Configuration, HardwareProfile, WorkloadProfile
from gpuprof.estimators.igniter.igniter import HardwareCoefficients, WorkloadCoefficients
from gpuprof.kernel_db.importing import BATCHES, L2_BATCH, SHARES_PCT, parse_igniter_tables

SCHEMA = "gpuprof.igniter/1"
_FOLDER = ".calibrated"  # hidden, so that the database does not read it as a run
_MAX_BYTES = 16 * 2**20


def read_igniter_profile(path: Path) -> tuple[HardwareProfile, dict[str, WorkloadProfile]]:
    """Return the profile in a file of lines ``{"model or hardware": {"key": value}}`` as iGniter publishes.

    Raises `InputError` when the file cannot be read, has another format or lacks a key; the message names the key.
    """
    return profile_of_tables(parse_igniter_tables(_read_text(path), path), str(path))


def profile_of_tables(
    tables: Mapping[str, Mapping[str, Any]], where: str
) -> tuple[HardwareProfile, dict[str, WorkloadProfile]]:
    """Return the profile in the tables of the hardware and of each model, as iGniter publishes them.

    Raises `InputError` when a key is missing or garbled; the message names the key and ``where``.
    """
    try:
        hardware = _parse_hardware(tables["hardware"])
        return hardware, {name: _parse_workload(table) for name, table in tables.items() if name != "hardware"}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(
            f"{where}: the profile lacks or garbles {error}", "name the config.jsonl of iGniter's tools, whole"
        ) from None


def coefficients_path(database: Path, device: str) -> Path:
    """Return the path of a device's coefficients beside a kernel database."""
    return database / _FOLDER / f"{device}.json"


def write_coefficients(
    path: Path, device: str, hardware: HardwareCoefficients, workloads: Mapping[str, WorkloadCoefficients]
) -> None:
    """Write fitted coefficients as JSON. Raises `InputError` when the file cannot be written."""
    content = {
        "schema": SCHEMA,
        "device": device,
        "hardware": asdict(hardware),
        "workloads": {name: asdict(workload) for name, workload in sorted(workloads.items())},
    }
    with refuse_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_coefficients(path: Path) -> tuple[str, HardwareCoefficients, dict[str, WorkloadCoefficients]]:
    """Return the content of `write_coefficients`'s file: the device's name, its coefficients and the models'.

    Raises `InputError` when the file cannot be read or is of another schema.
    """
    try:
        content = json.loads(_read_text(path))
        if content.get("schema") != SCHEMA:
            raise InputError(
                f"{path}: schema {content.get('schema')!r} where {SCHEMA!r} is expected", "calibrate again"
            )
        workloads = {
            name: WorkloadCoefficients(**{key: _freeze_list(value) for key, value in coefficients.items()})
            for name, coefficients in content["workloads"].items()
        }
        return content["device"], HardwareCoefficients(**content["hardware"]), workloads
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} holds no coefficients: {error}", "calibrate again") from None


def _freeze_list(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read_text(path: Path) -> str:
    try:
        if refuse_pipe(path).stat().st_size > _MAX_BYTES:
            raise InputError(f"{path}: larger than {_MAX_BYTES >> 20} MiB, which no profile is")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text") from None


def _parse_hardware(table: Mapping[str, Any]) -> HardwareProfile:
    return HardwareProfile(
        max_power_w=float(table["maxGPUpower"]),
        max_clock_mhz=float(table["maxGPUfrequency"]),
        idle_power_w=float(table["idlepower"]),
        pcie_bytes_per_ms=float(table["bandwidth"]),
        power_w=tuple(table["power"]),
        clock_mhz=tuple(table["frequency"]),
        launch_ms=tuple(table["idletime"]),
        share_unit=float(table["unit"]) / 100.0,
    )


def _parse_workload(table: Mapping[str, Any]) -> WorkloadProfile:
    configurations = tuple(
        Configuration(
            batch,
            share_pct / 100.0,
            float(table["gpulatency"][row][column]),
            float(table["power"][row][column]),
            float(table["frequency"][row][column]),
            float(table["l2caches"][column]) if batch == L2_BATCH else None,
        )
        for row, batch in enumerate(BATCHES)
        for column, share_pct in enumerate(SHARES_PCT)
    )
    return WorkloadProfile(
        load_bytes=float(table["inputdata"]),
        feedback_bytes=float(table["outputdata"]),
        kernels=int(table["kernel"]),
        idle_ms=float(table["idletime_1"]),
        active_ms=float(table["activetime_1"]),
        active_beside_ms=float(table["activetime_2"]),
        clock_beside_mhz=float(table["frequency_2"]),
        l2_beside_pct=float(table["l2cache"]),
        configurations=configurations,
    )
