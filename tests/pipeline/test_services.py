"""Two services of one model go through the whole pipeline: each with its own rate and SLO."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gpuprof
from gpuprof.domain.deployment import read_map, write_map
from gpuprof.errors import InputError
from gpuprof.load.load import make_requests
from gpuprof.load.target import Target, requests_for
from gpuprof.serving.transport.datatypes import TensorSpec
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
