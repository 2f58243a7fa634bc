"""The GK-Estimator as an estimator: sums of kernels, said so, and honest about ops that it has no kernels of."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.gk.gk_estimator import SOURCE, GkEstimator
from gpuprof.kernel_db.store import KernelDb
from tests.estimators.rows import GPU, database, measured_row, two_layers, with_kernels


def test_a_model_takes_what_its_kernels_take_together(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "two.onnx")
    estimate = GkEstimator(with_kernels(tmp_path / "db", path, duration_ns=50_000)).estimate(str(path), GPU, 1, Share())
    assert estimate.latency_ms.value == pytest.approx(3 * 0.05) and estimate.latency_ms.source == SOURCE
    assert estimate.creq("max_occupancy") is not None and estimate.creq("max_occupancy").value == 50.0  # type: ignore[union-attr]
    assert estimate.creq("wavg_occupancy") == estimate.creq("max_occupancy")
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value > 2 * 64 * 64 * 4


def test_averages_are_over_the_gaps_between_kernels_that_end_sooner_than_the_host_launches(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "two.onnx")
    estimate = GkEstimator(with_kernels(tmp_path / "db", path, duration_ns=1100)).estimate(str(path), GPU, 1, Share())
    most, average = estimate.creq("max_occupancy"), estimate.creq("wavg_occupancy")
    assert most is not None and average is not None
    assert most.value == 50.0 and average.value < 45.0


def test_an_op_type_without_kernels_is_named_and_widens_the_interval(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "two.onnx")
    db = with_kernels(tmp_path / "db", path, types=("MatMul",))
    estimate = GkEstimator(db).estimate(str(path), GPU, 1, Share())
    assert estimate.unknown_ops == ("Relu",)
    assert estimate.latency_ms.value > 2 * 0.005 and estimate.latency_ms.upper() > 1.5 * estimate.latency_ms.value


def test_the_interval_is_what_measured_models_were_off_by(tmp_path: Path) -> None:
    files = [two_layers(tmp_path / f"net{i}.onnx", 32 + i) for i in range(4)]
    db = with_kernels(tmp_path / "db", files[0])
    rows = [measured_row(file.stem, 1, 2.0 * 0.015, device=GPU.name, path=str(file), run_id="r2") for file in files]
    database(tmp_path / "db", rows, run_id="r2")
    latency = GkEstimator(KernelDb(db.path)).estimate("net0", GPU, 1, Share()).latency_ms
    assert latency.high == pytest.approx(2.0 * latency.value, rel=0.05) and latency.low == pytest.approx(
        latency.value / 2.0, rel=0.05
    )


def test_without_kernels_of_the_device_it_says_so(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "two.onnx")
    db = database(tmp_path / "db", [measured_row("net", 1, 5.0)])
    with pytest.raises(InputError, match="holds no kernels of gpu-test"):
        GkEstimator(db).estimate(str(path), GPU, 1, Share())
    with pytest.raises(InputError, match="holds no kernels"):
        GkEstimator(None).estimate(str(path), GPU, 1, Share())
