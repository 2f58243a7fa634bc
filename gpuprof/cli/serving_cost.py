"""What serving adds to every request: measured once a device by ``profile``, looked up by ``place``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuprof.cli.output import say
from gpuprof.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuprof.device import Device
    from gpuprof.kernel_db.store import KernelDb

_COLLECTOR = "serving"


def measure_serving(database: KernelDb, device: Device) -> None:
    """Measure and keep the overhead of a request on ``device``, unless it is known or serving is not installed."""
    from dataclasses import replace
    from datetime import UTC, datetime

    from gpuprof.kernel_db.schema import DeviceRow, RunRow
    from gpuprof.kernel_db.store import Run, new_run_id
    from gpuprof.profiling.campaign import machine

    if device.kind != "cpu" or _known(database, device.name) is not None:
        return
    started = datetime.now(UTC)
    try:
        from gpuprof.serving.overhead import measure_overhead

        found = measure_overhead(device.name)
    except (ImportError, UnavailableError) as error:
        say(f"what serving adds to a request is not known: {error} (pip install 'gpuprof[serve]')")
        return
    run_id = new_run_id(started)
    row = DeviceRow(
        run_id=run_id,
        device=device.name,
        kind=device.kind,
        compute_units=device.compute_units,
        clock_mhz=device.clock_mhz,
        float32_flops_per_s=device.flops_per_s.get("float32"),
        dram_bytes=device.dram_bytes,
        dram_bytes_per_s=device.dram_bytes_per_s,
        l2_bytes=device.l2_bytes,
        request_ms=found.fixed_ms,
        request_ms_per_mib=found.ms_per_mib,
        source="overhead measured: null models behind the router, requests one at a time, medians; rates computed",
    )
    run = replace(RunRow(run_id, started, device.name, _COLLECTOR, ""), **machine())
    database.append(Run(run, devices=[row]))


def serving_overhead_ms(database: KernelDb | None, device: str, models: Iterable[str]) -> float:
    """Return the overhead of the largest request of ``models`` on ``device``; 0.0 where it was never measured."""
    known = None if database is None else _known(database, device)
    if database is None or known is None:
        return 0.0
    wanted = set(models)
    rows = database.read("models", ["model", "batch", "input_bytes"], {"device": device}).to_pylist()
    sizes = [row["input_bytes"] / row["batch"] for row in rows if row["model"] in wanted and row["input_bytes"]]
    fixed_ms, ms_per_mib = known
    return fixed_ms + ms_per_mib * max(sizes, default=0.0) / (1 << 20)


def _known(database: KernelDb, device: str) -> tuple[float, float] | None:
    rows = database.read("devices", ["run_id", "request_ms", "request_ms_per_mib"], {"device": device}).to_pylist()
    measured = [row for row in rows if row["request_ms"] is not None]
    if not measured:
        return None
    latest = max(measured, key=lambda row: str(row["run_id"]))
    return latest["request_ms"], latest["request_ms_per_mib"] or 0.0
