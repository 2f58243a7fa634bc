"""Estimators and policies of others, as objects and by name: their own models, and what policies plan with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import gpuprof
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.placement.policies import Policy
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.usher import Usher


class OwnEstimator:
    """Times of any model, by a factor that only an object can have."""

    premise = "ours: neighbours cost nothing"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        latency_ms = self.factor * (1.0 + batch) / device.fraction(share)
        return Estimate(Workload(model, batch, share, processes), device.name, Figure(latency_ms, "assumed"))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return (1, 2, 4)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return (Share(25.0), Share(50.0), Share())


DEMANDS = [gpuprof.Demand(name, 50.0, gpuprof.Slo(60.0)) for name in ("theirs", "another")]


def test_an_estimator_object_answers_for_models_that_no_database_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    estimator = OwnEstimator(2.0)
    options = gpuprof.PlanningOptions(estimator=estimator)
    plan = gpuprof.place(DEMANDS, fleet="a100-80", options=options)
    assert plan.is_complete
    assert plan.deployment.planned_with.estimator == f"{__name__}:OwnEstimator"
    assert plan.deployment.planned_with.premise == OwnEstimator.premise
    row = plan.rows()[0]
    share, batch, latency_ms = (row[key] for key in ("share_pct", "batch", "latency_ms"))
    assert isinstance(share, float) and isinstance(batch, int)
    assert latency_ms == pytest.approx(2.0 * (1.0 + batch) * 100.0 / share)
    assert gpuprof.check(plan.deployment, estimator=estimator).is_sound
    assert not gpuprof.check(plan.deployment, estimator=OwnEstimator(20.0)).is_sound
    assert gpuprof.explain(plan.deployment, "theirs", estimator=estimator).rows()
    slower = gpuprof.simulate(plan.deployment, estimator=OwnEstimator(4.0)).outcome.models[0]
    assert (slower.mean_ms or 0.0) > (gpuprof.simulate(plan.deployment).outcome.models[0].mean_ms or 0.0)


def test_policy_objects_stand_in_a_comparison_with_their_options() -> None:
    options = gpuprof.PlanningOptions(estimator=OwnEstimator(1.0))
    policies: list[str | Policy] = ["ffd", FirstFitDecreasing(), Usher(creq="wao")]
    rows = gpuprof.compare(DEMANDS, fleet="a100-80", policies=policies, options=options).rows()
    names = [str(row["policy"]) for row in rows]
    assert names[1].endswith("ffd:FirstFitDecreasing") and names[2].endswith("+creq=wao")
    assert rows[0]["gpus"] == rows[1]["gpus"] == 1


def test_batches_that_an_estimator_does_not_list_are_named(tmp_path: Path) -> None:
    demand = gpuprof.Demand(str(gpuprof.build_model("mlp", tmp_path / "mlp.onnx")), 50.0, gpuprof.Slo(60.0))
    options = gpuprof.PlanningOptions(estimator=OwnEstimator(1.0), max_batch=64)
    notes = gpuprof.place([demand], fleet="a100-80", options=options).notes
    assert "batches are those that the estimator lists: mlp up to 4 instead of 64" in notes


def test_a_map_makes_nobody_import_a_module_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside_map.py").write_text("from pathlib import Path\nPath('was-run').touch()\n")
    plan = gpuprof.place(DEMANDS, fleet="a100-80", options=gpuprof.PlanningOptions(estimator=OwnEstimator(1.0)))
    planned_with = plan.deployment.planned_with.model_copy(update={"estimator": "beside_map:Estimator"})
    gpuprof.write_map(plan.deployment.model_copy(update={"planned_with": planned_with}), tmp_path / "map.json")
    start = "from gpuprof.cli.main import console_script; console_script()"
    for command, code in ((["check", "map.json"], 0), (["explain", "map.json", "theirs"], 3)):
        ended = subprocess.run(
            [sys.executable, "-P", "-c", start, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode == code
        assert "'beside_map:Estimator'" in ended.stderr
        assert not (tmp_path / "was-run").exists()
