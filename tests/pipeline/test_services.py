"""Two services of one model go through the whole pipeline: each with its own rate and SLO."""

import json
from pathlib import Path

import numpy as np
import pytest

import gpuprof
from gpuprof.domain.arrival_process import BatchPoissonArrivals
from gpuprof.domain.deployment import DeploymentMap, read_map, write_map
from gpuprof.domain.map_sources import summarize_map
from gpuprof.domain.sojourn import ShapedQueue, queue_of
from gpuprof.errors import InputError
from gpuprof.load.load import make_requests
from gpuprof.load.target import Target, requests_for
from gpuprof.pipeline import place
from gpuprof.pipeline.problem import build_problem
from gpuprof.placement.chains import divide_by_time
from gpuprof.placement.policies import make_policy
from gpuprof.serving.transport.datatypes import TensorSpec
from tests.estimators.rows import database, measured_row
from tests.small_models import write_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(gpuprof.build_model("mlp", tmp_path_factory.mktemp("services") / "mlp.onnx"))


def slo_file(folder: Path, *rows: str, header: str = "service,model,rate_rps,slo_ms,priority") -> Path:
    path = folder / "slo.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.mark.slow
def test_services_of_one_model_are_placed_checked_and_served_by_their_own_names(tmp_path: Path, model: Path) -> None:
    path = slo_file(tmp_path, f"search,{model},200,20,1", f"mail,{model},50,40,0", f",{model},10,60,0")
    plan = gpuprof.place(path, fleet="a100-40")
    models = plan.deployment.models
    assert {name: (service.rate_rps, service.slo_ms) for name, service in models.items()} == {
        "search": (200.0, 20.0),
        "mail": (50.0, 40.0),
        "mlp": (10.0, 60.0),
    }
    assert {name: service.source_model for name, service in models.items()} == {
        "search": "mlp",
        "mail": "mlp",
        "mlp": None,
    }
    assert len({service.sha256 for service in models.values()}) == 1
    assert not gpuprof.check(plan.deployment, against=path).violations
    with gpuprof.serve(plan.deployment, gpuprof.ServeSettings(port=0, simulate=True)) as server:
        traffic = gpuprof.LoadTraffic(duration_s=1.0, warmup_s=0.1)
        frame = gpuprof.load(server.url, server.map, traffic=traffic).to_frame()
    assert sorted(frame["model"]) == ["mail", "mlp", "search"]
    assert bool((frame["answered"] + frame["refused"] == frame["sent"]).all())  # a slow machine may refuse some
    assert bool((frame["answered"] > 0).all())


def test_a_model_that_is_given_two_files_is_one_line(tmp_path: Path, model: Path) -> None:
    copied = tmp_path / "other.onnx"
    copied.write_bytes(model.read_bytes())
    header = "service,model,file,rate_rps,slo_ms"
    path = slo_file(tmp_path, f"a,net,{model},200,20", f"b,net,{copied},50,40", header=header)
    with pytest.raises(InputError, match="the model 'net' is"):
        gpuprof.place(path, fleet="a100-40")
    path = slo_file(tmp_path, f"a,net,{model},200,20", f"b,net,{model},50,40", header=header)
    assert set(gpuprof.place(path, fleet="a100-40").deployment.models) == {"a", "b"}


@pytest.mark.slow
def test_a_distribution_of_sizes_goes_from_the_demand_to_the_requests(tmp_path: Path) -> None:
    text = write_text_model(tmp_path / "text.onnx")
    path = slo_file(tmp_path, f"{text},100,50,seq=16:0.75|64:0.25", header="model,rate_rps,slo_ms,dims")
    plan = gpuprof.place(path, fleet="a100-40")
    assert plan.deployment.models["text"].dims == "seq=16:0.75|seq=64:0.25"
    assert not any("assumed" in note for note in plan.notes)
    assert not gpuprof.check(plan.deployment, against=path).violations
    write_map(plan.deployment, tmp_path / "map.json")
    assert read_map(tmp_path / "map.json") == plan.deployment
    sent = requests_for(FakeTarget(), "text", str(text), 0, plan.deployment.models["text"].dims)
    lengths = [len(request) for request in sent]
    assert len(set(lengths)) == 2
    assert lengths.count(min(lengths)) == 3 * lengths.count(max(lengths))


