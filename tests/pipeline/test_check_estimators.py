"""Maps are checked against the estimator that they name, wherever it can be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpuprof
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.errors import InputError
from gpuprof.pipeline.problem import PlanningOptions

_OWN = """
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share


class Own:
    def __init__(self, db):
        pass

    def estimate(self, model, device, batch, share, beside=(), processes=1):
        time = Figure((2.0 + batch) / device.fraction(share) * processes, "own", 1.0, 90.0)
        memory = Figure(1e9, "own", 9e8, 2e9)
        return Estimate(Workload(model, batch, share, processes), device.name, time, memory_bytes=memory)

    def batches(self, model, device, share):
        return (1, 2, 4)

    def shares(self, model, device):
        return (Share(50.0), Share())
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    gpuprof.build_model("mlp", tmp_path / "mlp.onnx")
    return tmp_path


def _place(here: Path, estimator: str) -> DeploymentMap:
    demands = [gpuprof.Demand(str(here / "mlp.onnx"), rate_rps=100.0, slo=gpuprof.Slo(500.0))]
    return gpuprof.place(demands, fleet="v100", policy="ffd", options=PlanningOptions(estimator=estimator)).deployment


def _halve_memory(deployment: DeploymentMap) -> DeploymentMap:
    content = json.loads(deployment.to_json())
    predicted = content["nodes"][0]["gpus"][0]["partitions"][0]["replicas"][0]["predicted"]
    predicted["memory_bytes"] //= 2
    return DeploymentMap.model_validate(content)


def _change_time(deployment: DeploymentMap) -> DeploymentMap:
    content = json.loads(deployment.to_json())
    replica = content["nodes"][0]["gpus"][0]["partitions"][0]["replicas"][0]
    assert replica["batch"] > 1
    replica["batch_latency_ms"][0] *= 0.9
    return DeploymentMap.model_validate(content)


def test_the_memory_and_the_smaller_batches_of_a_map_from_files_alone_are_recomputed(here: Path) -> None:
    demands = [gpuprof.Demand(str(here / "mlp.onnx"), rate_rps=20_000.0, slo=gpuprof.Slo(20.0))]
    plan = gpuprof.place(demands, fleet="v100", policy="ffd").deployment
    assert gpuprof.check(plan).is_sound
    for change in (_halve_memory, _change_time):
        assert {violation.rule for violation in gpuprof.check(change(plan)).violations} == {"figures"}, change.__name__


def test_an_estimator_of_others_is_asked_again_and_where_it_is_gone_that_is_said(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "own_estimator.py").write_text(_OWN)
    with monkeypatch.context() as changed:
        changed.syspath_prepend(here)
        plan = _place(here, "own_estimator:Own")
        assert gpuprof.check(plan).is_sound
        assert not gpuprof.check(_halve_memory(plan)).is_sound
    settings = plan.planned_with.model_copy(update={"estimator": "gone_estimator:Own"})
    changed_map = _halve_memory(plan.model_copy(update={"planned_with": settings}))
    result = gpuprof.check(changed_map)
    assert result.is_sound
    assert any("the estimator 'gone_estimator:Own' is not installed here" in note for note in result.notes)
    assert any(
        note.startswith("the estimator 'gone_estimator:Own' cannot be asked here")
        and note.endswith("the times and the memory written in the map are believed")
        for note in result.notes
    )
    with pytest.raises(InputError, match="cannot import the estimator 'gone_estimator:Own'"):
        gpuprof.check(changed_map, estimator="gone_estimator:Own")


def test_an_estimator_that_is_named_is_asked_or_refused_where_neither_files_nor_a_database_are_there(
    here: Path,
) -> None:
    planned = _place(here, "database")
    (here / "mlp.onnx").unlink()
    for name, message in (
        ("measured", "there is no database"),
        ("json:loads", "cannot be made from a kernel database"),
    ):
        with pytest.raises(InputError, match=message):
            gpuprof.check(planned, estimator=name)
