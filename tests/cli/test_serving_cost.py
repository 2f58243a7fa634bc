from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuprof.cli.serving_cost import measure_serving, serving_overhead_ms
from gpuprof.kernel_db.schema import DeviceRow, ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
from gpuprof.local_device import local_cpu
from gpuprof.serving import overhead
from gpuprof.serving.overhead import RequestOverhead

MIB = 1 << 20


def _append(db: KernelDb, device: str, fixed_ms: float | None, model_bytes: int | None = None) -> None:
    started = datetime.now(UTC)
    run_id = new_run_id(started)
    devices = [DeviceRow(run_id, device, "cpu", request_ms=fixed_ms, request_ms_per_mib=1.5)] if fixed_ms else []
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


def test_it_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(device: str) -> RequestOverhead:
        asked.append(device)
        return RequestOverhead(0.25, 1.0)

    monkeypatch.setattr(overhead, "measure_overhead", measured)
    db, device = KernelDb.create(tmp_path), local_cpu()
    measure_serving(db, device)
    measure_serving(db, device)
    assert asked == [device.name]
    assert serving_overhead_ms(db, device.name, []) == 0.25
