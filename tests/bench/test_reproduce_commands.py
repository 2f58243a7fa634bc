"""The commands that give the papers' figures from imported data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.reproduce.__main__ import ReproductionStep, list_steps, read_figure
from gpuprof.domain.demand import read_demands
from gpuprof.errors import InputError
from gpuprof.placement.contract import demand, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.policies import make_policy
from tests.bench.published import write_parvagpu


def test_where_a_publication_is_missing_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="parvagpu_a100 is not there"):
        list(list_steps(tmp_path, tmp_path))


def test_a_command_can_be_typed_as_it_is_printed() -> None:
    assert (
        ReproductionStep(("place", "--slo-file", "my demands.csv")).command
        == "gpuprof place --slo-file 'my demands.csv'"
    )


def test_the_figures_of_a_map_are_read_off_it(tmp_path: Path) -> None:
    given = problem([demand("a", 30.0), demand("b", 10.0)])
    deployment = to_map(given, make_policy("ffd").place(given))
    path = tmp_path / "map.json"
    path.write_text(deployment.to_json())
    assert read_figure(ReproductionStep((), figure="gpus", output=path)) == str(deployment.predicted.gpus)
    assert read_figure(ReproductionStep((), figure="goodput", output=path)) == f"{deployment.predicted.goodput_rps:.2f}"
    shares = {replica.model: replica.sm_share_pct for *_, replica in deployment.places()}
    assert json.loads(read_figure(ReproductionStep((), figure="shares", output=path))) == shares


@pytest.mark.parametrize(
    ("limit", "found", "agrees"),
    [("", "3", True), ("", "2", False), ("at most", "2", True), ("at most", "4", False), ("at least", "2", False)],
)
def test_a_figure_is_what_is_printed_or_on_the_right_side_of_it(limit: str, found: str, agrees: bool) -> None:
    assert ReproductionStep((), "3", "gpus", limit=limit).agrees(found) is agrees


def test_tenants_and_workloads_are_services_of_their_models(tmp_path: Path) -> None:
    reference = write_parvagpu(tmp_path / "reference")
    for name, line in (("req_rate", "700,120"), ("latency", "1000,1000")):  # a line for each scenario
        (reference / "parvagpu_a100" / f"SLO_{name}.csv").write_text("\n".join([line] * 6) + "\n")
    (reference / "igniter_v100").mkdir()
    (reference / "igniter_v100" / "config.jsonl").write_text("{}")
    work = tmp_path / "work"
    work.mkdir()
    steps = {step.output.stem: step for step in list_steps(reference, work) if step.output is not None}
    tenants = read_demands(work / "S1x10.csv")
    assert [(one.model, one.source_model) for one in tenants[:3]] == [("a-1", "a"), ("b-1", "b"), ("a-2", "a")]
    assert len(tenants) == 20
    assert (steps["S1x10-parvagpu"].expected, steps["S1x10-parvagpu"].limit) == ("20", "at most")
    twelve = {one.model: one.source_model for one in read_demands(work / "twelve.csv")}
    assert (len(twelve), twelve["W4"], steps["twelve"].expected) == (12, "resnet50", "6")
    assert (steps["thesis1-milp"].expected, steps["thesis3-optimal"].limit) == ("1092.04", "at least")
    assert (steps["fig6.15-optimal"].expected, steps["fig6.15-optimal"].limit) == ("3995.00", "at least")
    assert "--latency-budget" not in steps["fig6.15-optimal"].arguments
    assert [one.rate_rps for one in read_demands(work / "fig6.15.csv")] == [800.0] * 5
