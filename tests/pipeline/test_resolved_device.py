from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import DeviceRow, ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run
from gpuprof.pipeline.devices import resolve_device


def test_a_gpu_of_this_machine_is_known_though_the_catalogue_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    board = replace(device("h100"), name="frobnicator-9000")
    monkeypatch.setattr("gpuprof.machine.gpu.local_gpus", lambda: (board,))
    assert resolve_device("frobnicator-9000", None).name == "frobnicator-9000"
    with pytest.raises(InputError, match="unknown device 'frobnicator-9001'"):
        resolve_device("frobnicator-9001", None)


def test_of_a_device_that_was_profiled_without_its_peak_rates_that_is_said(tmp_path: Path) -> None:
    run = RunRow("r1", datetime(2026, 1, 1, tzinfo=UTC), "frobnicator-9000", "cupti", "net")
    db = KernelDb.create(tmp_path / "db")
    measured = ModelRow("r1", "net", "frobnicator-9000", 1, latency_p50_ms=2.0)
    db.append(Run(run, models=[measured], devices=[DeviceRow("r1", "frobnicator-9000", "gpu", 132)]))
    with pytest.raises(InputError, match="its peak rates are not known"):
        resolve_device(None, db)
