"""Overhead of serving per request: measured once per device by ``profile``, used by ``place``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuprof.domain.sizes import name_parts, split_name
from gpuprof.errors import UnavailableError, install_hint
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import DeviceRow, RunRow, model_at_dims
from gpuprof.pipeline.result import NoteCallback, say_nothing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuprof.domain.device import Device
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.rules.host_work import HostWork

_COLLECTOR = "serving"


@dataclass(frozen=True, slots=True)
class _RequestInputs:
    model: str
    batch: int
    input_bytes: int | None
    dims: str | None


def measure_serving(database: KernelDb, device: Device, note: NoteCallback = say_nothing) -> None:
    """Measure and store the cost of a request on ``device``, unless it is known or serving is not installed."""
    from dataclasses import replace
    from datetime import UTC, datetime

    from gpuprof.kernel_db.store import Run, new_run_id
    from gpuprof.profiling.sweep.campaign import machine_columns

    known = _find_last_measured(database, device.name)
    if device.kind != "cpu" or (known is not None and known.handover_ms is not None):
        return
    started = datetime.now(UTC)
    try:
        from gpuprof.pipeline.serving_overhead import measure_overhead

        overhead = measure_overhead(device.name)
    except (ImportError, UnavailableError) as error:
        note(f"what serving adds to a request is not known: {error} ({install_hint('serve')})")
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
        request_ms=overhead.fixed_ms,
        request_ms_per_mib=overhead.ms_per_mib,
        handover_ms=overhead.handover_ms,
        host_ms=overhead.host_ms,
        host_ms_per_mib=overhead.host_ms_per_mib,
        host_ms_busy=overhead.host_ms_busy,
        source="overhead measured: null models behind the router, requests one at a time, medians; rates computed",
    )
    run = replace(RunRow(run_id, started, device.name, _COLLECTOR, ""), **machine_columns())
    database.append(Run(run, devices=[row]))


def serving_overhead_ms(database: KernelDb | None, device: str, models: Iterable[str]) -> float:
    """Return the milliseconds of the largest request of ``models`` outside its batch; 0.0 without a measurement.

    Work that keeps the worker from other batches is part of the batch (see `serving_work`), and not of this time.
    """
    known = None if database is None else _find_last_measured(database, device)
    if database is None or known is None:
        return 0.0
    outside_ms: float = (known.request_ms or 0.0) - (known.handover_ms or 0.0)
    more_ms: float = (known.request_ms_per_mib or 0.0) * max(
        _read_request_mib(database, device, models).values(), default=0.0
    )
    return outside_ms + more_ms


def serving_work(database: KernelDb | None, device: Device, rates_rps: Mapping[str, float], alone: bool) -> HostWork:
    """Return the work of serving on ``device`` in addition to the batches; none without a measurement.

    ``rates_rps``: rates of the models, which weight the mean request, because the work adds up over all models;
    ``alone``: whether this is the only machine, which then runs router and clients, too.
    """
    from gpuprof.rules.host_work import NO_HOST_WORK, HostWork

    known = None if database is None else _find_last_measured(database, device.name)
    if database is None or known is None:
        return NO_HOST_WORK
    handover_ms = known.handover_ms or 0.0
    if not alone or device.kind != "cpu" or not known.host_ms:
        return HostWork(handover_ms)
    sizes, total = _read_request_mib(database, device.name, rates_rps), math.fsum(rates_rps.values())
    mean_mib = math.fsum(rate * sizes.get(model, 0.0) for model, rate in rates_rps.items()) / total if total else 0.0
    more_ms = (known.host_ms_per_mib or 0.0) * mean_mib
    busy_ms = known.host_ms_busy
    return HostWork(handover_ms, known.host_ms + more_ms, device.compute_units, busy_ms + more_ms if busy_ms else 0.0)


def _read_request_mib(database: KernelDb, device: str, models: Iterable[str]) -> dict[str, float]:
    """Return the MiB of tensors in a request of each model, where known."""
    sizes: dict[str, float] = {}
    for row in read_records(database, _RequestInputs, {"device": device}, table="models"):
        for name in {row.model, model_at_dims(row.model, row.dims)} if row.input_bytes else ():
            sizes[name] = max(sizes.get(name, 0.0), (row.input_bytes or 0) / row.batch / (1 << 20))
    mib = {}
    for model in models:
        parts = [(sizes.get(name, sizes.get(split_name(name)[0])), part) for name, part in name_parts(model)]
        if all(size is not None for size, _ in parts):
            mib[model] = math.fsum(part * (size or 0.0) for size, part in parts)
    return mib


def _find_last_measured(database: KernelDb, device: str) -> DeviceRow | None:
    """Return the last row of a device with a measured cost of serving; None without a row."""
    measured = [row for row in read_records(database, DeviceRow, {"device": device}) if row.request_ms is not None]
    return max(measured, key=lambda row: row.run_id, default=None)
