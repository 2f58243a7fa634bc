"""``gpuprof train`` and ``gpuprof evaluate`` as a user types them."""

from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.estimators.measured_world import convolutional, measure
from tests.estimators.rows import CPU

QUICK = "lasso,kernel_ridge"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    measure(folder, {"thin": (8, 8, 16), "wide": (32, 32), "deep": (8, 16, 16)})
    return folder


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprof.machine.cpu.local_cpu", lambda: CPU)


@pytest.mark.slow
def test_estimate_uses_what_was_trained_for_a_new_model(world: Path, tmp_path: Path, cli: CommandLine) -> None:
    (printed,) = cli.json("train --db", world / "db", "--regressors", QUICK)
    assert printed["architectures"] == 3 and printed["latency_factor"] >= 1.0
    new = convolutional(tmp_path / "new.onnx", (16, 16))
    (row,) = cli.json("estimate", new, "--db", world / "db")
    assert row["latency_source"] == "stack" and row["latency_low_ms"] < row["latency_ms"] < row["latency_high_ms"]


@pytest.mark.slow
def test_evaluate_prints_every_predictor(world: Path, cli: CommandLine) -> None:
    rows = cli.json("evaluate --db", world / "db", "--regressors", QUICK)
    assert {row["predictor"] for row in rows} == {
        "lasso", "kernel_ridge", "stack", "allocation", "roofline", "roofline, scaled", "interpolation",
        "mean of the others",
    }  # fmt: skip
    assert {row["quantity"] for row in rows} == {"op time", "latency", "memory"}
