"""`place`, `compare`, `check`, `explain` and `export` as functions: paths or objects in, results out."""

from itertools import product
from pathlib import Path

import pytest

import gpuprof
from gpuprof.domain.demand import Demand, Slo, read_demands
from gpuprof.domain.deployment import DeploymentMap, PlannedDevices
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.errors import InfeasibleError, InputError
from gpuprof.pipeline.arguments import DemandsArgument, FleetArgument
from gpuprof.pipeline.problem import PlanningOptions
from gpuprof.placement.published.ffd import FirstFitDecreasing
from tests.command_line import CommandLine
from tests.estimators.rows import database, measured_row
from tests.profiling.models import write_mlp

DEMANDS = (Demand("a", 40.0, Slo(80.0)), Demand("b", 20.0, Slo(60.0)))

#: Queues of small batches are solved quickly.
SMALL = PlanningOptions(max_batch=2)


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    rows = [
        measured_row(
            model, batch, (4.0 + 2.0 * batch) * 100.0 / share, device="v100", share=share, repeats=100, std_ms=0.1,
            memory=2**28,
        )
        for model in ("a", "b")
        for batch in (1, 2, 4)
        for share in (25.0, 50.0, 100.0)
    ]  # fmt: skip
    database(here / "gpuprof-db", rows)
    (here / "slo.csv").write_text("model,rate_rps,slo_ms\na,40,80\nb,20,60\n")
    return here


def test_demands_and_fleet_may_be_files_text_or_objects(here: Path) -> None:
    (here / "fleet.toml").write_text('[[gpus]]\ndevice = "v100"\ncount = 2\n')
    device = gpuprof.place(DEMANDS, fleet="v100", policy="ffd", options=SMALL).problem.fleet.entries[0].device
    fleets: list[FleetArgument] = ["v100:2", here / "fleet.toml", "fleet.toml", Fleet((FleetEntry(device, 2),))]
    given: tuple[DemandsArgument, ...] = (DEMANDS, "slo.csv")
    maps = [
        gpuprof.place(demands, fleet=fleet, policy="ffd", options=SMALL).deployment
        for demands in given
        for fleet in fleets
    ]
    assert read_demands(here / "slo.csv") == DEMANDS
    assert all(plan.nodes == maps[0].nodes and plan.predicted == maps[0].predicted for plan in maps)
    assert all(plan.planned_with.fleet == (PlannedDevices(device="v100", count=2),) for plan in maps)
    assert [plan.planned_with.slo_sha256 is None for plan in maps] == [True] * 4 + [False] * 4


def test_place_gives_what_the_command_prints_and_prints_nothing(cli: CommandLine) -> None:
    result = gpuprof.place("slo.csv", fleet="v100:2", options=SMALL)
    assert cli.capsys.readouterr() == ("", "")
    assert cli.json("place --gpus v100:2 --max-batch 2")["replicas"] == result.rows()
    assert gpuprof.read_map(Path("map.json")) == result.deployment
    assert list(result.to_frame()["model"]) == ["a", "b"]
    assert "node0" in result._repr_html_()


def test_a_policy_may_be_an_object_and_a_map_the_one_before() -> None:
    first = gpuprof.place(DEMANDS, fleet="v100:2", policy=FirstFitDecreasing(), options=SMALL)
    second = gpuprof.place(DEMANDS, fleet="v100:2", policy="ffd", options=SMALL, previous=first.deployment)
    assert second.deployment.policy == first.deployment.policy
    assert second.deployment.predicted.moves == 0


def test_the_settings_of_a_plan_are_checked_with() -> None:
    options = PlanningOptions(confidence=0.9, max_batch=2, isolate=True)
    deployment = gpuprof.place(DEMANDS, fleet="v100:2", policy="ffd", options=options).deployment
    settings = deployment.planned_with
    assert (settings.confidence, settings.max_batch, settings.isolate) == (0.9, 2, True)
    with pytest.raises(InputError, match="max batch must be at least 1 but got 0"):
        gpuprof.place(DEMANDS, fleet="v100:2", options=PlanningOptions(max_batch=0))


