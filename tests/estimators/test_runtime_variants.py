"""Figures of two runtimes or two precisions are never mixed, and what they are of is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprof.domain.estimate import INTERPOLATED, MEASURED, Workload
from gpuprof.domain.share import Share
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.kernel_db.schema import ColocationRow, ModelRow
from gpuprof.pipeline.devices import describe_choice
from tests.estimators.rows import GPU, database, measured_row

ORT: dict[str, Any] = {"runtime": "onnxruntime", "execution": "fused", "precision": "tf32"}
TORCH: dict[str, Any] = {"runtime": "pytorch", "execution": "eager", "precision": "tf32"}
FLOAT32: dict[str, Any] = {**ORT, "precision": "float32"}


def _row(batch: int, latency_ms: float, variant: dict[str, Any], model: str = "net", **more: Any) -> ModelRow:
    row = measured_row(model, batch, latency_ms, device=GPU.name, **more)
    return replace(row, runtime=variant["runtime"], execution=variant["execution"], precision=variant["precision"])


@pytest.mark.parametrize("other", [TORCH, FLOAT32])
def test_no_estimate_lies_between_two_runtimes_or_precisions(tmp_path: Path, other: dict[str, Any]) -> None:
    # Of the other way twice as many rows would be preferred were they of the same runtime.
    rows = [_row(1, 1.0, ORT), _row(8, 8.0, ORT), _row(2, 50.0, other), _row(4, 100.0, other)]
    rows += [_row(16, 16.0, ORT)]
    estimator = DatabaseEstimator(database(tmp_path / "db", rows))
    estimate = estimator.estimate("net", GPU, 4, Share())
    assert estimate.latency_ms.source == INTERPOLATED and estimate.latency_ms.value == pytest.approx(4.0)
    assert estimate.variant == "onnxruntime fused tf32"
    assert estimator.batches("net", GPU, Share()) == (1, 8, 16)


def test_one_is_named_and_two_are_said(tmp_path: Path) -> None:
    rows = [_row(1, 1.0, ORT), _row(1, 3.0, TORCH), _row(1, 2.0, ORT, model="single")]
    estimator = DatabaseEstimator(database(tmp_path / "db", rows))
    (note,) = describe_choice(estimator, ["net", "single"], [GPU.name])
    assert note == (
        "net was measured on gpu-test by onnxruntime fused tf32 and by pytorch eager tf32: "
        "figures are of onnxruntime fused tf32 alone"
    )


def test_a_model_that_only_another_runtime_measured_is_estimated_by_its_own_rows(tmp_path: Path) -> None:
    rows = [_row(1, 1.0, ORT), _row(1, 3.0, TORCH, model="other")]
    estimate = DatabaseEstimator(database(tmp_path / "db", rows)).estimate("other", GPU, 1, Share())
    assert (estimate.latency_ms.value, estimate.latency_ms.source, estimate.variant) == (
        3.0,
        MEASURED,
        "pytorch eager tf32",
    )


def test_a_slowdown_of_another_runtime_does_not_count(tmp_path: Path) -> None:
    def beside(variant: dict[str, Any], latency_ms: float) -> ColocationRow:
        return ColocationRow(
            "r1", GPU.name, 0, 0, "net", 1, "net:1:50%", 50.0, latency_mean_ms=latency_ms, solo_latency_mean_ms=2.0,
            **variant,
        )  # fmt: skip

    rows = [_row(1, 2.0, ORT, share=50.0), _row(1, 6.0, TORCH, share=50.0)]
    db = database(tmp_path / "db", rows, colocations=[beside(ORT, 2.2), beside(TORCH, 20.0)])
    estimate = DatabaseEstimator(db).estimate("net", GPU, 1, Share(50.0), (Workload("net", 1, Share(50.0)),))
    assert estimate.latency_ms.value == pytest.approx(2.2)