@pytest.mark.slow
def test_a_size_for_all_demands_is_planned_with_and_one_that_nobody_gave_is_noted(tmp_path: Path) -> None:
    text = write_text_model(tmp_path / "text.onnx")
    demand = gpuprof.Demand(str(text), 100.0, gpuprof.Slo(50.0))
    assumed = gpuprof.place([demand], fleet="a100-40")
    assert "text: seq=128 assumed; another size: --dim seq=SIZE" in assumed.notes
    assert assumed.deployment.models["text"].dims == "seq=128"
    given_size = gpuprof.place([demand], fleet="a100-40", options=gpuprof.PlanningOptions(dims={"seq": 1024}))
    assert given_size.deployment.models["text"].dims == "seq=1024"
    latencies = [next(iter(plan.deployment.places()))[3].predicted.latency_ms for plan in (assumed, given_size)]
    assert latencies[1] > latencies[0]
    with pytest.raises(InputError, match="no model has a free dimension 'x'"):
        gpuprof.place([demand], fleet="a100-40", options=gpuprof.PlanningOptions(dims={"x": 1}))
    with pytest.raises(InputError, match="cannot read the sizes"):
        gpuprof.Demand("m", 1.0, gpuprof.Slo(1.0), dims="long")


class FakeTarget(Target):
    """A server that describes the text model."""

    def __init__(self) -> None:
        super().__init__("h", 1)

    def model_inputs(self, model: str) -> list[TensorSpec]:
        return [TensorSpec("ids", "INT64", (-1, -1))]


@pytest.mark.slow
def test_the_samples_of_a_file_are_sent_one_after_another_and_named_in_the_results(tmp_path: Path) -> None:
    text = write_text_model(tmp_path / "text.onnx")
    (tmp_path / "data.json").write_text('{"data": [{"ids": [1, 2, 3]}, {"ids": [4, 5]}]}')
    demand = gpuprof.Demand(str(text), 100.0, gpuprof.Slo(50.0), dims="seq=3")
    plan = gpuprof.place([demand], fleet="a100-40")
    traffic = gpuprof.LoadTraffic(duration_s=0.5, warmup_s=0.1, input_data={"text": tmp_path / "data.json"})
    with gpuprof.serve(plan.deployment, gpuprof.ServeSettings(port=0, simulate=True)) as server:
        result = gpuprof.load(server.url, server.map, traffic=traffic)
        sent = make_requests(Target.parse(server.url), *traffic.make_streams(server.map, tmp_path))
        (tmp_path / "data.json").write_text('{"data": [{"words": [1]}]}')
        with pytest.raises(InputError, match=r"data\.json: data\[0\] lacks the input 'ids'"):
            gpuprof.load(server.url, server.map, traffic=traffic)
    assert [
        np.frombuffer(request[-8 * length :], np.int64).tolist()
        for request, length in zip(sent[0], (3, 2), strict=True)
    ] == [[1, 2, 3], [4, 5]]
    (row,) = result.rows()
    frame = result.to_frame()
    assert bool((frame["answered"] + frame["refused"] == frame["sent"]).all() and (frame["answered"] > 0).all())
    assert str(row["input_data"]).startswith("data.json (2 samples, sha256 ")
    with pytest.raises(InputError, match="--dim cannot change that"):
        traffic.replace(dims={"seq": 4}).make_streams(plan.deployment, tmp_path)


