"""USHER and the thesis's program on files that nobody profiled: they place them, and say what that rests on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpuprof
from gpuprof.cli.output import Format
from gpuprof.cli.place import print_map
from gpuprof.domain.estimate import MEASURED, Figure
from gpuprof.pipeline.problem import PlanningOptions


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("unprofiled")
    return [gpuprof.build_model(name, folder / f"{name}.onnx") for name in ("random_cnn", "mlp")]


@pytest.mark.parametrize("policy", ["usher", "milp"])
def test_a_policy_by_requirements_places_files_that_nobody_profiled(policy: str, files: list[Path]) -> None:
    demands = [gpuprof.Demand(str(file), rate_rps=50.0, slo=gpuprof.Slo(200.0)) for file in files]
    plan = gpuprof.place(demands, fleet="v100:2", policy=policy, options=PlanningOptions(latency_budget=0.5))
    assert plan.is_complete
    for row in plan.rows():
        assert row["creq_metric"] == "max_occupancy"
        low, value, high = (float(str(row[f"creq_{name}"])) for name in ("low_pct", "pct", "high_pct"))
        assert 0.0 <= low <= value <= high <= 100.0
        assert float(str(row["share_pct"])) == pytest.approx(2.5 * round(float(str(row["share_pct"])) / 2.5))
        assert float(str(row["share_pct"])) >= value - 1e-6
        least, needed, most = (float(str(row[f"mreq_{name}"])) for name in ("low_bytes", "bytes", "high_bytes"))
        assert 0.0 < least <= needed <= most
    for *_, replica in plan.deployment.places():
        assert replica.predicted.mreq is not None and replica.predicted.mreq.interval_bytes is not None
        # a guess is planned at its upper end, and is no limit that a process could be ended by
        assert replica.predicted.memory_bytes == pytest.approx(replica.predicted.mreq.interval_bytes[1], abs=2.0)
        assert replica.memory_limit_bytes is None


def test_the_json_says_the_interval(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    demands = [gpuprof.Demand(str(files[1]), rate_rps=50.0, slo=gpuprof.Slo(200.0))]
    options = PlanningOptions(latency_budget=0.5)
    plan = gpuprof.place(demands, fleet="v100:1", policy="usher", options=options)
    print_map(plan, Format.JSON)
    assert json.loads(capsys.readouterr().out)["replicas"][0]["creq_high_pct"] <= 100.0
    (*_, replica) = next(plan.deployment.places())
    assert replica.predicted.creq is not None and replica.predicted.creq.source.startswith("creq from launches")


def test_a_profiled_requirement_above_a_hundred_counts_as_the_whole_device() -> None:
    from gpuprof.placement.published.requirement import _required_pct

    assert _required_pct(Figure(130.0, MEASURED)) == 100.0
    assert _required_pct(Figure(41.3, MEASURED)) == 41.3
    assert _required_pct(Figure(41.3, "creq from launches: float32, eager")) == 42.5
