"""Creq of models that no profiler saw: it grows with the batch, has an interval, and nothing learned is a secret."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuprof.domain.catalogue import datasets, device
from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators import creq as creq_module
from gpuprof.estimators.creq import METRICS, SOURCE, LaunchModel, achieved_occupancy_pct, shipped_creq
from gpuprof.estimators.cross_gpu.execution import parse_execution
from gpuprof.estimators.cross_gpu.features import make_table
from gpuprof.estimators.cross_gpu.rates import rates_of
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.kernel_db.schema import ModelRow
from gpuprof.placement.contract import demand, problem
from gpuprof.placement.problem import Options
from gpuprof.placement.search_space import SearchSpace
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build
from tests.estimators.rows import database, measured_row

V100 = device("v100")
EAGER = parse_execution("float32", "eager")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("creq") / "network.onnx"
    build(find_architecture("random_cnn"), path)
    return path


def _creq(path: Path, batch: int, sm_pct: float = 100.0) -> dict[str, float]:
    estimate = DatabaseEstimator(None, {"net": path}, execution=EAGER).estimate("net", V100, batch, Share(sm_pct))
    return {metric: figure.value for metric, figure in estimate.creq_pct}


def test_averages_grow_with_the_batch_until_the_gpu_is_full(network: Path) -> None:
    requirements = [_creq(network, batch) for batch in (1, 8, 64, 512)]
    for metric in ("wavg_occupancy", "wavg_sm_util"):
        values = [requirement[metric] for requirement in requirements]
        assert values == sorted(values)
        assert values[0] < 0.5 * values[-1]
    assert requirements[-1]["wavg_sm_util"] > 80.0


def test_requirements_are_predicted_once_somebody_looks_at_them(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, predict = [], creq_module.UnprofiledRequirements.predict

    def record(self: creq_module.UnprofiledRequirements, model: Any, device: Device, batch: int) -> Any:
        batches.append(batch)
        return predict(self, model, device, batch)

    monkeypatch.setattr(creq_module.UnprofiledRequirements, "predict", record)
    estimator = DatabaseEstimator(None, {"net": network}, execution=EAGER)
    estimate, same = (estimator.estimate("net", V100, batch, Share()) for batch in (4, 4))
    posed = problem([demand("net", 5.0)], [(V100, None)], estimator, Options())  # type: ignore[arg-type]
    steps = SearchSpace(posed).steps("net", V100, None)
    assert not batches and len(steps) > 1
    figures = estimate.creq_pct
    assert [metric for metric, _ in figures] == list(METRICS) and figures[:1] == tuple(figures)[:1]
    assert batches == [4]
    assert figures == tuple(figures) == same.creq_pct and hash(figures) == hash(tuple(figures))
    assert pickle.loads(pickle.dumps(figures)) == tuple(figures) and repr(figures) == repr(tuple(figures))


def test_every_requirement_has_a_source_and_an_interval_within_a_hundred(network: Path) -> None:
    estimate = DatabaseEstimator(None, {"net": network}, execution=EAGER).estimate("net", V100, 12, Share())
    assert [metric for metric, _ in estimate.creq_pct] == list(METRICS)
    for _, figure in estimate.creq_pct:
        assert figure.source == f"{SOURCE}: float32, pytorch-eager" and not figure.is_observed
        assert figure.low is not None and figure.high is not None
        assert 0.0 <= figure.low <= figure.value <= figure.high <= 100.0


def test_what_was_profiled_is_never_mixed_with_predictions(tmp_path: Path) -> None:
    rows: list[ModelRow] = [measured_row("net", 4, 5.0, device="v100")]
    estimator = DatabaseEstimator(database(tmp_path / "db", rows), {})
    assert estimator.estimate("net", V100, 4, Share()).creq_pct == ()


def test_under_a_part_of_the_gpu_nothing_is_said(network: Path) -> None:
    assert _creq(network, 4, 50.0) == {}


def test_a_grid_of_one_block_a_processor_has_no_tail_and_many_waves_come_near_to_all() -> None:
    occupancy = achieved_occupancy_pct(np.array([64.0, 64.0, 16.0]), np.array([0.5, 1000.0, 1000.0]), V100)
    assert occupancy[:2] == pytest.approx(94.5, abs=0.1)
    assert occupancy[2] == pytest.approx(94.5 / 4, abs=0.1)


def test_a_wide_elementwise_op_fills_the_gpu_and_a_small_one_few_processors() -> None:
    model: LaunchModel = shipped_creq()[0]
    sizes = np.array([2.0**12, 2.0**26])
    ops = make_table("elementwise", 2, read_bytes=4 * sizes, written_bytes=4 * sizes, elements=sizes, width=4.0)
    predicted = model.predict(ops, V100, rates_of(V100, "float32"))
    assert predicted.sm_utilization_pct[0] < 10.0 < 99.0 < predicted.sm_utilization_pct[1]
    assert predicted.occupancy_pct[1] > 90.0


def test_a_regressor_that_is_not_the_one_that_was_trained_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = datasets() / "creq"
    folder = tmp_path / "creq"
    folder.mkdir()
    provenance = json.loads((source / "provenance.json").read_text(encoding="utf-8"))
    for name in provenance["sha256"]:
        (folder / name).write_bytes((source / name).read_bytes())
    (folder / "provenance.json").write_text(json.dumps(provenance), encoding="utf-8")
    (folder / "norm_warps.onnx").write_bytes(b"tree")
    monkeypatch.setattr(creq_module, "datasets", lambda: tmp_path)
    with pytest.raises(InputError, match=r"norm_warps\.onnx is not the file that was trained"):
        shipped_creq.__wrapped__()