SLO_MS = 40.0
SHORT = gpuprof.SimulatedTraffic(duration_s=5.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models and an slo.csv that asks for a chain of them."""
    folder = tmp_path_factory.mktemp("chains")
    for name in ("resnet50", "mlp"):
        gpuprof.build_model(name, folder / f"{name}.onnx")
    write_demands(
        folder, f"{folder}/resnet50.onnx > {folder}/mlp.onnx,100,{SLO_MS},vision", f"{folder}/mlp.onnx,50,20,"
    )
    return folder


def write_demands(folder: Path, *rows: str) -> Path:
    path = folder / "slo.csv"
    path.write_text("\n".join(("model,rate_rps,slo_ms,service", *rows)) + "\n")
    return path


@pytest.fixture(scope="module")
def plan(folder: Path) -> DeploymentMap:
    options = gpuprof.PlanningOptions(time_limit_s=5.0)
    return gpuprof.place(folder / "slo.csv", fleet="a100-40", options=options).deployment


def test_the_steps_of_a_chain_share_its_slo_and_its_late_requests(plan: DeploymentMap) -> None:
    assert plan.chains["vision"].steps == ("resnet50", "vision.mlp")
    first, second = (plan.models[step] for step in plan.chains["vision"].steps)
    assert first.slo_ms + second.slo_ms == pytest.approx(SLO_MS)
    assert first.slo_ms > second.slo_ms  # the slower model needs the larger part
    assert (first.percentile, second.percentile) == (99.5, 99.5)
    assert first.rate_rps == second.rate_rps == 100.0
    assert not plan.unplaced


@pytest.mark.parametrize("steps", [("resnet50", "absent"), ("resnet50", "resnet50")])
def test_a_map_whose_chain_has_a_wrong_step_is_refused(plan: DeploymentMap, steps: tuple[str, str]) -> None:
    content = json.loads(plan.to_json())
    content["chains"]["vision"]["steps"] = steps
    with pytest.raises(ValueError, match=r"not among|two steps"):
        DeploymentMap.model_validate(content)


def test_check_refuses_a_map_whose_steps_add_up_to_more_than_the_chain_may(plan: DeploymentMap, folder: Path) -> None:
    assert gpuprof.check(plan).is_sound
    chain = plan.chains["vision"].model_copy(update={"slo_ms": 0.9 * SLO_MS})
    (violation,) = gpuprof.check(plan.model_copy(update={"chains": {"vision": chain}})).violations
    assert (violation.rule, violation.where) == ("slo", "vision")
    stricter = gpuprof.Demand("vision", 100.0, gpuprof.Slo(0.9 * SLO_MS), source_model="resnet50>mlp")
    other = gpuprof.Demand("mlp", 50.0, gpuprof.Slo(20.0))
    assert [v.where for v in gpuprof.check(plan, against=[stricter, other]).violations] == ["vision"]
    assert gpuprof.check(
        plan, against=[gpuprof.Demand("vision", 100.0, gpuprof.Slo(SLO_MS), source_model="resnet50>mlp"), other]
    ).is_sound


def test_the_division_is_told_and_steps_are_named_apart(folder: Path, tmp_path: Path) -> None:
    mlp = folder / "mlp.onnx"
    path = write_demands(tmp_path, f"{mlp}>{mlp}>{mlp},10,60,", f"{mlp},10,20,")
    plan = gpuprof.place(path, fleet="a100-40", options=gpuprof.PlanningOptions(time_limit_s=5.0)).deployment
    steps = plan.chains["mlp>mlp>mlp"].steps
    assert steps == ("mlp-mlp-mlp.mlp", "mlp-mlp-mlp.mlp.2", "mlp-mlp-mlp.mlp.3")
    assert {plan.models[step].source_model for step in steps} == {"mlp"}
    assert "60 ms of mlp>mlp>mlp are " in summarize_map(plan)
    with pytest.raises(InputError, match="is a chain"):
        gpuprof.explain(plan, "mlp>mlp>mlp")


def test_the_slo_is_divided_by_capacities_and_else_in_proportion_to_times(folder: Path, tmp_path: Path) -> None:
    db = tmp_path / "db"
    database(
        db,
        [
            measured_row(name, 1, ms, device="v100", repeats=100, std_ms=0.1)
            for name, ms in (("resnet50", 40.0), ("mlp", 1.0))
        ],
    )
    chain = [gpuprof.Demand("resnet50>mlp", 0.05, gpuprof.Slo(60.0))]
    problem = build_problem(chain, "v100", db, gpuprof.PlanningOptions(estimator="measured"))
    slow, fast = divide_by_time(problem).demands
    assert slow.slo.latency_ms == pytest.approx(60.0 * 40.0 / 41.0)
    assert slow.slo.latency_ms + fast.slo.latency_ms == pytest.approx(60.0)
    slow, fast = problem.demands  # 40 ms do not fit into an equal part
    assert slow.slo.latency_ms > 40.0 and fast.slo.latency_ms > 1.0


def test_a_later_step_is_planned_for_the_groups_in_which_batches_end(folder: Path) -> None:
    chain = [gpuprof.Demand(f"{folder}/resnet50.onnx>{folder}/mlp.onnx", 3000.0, gpuprof.Slo(12.0))]
    options = gpuprof.PlanningOptions(time_limit_s=5.0, confidence=0.0)
    plan = gpuprof.place(chain, fleet="a100-40", options=options)
    assert plan.is_complete
    (verdict,) = gpuprof.simulate(plan.deployment, gpuprof.SimulatedTraffic(duration_s=5.0)).verdicts()
    assert verdict.kept


@pytest.mark.parametrize("misses_again", [False, True])
def test_a_chain_that_misses_in_a_simulation_is_planned_again_and_named_if_it_still_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, misses_again: bool
) -> None:
    answers = iter([["c misses"], ["c misses again"] if misses_again else []])
    monkeypatch.setattr(place, "_simulate_misses", lambda deployment: next(answers))
    demand = gpuprof.Demand("c", 300.0, gpuprof.Slo(40.0), source_model=f"{folder}/resnet50.onnx>{folder}/mlp.onnx")
    problem = build_problem([demand], "a100-40", None, gpuprof.PlanningOptions())
    notes: list[str] = []
    solved, plan = place.plan_chains(problem, make_policy("ffd"), notes.append)
    queue = queue_of(solved.queueing, "mlp")
    assert isinstance(queue, ShapedQueue) and isinstance(queue.shape, BatchPoissonArrivals)
    assert queue.shape.size > 1
    assert queue_of(solved.queueing, "resnet50") is problem.queueing
    assert notes == ["c misses again"] * misses_again and plan.chains.keys() == {"c"}


def test_a_chain_of_file_and_dims_and_of_empty_steps_is_refused(folder: Path, tmp_path: Path) -> None:
    for text in (f"{folder}/mlp.onnx>,1,20,", f">{folder}/mlp.onnx,1,20,"):
        with pytest.raises(InputError, match="must be MODEL>MODEL"):
            gpuprof.place(write_demands(tmp_path, text), fleet="a100-40")


def test_a_chain_is_simulated_from_its_first_arrival_to_its_last_answer(plan: DeploymentMap) -> None:
    result = gpuprof.simulate(plan, gpuprof.SimulatedTraffic(duration_s=20.0))
    assert [verdict.model for verdict in result.verdicts()] == ["mlp", "vision"]
    first, second, _ = result.outcome.models
    (chain,) = result.outcome.chains
    assert chain.requests == chain.answered == first.answered
    assert abs(second.requests - first.requests) <= 2  # requests in the first step when the warm-up ends
    assert chain.mean_ms == pytest.approx((first.mean_ms or 0.0) + (second.mean_ms or 0.0), rel=1e-3)
    most_ms = 1.01 * ((first.p99_ms or 0.0) + (second.p99_ms or 0.0))  # percentiles do not add up exactly
    assert (first.p99_ms or 0.0) < (chain.p99_ms or 0.0) <= most_ms
    assert result.outcome.requests == chain.requests + result.outcome.models[2].requests


def test_the_verdict_on_a_chain_is_on_its_own_slo_and_counts_requests_lost_in_any_step(plan: DeploymentMap) -> None:
    tight = plan.chains["vision"].model_copy(update={"slo_ms": 0.01})
    result = gpuprof.simulate(plan.model_copy(update={"chains": {"vision": tight}}), SHORT)
    assert {verdict.model: verdict.verdict for verdict in result.verdicts()} == {"mlp": "kept", "vision": "missed"}
    failing = gpuprof.simulate(plan, SHORT, service=gpuprof.ServiceSettings(failures=("node0@2s",)))
    (chain,) = failing.outcome.chains
    assert chain.missed["failed"] > 0
    assert chain.answered + chain.missed["failed"] + chain.missed["refused"] == chain.requests


def test_the_rate_of_a_chain_is_given_by_its_name(plan: DeploymentMap) -> None:
    result = gpuprof.simulate(plan, gpuprof.SimulatedTraffic(duration_s=20.0, rates_rps={"vision": 20.0}))
    assert result.outcome.chains[0].rate_rps == pytest.approx(20.0, rel=0.3)
    with pytest.raises(InputError, match=r"vision\.mlp"):
        gpuprof.simulate(plan, gpuprof.SimulatedTraffic(rates_rps={"vision.mlp": 20.0}))


def test_load_judges_a_served_chain_by_its_own_slo_beside_its_prediction(plan: DeploymentMap, folder: Path) -> None:
    with gpuprof.serve(plan, gpuprof.ServeSettings(port=0, simulate=True)) as server:
        traffic = gpuprof.LoadTraffic(duration_s=2.0, warmup_s=0.2, rate_scale=0.3)
        result = gpuprof.load(server.url, server.map, traffic=traffic)
    chain = next(row for row in result.rows() if row["model"] == "vision")
    assert [row["model"] for row in result.rows()] == ["mlp", "vision"]
    answered, refused, sent = (int(str(chain[name])) for name in ("answered", "refused", "sent"))
    assert answered + refused == sent == pytest.approx(60, abs=25)  # a busy machine refuses
    assert answered > 0
    assert chain["predicted_p50_ms"] is not None
    assert chain["slo_ms"] == SLO_MS
