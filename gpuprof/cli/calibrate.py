"""``gpuprof calibrate``: fit iGniter's coefficients of a GPU and its models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import Column, CsvOption, JsonOption, chosen_format, number, print_rows, say

if TYPE_CHECKING:
    from gpuprof.estimators.igniter import HardwareCoefficients, WorkloadCoefficients
    from gpuprof.estimators.igniter_fit import HardwareProfile, WorkloadProfile

_COLUMNS = (
    Column("of", "of", right=False),
    Column("coefficient", "coefficient", right=False),
    Column("value", "value", number(4)),
    Column("unit", "unit", right=False),
)
_HARDWARE_UNITS = {
    "max_power_w": "W",
    "max_clock_mhz": "MHz",
    "idle_power_w": "W",
    "pcie_bytes_per_ms": "bytes/ms",
    "alpha_f": "MHz/W",
    "alpha_sch": "ms a workload",
    "beta_sch": "ms",
    "share_unit": "fraction",
}


def calibrate(
    profile: Annotated[
        Path | None, typer.Option(help="Profile by iGniter's own tools (config.jsonl), instead of the database.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="GPU of the catalogue or the database.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the coefficients go.")] = Path("igniter.json"),
    db: Annotated[Path | None, typer.Option(help="Kernel database.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Fit iGniter's model of co-located inference and keep the coefficients."""
    from gpuprof.estimators.igniter_fit import fit_all
    from gpuprof.estimators.igniter_profile import write_coefficients

    chosen = chosen_format(as_json, as_csv)
    name, measured, models = _profiles(profile, device, db)
    hardware, workloads = fit_all(measured, models)
    write_coefficients(output, name, hardware, workloads)
    print_rows(_rows(name, hardware, workloads), _COLUMNS, chosen)
    say(f"gpuprof: wrote {output}")


def _profiles(
    path: Path | None, device: str | None, db: Path | None
) -> tuple[str, HardwareProfile, dict[str, WorkloadProfile]]:
    from gpuprof.cli.devices import open_database, resolve_device
    from gpuprof.estimators.igniter_profile import read_igniter_profile
    from gpuprof.estimators.igniter_rows import profile_of

    if path is not None:
        hardware, models = read_igniter_profile(path)
        return device or path.stem, hardware, models
    database = open_database(db)
    assert database is not None
    target = resolve_device(device, database)
    return (target.name, *profile_of(database, target))


def _rows(
    name: str, hardware: HardwareCoefficients, workloads: dict[str, WorkloadCoefficients]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [
        {"of": name, "coefficient": key, "value": getattr(hardware, key), "unit": unit}
        for key, unit in _HARDWARE_UNITS.items()
    ]
    for model, one in workloads.items():
        values = {f"k{i}": value for i, value in enumerate(one.active, 1)}
        values |= {"alpha_cache": one.cache, "k_sch": one.launch_ms, "kernels": float(one.kernels)}
        values |= {"alpha_power": one.power[0], "beta_power": one.power[1]}
        values |= {"alpha_cacheutil": one.l2[0], "beta_cacheutil": one.l2[1]}
        rows += [{"of": model, "coefficient": key, "value": value, "unit": ""} for key, value in values.items()]
    return rows
