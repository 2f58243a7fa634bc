"""Creq and Mreq by regressors, from a GPU's database without measured ops."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

import gpuprof
from gpuprof.domain.catalogue import device
from gpuprof.estimators.learned.learned import load_model
from gpuprof.estimators.roofline import work_of
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id

pytestmark = pytest.mark.slow

NAMES = ("lasso", "gradient_boosting")
BATCHES = (1, 8, 64)


def _creq_pct(path: Path, batch: int) -> float:
    """Return a requirement that grows with the work, as on a GPU."""
    flops = float(sum(work_of(load_graph(path, batch)).flops))
    return 100.0 * flops / (flops + 3e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of eight networks on a V100, and another network's file."""
    folder = tmp_path_factory.mktemp("creq")
    paths = [gpuprof.build_model("random_cnn", folder / f"cnn{seed}.onnx", seed=seed) for seed in range(9)]
    now = datetime.now(UTC)
    run = RunRow(run_id=new_run_id(now), started_at=now, device="v100", collector="test", model="")
    row = ModelRow("", "", "v100", 1, 100.0)
    rows = [
        replace(
            row,
            run_id=run.run_id,
            model=path.stem,
            model_path=str(path),
            batch=batch,
            latency_mean_ms=float(batch),
            wavg_occupancy_pct=_creq_pct(path, batch),
            memory_peak_bytes=path.stat().st_size + 10**6 * batch,
        )
        for path in paths[:8]
        for batch in BATCHES
    ]
    KernelDb.create(folder / "db").append(Run(run, models=rows))
    return folder


def test_the_stack_is_judged_beside_its_parts_and_the_mean_on_networks_left_out(folder: Path) -> None:
    rows = gpuprof.evaluate(regressors=NAMES, db=folder / "db").rows()
    errors = {row["predictor"]: row for row in rows if row["quantity"] == "Creq wavg_occupancy"}
    assert set(errors) == {"stack", *NAMES, "mean of the others"}
    assert all(row["count"] == 24 for row in errors.values())
    stack, mean = (errors[name]["mean_pct"] for name in ("stack", "mean of the others"))
    assert isinstance(stack, float) and isinstance(mean, float) and stack < mean
    assert {row["predictor"] for row in rows if row["quantity"] == "memory"} >= {"stack", *NAMES, "allocation"}


def test_trained_requirements_are_read_back_with_intervals(folder: Path) -> None:
    trained = gpuprof.train(regressors=(*NAMES, "lightgbm"), db=folder / "db")
    assert (trained.ops, trained.latency_factor) == (0, None)
    assert trained.creq_factor is not None and trained.creq_factor > 1.0
    path, v100 = folder / "cnn8.onnx", device("v100")
    figure = load_model(folder / "db", v100).creq_figure("wavg_occupancy", load_graph(path, 8))
    assert figure is not None and figure.interval is not None
    assert figure.interval[0] <= _creq_pct(path, 8) <= figure.interval[1] <= 100.0
    estimate = gpuprof.estimate([path], device="v100", batches=(8,), db=folder / "db").estimates[0]
    assert estimate.creq("wavg_occupancy") is not None
    assert estimate.latency_ms.source != "stack"  # no op was measured
