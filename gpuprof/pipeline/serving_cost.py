"""Overhead of serving per request: measured once per device by ``profile``, used by ``place``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpuprof.domain.deployment import DeploymentMap, parse_map
from gpuprof.domain.device import Device
from gpuprof.domain.host_work import BUSY_RPS, CALM_RPS, NO_HOST_WORK, HostWork
from gpuprof.domain.sizes import name_parts, split_name
from gpuprof.errors import UnavailableError, install_hint
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import DeviceRow, RunRow, model_at_dims
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
from gpuprof.pipeline.result import NoteCallback, say_nothing

_COLLECTOR = "serving"
_REQUEST_COLUMNS = ("model", "batch", "input_bytes", "dims")


def measure_serving(database: KernelDb, device: Device, note: NoteCallback = say_nothing) -> None:
    """Measure and store the cost of a request on ``device``, unless it is known or serving is not installed."""
    cost = _find_last_measured(database, device.name)
    if device.kind != "cpu" or (cost is not None and cost.handover_ms is not None):
        return
    started = datetime.now(UTC)
    try:
        overhead = measure_overhead(device.name)
    except (ImportError, UnavailableError) as error:
        note(f"what serving adds to a request is not known: {error} ({install_hint('serve')})")
        return
    from gpuprof.profiling.sweep.campaign import machine_columns  # `place` needs no profiler

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
        source="overhead measured: null models behind the router, requests one at a time, medians; rates computed",
    )
    run = replace(RunRow(run_id, started, device.name, _COLLECTOR, ""), **machine_columns())
    database.append(Run(run, devices=[replace(row, **overhead)]))


def serving_overhead_ms(database: KernelDb | None, device: str, models: Iterable[str]) -> float:
    """Return the time in ms outside the batch of the largest request of ``models``; 0.0 without a measurement.

    Work that keeps the worker from other batches is part of the batch (see `serving_work`), and not of this time.
    """
    cost = None if database is None else _find_last_measured(database, device)
    if database is None or cost is None:
        return 0.0
    outside_ms: float = (cost.request_ms or 0.0) - (cost.handover_ms or 0.0)
    more_ms: float = (cost.request_ms_per_mib or 0.0) * max(
        _read_request_mib(database, device, models).values(), default=0.0
    )
    return outside_ms + more_ms


def serving_work(database: KernelDb | None, device: Device, rates_rps: Mapping[str, float], alone: bool) -> HostWork:
    """Return the work of serving on ``device`` in addition to the batches; none without a measurement.

    ``rates_rps``: rates of the models, which weight the mean request, because the work adds up over all models;
    ``alone``: whether this is the only machine, which then runs router and clients, too.
    """
    cost = None if database is None else _find_last_measured(database, device.name)
    if database is None or cost is None:
        return NO_HOST_WORK
    handover_ms = cost.handover_ms or 0.0
    if not alone or device.kind != "cpu" or not cost.host_ms:
        return HostWork(handover_ms)
    sizes, total = _read_request_mib(database, device.name, rates_rps), math.fsum(rates_rps.values())
    mean_mib = math.fsum(rate * sizes.get(model, 0.0) for model, rate in rates_rps.items()) / total if total else 0.0
    more_ms = (cost.host_ms_per_mib or 0.0) * mean_mib
    busy_ms = cost.host_ms_busy
    return HostWork(handover_ms, cost.host_ms + more_ms, device.compute_units, busy_ms + more_ms if busy_ms else 0.0)


def _read_request_mib(database: KernelDb, device: str, models: Iterable[str]) -> dict[str, float]:
    """Return the MiB of tensors in a request of each model, where known."""
    sizes: dict[str, float] = {}
    for row in database.read_table("models", _REQUEST_COLUMNS, {"device": device}).to_pylist():
        for name in {row["model"], model_at_dims(row["model"], row["dims"])} if row["input_bytes"] else ():
            sizes[name] = max(sizes.get(name, 0.0), row["input_bytes"] / row["batch"] / (1 << 20))
    mib = {}
    for model in models:
        parts = [(sizes.get(name, sizes.get(split_name(name)[0])), part) for name, part in name_parts(model)]
        if all(size is not None for size, _ in parts):
            mib[model] = math.fsum(part * (size or 0.0) for size, part in parts)
    return mib


def _find_last_measured(database: KernelDb, device: str) -> DeviceRow | None:
    """Return the last row of a device with a measured cost of serving; None if there is none."""
    measured = [row for row in read_records(database, DeviceRow, {"device": device}) if row.request_ms is not None]
    return max(measured, key=lambda row: row.run_id, default=None)


_DURATION_S = 1.0
_REPEATS = 3
_WORKER = b"gpuprof.serving.worker.worker"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class OverheadSample:
    """Median latency and CPU time by process of a request of one size, in ms."""

    median_ms: float
    worker_ms: float
    host_ms: float


def measure_overhead(device: str) -> dict[str, Any]:
    """Measure for about ten seconds; return the columns of the table ``devices`` about the cost of a request.

    The fastest of several repeats counts, since other load only adds time. ``device``: name of this machine's CPU, on
    which the null models are served. Raises `UnavailableError` when the server does not start here.
    """
    number_bytes, mib = 4, 2**20
    small, large = _measure_size(device, number_bytes), _measure_size(device, mib)
    busy = _measure_size(device, number_bytes, BUSY_RPS)
    return {
        "request_ms": small.median_ms,
        "request_ms_per_mib": _per_mib(small.median_ms, large.median_ms),
        "handover_ms": min(small.worker_ms, small.median_ms),
        "host_ms": small.host_ms,
        "host_ms_per_mib": _per_mib(small.host_ms, large.host_ms),
        "host_ms_busy": min(busy.host_ms, small.host_ms),
    }


def _per_mib(small: float, large: float) -> float:
    """Return the cost per further MiB, halved: the null model returns its input, but networks have small outputs."""
    return max(0.0, large - small) / 2.0


def _measure_size(device: str, size: int, rate_rps: float = CALM_RPS) -> OverheadSample:
    from gpuprof.pipeline.serve import ServeSettings, serve

    with serve(_make_null_map(device, size), ServeSettings(port=0)) as server:
        samples = [_send_requests(server.url, server.pid, rate_rps) for _ in range(_REPEATS)]
    return min(samples, key=lambda sample: sample.median_ms)


def _make_null_map(device: str, size: int) -> DeploymentMap:
    """Return a map with a single null model of ``size`` bytes on all of ``device``."""
    predicted = {"latency_ms": 0.0, "throughput_rps": 1e6, "goodput_rps": BUSY_RPS}
    replica = {"model": "null", "batch": 1, "rate_rps": BUSY_RPS, "predicted": predicted}
    document = {
        "schema": "gpuprof.deployment/1",
        "policy": "none",
        "models": {"null": {"path": f"null:{size}", "rate_rps": BUSY_RPS, "slo_ms": 1000.0}},
        "nodes": [{"name": "here", "gpus": [{"index": 0, "device": device, "partitions": [{"replicas": [replica]}]}]}],
        "predicted": {"gpus": 1, "goodput_rps": BUSY_RPS},
    }
    return parse_map(document, "the map of a null model")


def _send_requests(url: str, pid: int, rate_rps: float) -> OverheadSample:
    """Send requests to the server ``pid``."""
    from gpuprof.load.load import LoadSettings, RequestStream, run_load
    from gpuprof.load.target import Target

    settings = LoadSettings(_DURATION_S, 0.0, arrivals="constant", clients=1)
    before = _read_cpu_ms(pid)
    outcome = run_load(Target.parse(url), [RequestStream("null", rate_rps, 1000.0)], settings)
    worker_ms, others_ms = (after - then for after, then in zip(_read_cpu_ms(pid), before, strict=True))
    (result,) = outcome.results
    if result.p50_ms is None:
        raise UnavailableError("the server that measures the overhead of serving did not answer")
    requests = rate_rps * _DURATION_S
    # 0 without CPU times from the system: the client's time alone would be too little.
    host_ms = others_ms and others_ms + 1000.0 * outcome.client_cpu_s
    return OverheadSample(result.p50_ms, worker_ms / requests, host_ms / requests)


def _read_cpu_ms(pid: int) -> tuple[float, float]:
    """Return the CPU time so far of a server's workers and of all its other processes; 0 where unavailable."""
    worker_ms = others_ms = 0.0
    for process in _list_process_tree(pid):
        with suppress(OSError):  # the process has ended meanwhile
            # schedstat rather than stat, whose ticks of 10 ms are longer than a request.
            threads = [path.read_text() for path in _PROC.glob(f"{process}/task/*/schedstat")]
            spent_ms = sum(int(text.split()[0]) for text in threads) / 1e6
            if _WORKER in (_PROC / str(process) / "cmdline").read_bytes().split(b"\0"):
                worker_ms += spent_ms
            else:
                others_ms += spent_ms
    return worker_ms, others_ms


def _list_process_tree(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for thread in _PROC.glob(f"{pid}/task/*/children"):
        with suppress(OSError):  # the process has ended meanwhile
            for child in thread.read_text().split():
                yield from _list_process_tree(int(child))
