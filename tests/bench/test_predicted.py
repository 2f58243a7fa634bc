from typing import Any

import pytest

from bench.gpu.predicted import is_alone, predict


def _row(**changed: Any) -> dict[str, Any]:
    row = {"model": "mlp", "device": "h200", "batch": 4, "sm_share_pct": 50.0, "processes": 1, "error": None}
    return row | {"latency_mean_ms": 1.0, "memory_peak_bytes": 2**30} | changed


def test_rows_that_failed_or_did_not_run_alone_are_left_out() -> None:
    assert is_alone(_row()) and is_alone(_row(processes=None))
    for wrong in ({"error": "out of memory"}, {"processes": 2}, {"latency_mean_ms": None}, {"memory_peak_bytes": None}):
        assert not is_alone(_row(**wrong))


def test_predictions_know_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPROF_DB", "bench/gpu/results/h200/gpuprof-db")
    rows = [_row(), _row(sm_share_pct=100.0)]
    predictions = list(predict(rows))
    assert [row["sm_share_pct"] for row, _ in predictions] == [100.0, 50.0]
    for _, estimate in predictions:
        assert estimate.latency_ms.source == "cross-gpu: tfloat32, onnxruntime"
        assert estimate.memory_bytes is not None and estimate.memory_bytes.source.startswith("process")
    assert predictions[0][1].creq("wavg_sm_util") is not None
