from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuprof.domain.host_work import NO_HOST_WORK, HostWork
from gpuprof.kernel_db.schema import DeviceRow, ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
from gpuprof.machine.cpu import local_cpu
from gpuprof.pipeline import serving_cost as overhead
from gpuprof.pipeline.serving_cost import measure_overhead, measure_serving, serving_overhead_ms, serving_work
from tests.reruns import serves_in_real_time

MIB = 1 << 20


def _append(
    db: KernelDb,
    device: str,
    fixed_ms: float | None,
    model_bytes: int | None = None,
    handover_ms: float | None = None,
    host_ms: float | None = None,
    host_ms_busy: float | None = None,
) -> None:
    started = datetime.now(UTC)
    run_id = new_run_id(started)
    row = DeviceRow(
        run_id,
        device,
        "cpu",
        request_ms=fixed_ms,
        request_ms_per_mib=1.5,
        handover_ms=handover_ms,
        host_ms=host_ms,
        host_ms_per_mib=0.25,
        host_ms_busy=host_ms_busy,
    )
    devices = [row] if fixed_ms else []
    models = []
    if model_bytes is not None:
        models = [ModelRow(run_id, "m", device, batch=2, sm_share_pct=100.0, processes=1, input_bytes=model_bytes)]
    db.append(Run(RunRow(run_id, started, device, "test", "m"), devices=devices, models=models))


def test_nothing_is_added_where_nothing_was_measured(tmp_path: Path) -> None:
    db = KernelDb.create(tmp_path)
    _append(db, "cpu-a", None, 4 * MIB)
    assert serving_overhead_ms(None, "cpu-a", ["m"]) == 0.0
    assert serving_overhead_ms(db, "cpu-a", ["m"]) == 0.0


def test_the_largest_request_counts_and_the_last_measurement(tmp_path: Path) -> None:
    db = KernelDb.create(tmp_path)
    _append(db, "cpu-a", 9.0)
    _append(db, "cpu-a", 0.5, 4 * MIB)
    assert serving_overhead_ms(db, "cpu-a", ["m"]) == pytest.approx(0.5 + 2 * 1.5)
    assert serving_overhead_ms(db, "cpu-a", ["other"]) == 0.5
    assert serving_overhead_ms(db, "cpu-b", ["m"]) == 0.0


def test_what_keeps_the_worker_is_not_outside_the_batch(tmp_path: Path) -> None:
    db = KernelDb.create(tmp_path)
    _append(db, "cpu-a", 0.5, 4 * MIB, handover_ms=0.2, host_ms=0.6)
    assert serving_overhead_ms(db, "cpu-a", ["m"]) == pytest.approx(0.3 + 2 * 1.5)


def test_the_host_works_for_the_mean_request_where_it_is_the_only_machine(tmp_path: Path) -> None:
    db = KernelDb.create(tmp_path)
    cpu = replace(local_cpu(), name="cpu-a", compute_units=2)
    assert serving_work(db, cpu, {"m": 1.0}, alone=True) == NO_HOST_WORK
    _append(db, "cpu-a", 0.5, 4 * MIB, handover_ms=0.2, host_ms=0.6)
    work = serving_work(db, cpu, {"m": 1.0}, alone=True)
    assert work.host_ms == pytest.approx(0.6 + 2 * 0.25)
    assert (work.handover_ms, work.host_cores) == (0.2, 2)
    mixed = serving_work(db, cpu, {"m": 1.0, "tiny": 3.0}, alone=True)  # nothing is known of what the tiny one brings
    assert mixed.host_ms == pytest.approx(0.6 + 2 * 0.25 / 4)
    assert serving_work(db, cpu, {"m": 1.0}, alone=False) == HostWork(0.2)
    assert serving_work(db, replace(cpu, kind="gpu"), {"m": 1.0}, alone=True) == HostWork(0.2)
    assert serving_work(None, cpu, {"m": 1.0}, alone=True) == NO_HOST_WORK


def test_it_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def measure_cost(device: str) -> dict[str, float]:
        devices.append(device)
        return {"request_ms": 0.25, "request_ms_per_mib": 1.0, "handover_ms": 0.0}

    monkeypatch.setattr(overhead, "measure_overhead", measure_cost)
    db, device = KernelDb.create(tmp_path), local_cpu()
    measure_serving(db, device)
    measure_serving(db, device)
    assert devices == [device.name]
    assert serving_overhead_ms(db, device.name, []) == 0.25


@pytest.mark.slow
@serves_in_real_time
def test_a_real_server_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_DURATION_S", 0.4)
    monkeypatch.setattr(overhead, "_REPEATS", 1)
    measured = measure_overhead(local_cpu().name)
    assert 0.0 < measured["request_ms"] < 10_000.0  # seconds where other programs occupy the processors
    assert measured["request_ms_per_mib"] >= 0.0 and measured["host_ms_per_mib"] >= 0.0
    assert 0.0 < measured["handover_ms"] <= measured["request_ms"]
    assert 0.0 < measured["host_ms_busy"] <= measured["host_ms"] < 1000.0