def test_a_plan_divides_gpus_only_by_what_they_have(here: Path) -> None:
    files = [write_mlp(here / f"mlp{width}.onnx", width) for width in (256, 512)]
    demands = [Demand(str(file), 20.0, Slo(50.0)) for file in files]

    def place(no_mig: bool, no_mps: bool) -> DeploymentMap:
        options = PlanningOptions(no_mig=no_mig, no_mps=no_mps)
        return gpuprof.place(demands, fleet="a100-40", options=options).deployment

    for no_mig, no_mps in product((False, True), repeat=2):
        deployment = place(no_mig, no_mps)
        places = list(deployment.places())
        assert not (no_mig and any(partition.mig for *_, partition, _ in places))
        assert not (no_mps and any(replica.sm_share_pct < 100.0 or replica.processes > 1 for *_, replica in places))
        assert len(deployment.nodes[0].gpus) == 1 and gpuprof.check(deployment).is_sound
    assert {replica.turns for *_, replica in deployment.places()} == {1}  # undivided, they share the GPU by turns
    parts = place(True, False)
    assert all(replica.sm_share_pct < 100.0 for *_, replica in parts.places())
    settings = parts.planned_with.model_copy(update={"no_mps": True})
    assert not gpuprof.check(parts.model_copy(update={"planned_with": settings})).is_sound


def test_check_finds_what_a_map_breaks_and_takes_other_demands() -> None:
    deployment = gpuprof.place(DEMANDS, fleet="v100:2", options=SMALL).deployment
    sound = gpuprof.check(deployment.model_copy(update={"policy": "largest-first"}))
    sound.raise_if_broken()
    assert sound.is_sound and not sound.notes
    assert gpuprof.explain(sound.deployment, "a").planner == "optimal"  # the map's policy is not installed
    strict = gpuprof.check(deployment, against=[Demand("a", 40.0, Slo(1.0)), DEMANDS[1]])
    assert [row["rule"] for row in strict.rows()] == ["slo"]
    with pytest.raises(InfeasibleError, match="the map breaks 1 rule"):
        strict.raise_if_broken()


def test_without_a_database_the_maps_times_are_believed_and_noted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpuprof.place(DEMANDS, fleet="v100:2", options=SMALL).write(here / "map.json")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    (note,) = gpuprof.check("../map.json").notes
    assert note == (
        "the estimator 'database' cannot be asked here: what it stands on, or the estimator itself, is missing; "
        "the times and the memory written in the map are believed"
    )


def test_explain_takes_the_only_model_of_a_map_unasked() -> None:
    deployment = gpuprof.place(DEMANDS[:1], fleet="v100:2", options=SMALL).deployment
    steps: list[gpuprof.Progress] = []
    why = gpuprof.explain(deployment, progress=steps.append)
    assert [(step.done, step.total) for step in steps] == [(number, 3) for number in (1, 2, 3)]
    assert why.model == "a"
    assert sum(bool(row["chosen"]) for row in why.rows()) == 1
    assert [row["beside"] for row in why.place_rows()] == ["nobody"]
    assert len(why.what_if_rows()) == len(why.what_ifs) > 0
    two = gpuprof.place(DEMANDS, fleet="v100:2", options=SMALL).deployment
    with pytest.raises(InputError, match=r"the map has several models \(name one: a, b\)"):
        gpuprof.explain(two)


def test_export_refuses_the_file_of_another_model(here: Path) -> None:
    """Whoever runs what was exported has no map to compare its files with."""
    file = gpuprof.build_model("mlp", here / "net.onnx")
    plan = gpuprof.place(
        [Demand(str(file), rate_rps=20.0, slo=Slo(50.0))], fleet="a100-40", policy="ffd", options=SMALL
    )
    assert gpuprof.export(plan.deployment, "triton").models
    gpuprof.build_model("squeezenet", file)
    with pytest.raises(InputError, match="is not the file that the map was planned with"):
        gpuprof.export(plan.deployment, "triton")
    assert gpuprof.export(plan.deployment, "triton", allow_changed=True).models
