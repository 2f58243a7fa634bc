"""The page of what a run on a GPU measured."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench.gpu import page
from gpuprof.kernel_db.schema import ColocationRow, ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run


def _model(run: str, batch: int, share: float, p50_ms: float, **more: object) -> ModelRow:
    return ModelRow(run, "net", "h200", batch, share, latency_p50_ms=p50_ms, **more)  # type: ignore[arg-type]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    rows = [
        _model("r1", 16, 100.0, 4.0, stable=True, kernel_count=175, memory_peak_bytes=512 * 2**20),
        _model("r1", 16, 50.0, 6.5, stable=True),
        _model("r1", 16, 100.0, 99.0, stable=False),
        _model("r1", 16, 10.0, 30.0, error="output y differs under the share by 2"),
    ]
    beside = ColocationRow(
        "r1", "h200", 0, 0, "net", 16, "other:16:50%", 50.0, latency_mean_ms=9.0, solo_latency_mean_ms=6.0
    )
    run = RunRow("r1", datetime(2026, 1, 1, tzinfo=UTC), "h200", "cupti", "net")
    KernelDb.create(tmp_path / "gpuprof-db").append(Run(run, models=rows, colocations=[beside]))
    (tmp_path / "steps.csv").write_text("step,exit_code,seconds\n01-doctor,0,3\n")
    (tmp_path / "01-ceilings.log").write_text('a warning\n{"float32_flops_per_s": 5e13, "idle_power_w": 70.0}\n')
    row = {"setting": "architecture", "quantity": "latency", "predictor": "roofline", "count": 3, "mean_pct": 18.5}
    (tmp_path / "06-evaluate.log").write_text(f"fitting …\n{json.dumps([row], indent=1)}\n")
    (tmp_path / "04-calibrate-1.log").write_text("none   victim   23\n")
    (tmp_path / "load.json").write_text(json.dumps([{"model": "net", "rate_rps": 50.0, "p99_ms": 12.5}]))
    return tmp_path


def test_each_step_that_ran_has_its_table_and_the_database_its_plots(out: Path) -> None:
    assert page.main([str(out)]) == 0
    text = (out / "page" / "gpu-results.md").read_text()
    assert text.startswith("# Measured on h200\n")
    for line in (
        "| float32 | 50 | TFLOP/s |",
        "| net | 16 | 4 | – | – | 512 |",
        "| p50 ms | batch | 50% | 100% |",
        "| net | 16 | 6.5 | 4 |",
        "| net | 16 | 10 | output y differs under the share by 2 |",
        "| net | 16 | 50 | other:16:50% | 6 | 9 | 1.5 |",
        "none   victim   23",
        "| net | 50 | – | – | – | – | 12.5 | – | – |",
        "| architecture | latency | roofline | 3 | 18.5 | – | – | – |",
        "| 01-doctor | 0 | 3 |",
    ):
        assert line in text
    plots = [path.name for path in (out / "page").glob("*.svg")]
    assert plots and all(f"]({name})" in text for name in plots)


def test_what_did_not_run_has_no_table_and_nothing_is_made_up(tmp_path: Path) -> None:
    assert page.main([str(tmp_path)]) == 1
    run = RunRow("r1", datetime(2026, 1, 1, tzinfo=UTC), "h200", "cupti", "net")
    KernelDb.create(tmp_path / "gpuprof-db").append(Run(run, models=[_model("r1", 1, 100.0, 2.0)]))
    (tmp_path / "steps.csv").write_text("step,exit_code,seconds\n")
    assert page.main([str(tmp_path), str(tmp_path / "elsewhere")]) == 0
    text = (tmp_path / "elsewhere" / "gpu-results.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Models alone", "## Plots"]
