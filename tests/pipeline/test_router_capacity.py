from __future__ import annotations

from pathlib import Path

import pytest

import gpuprof
from gpuprof.domain.deployment import DeploymentMap, PlannedWith, RecordedHostWork
from gpuprof.pipeline.place import describe_routers
from gpuprof.placement.contract import demand, plain_device, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.published.ffd import FirstFitDecreasing


def make_map(rate_rps: float) -> DeploymentMap:
    given = problem([demand("a", rate_rps)], [(plain_device(), None)])
    return to_map(given, FirstFitDecreasing().place(given))


@pytest.mark.parametrize(("rate_rps", "routers"), [(2400.0, None), (2401.0, "2 routers"), (27_500.0, "12 routers")])
def test_a_plan_says_how_many_routers_its_requests_need(rate_rps: float, routers: str | None) -> None:
    text = describe_routers(make_map(rate_rps))
    assert text is None if routers is None else text is not None and routers in text and "assumed" in text


def test_what_profile_measured_comes_before_the_assumption() -> None:
    measured = PlannedWith(host=RecordedHostWork(host_ms=0.5, host_ms_busy=0.25, host_cores=2))
    deployment = make_map(4001.0).model_copy(update={"planned_with": measured})
    text = describe_routers(deployment)
    assert text is not None and "2 routers: one carries about 4,000 (as profile measured)" in text


def test_place_and_check_say_so(tmp_path: Path) -> None:
    file = gpuprof.build_model("mlp", tmp_path / "mlp.onnx")
    plan = gpuprof.place([gpuprof.Demand(str(file), rate_rps=27_500.0, slo=gpuprof.Slo(20.0))], fleet="a100-40")
    for notes in (plan.notes, gpuprof.check(plan.deployment).notes):
        assert any("27,500 requests/s need 12 routers" in note for note in notes)
