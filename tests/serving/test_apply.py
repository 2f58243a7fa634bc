"""Moving a running server to another map."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from onnx import helper

from gpuprof.cli.main import main
from gpuprof.domain.deployment import PublicName
from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.report import ModelResult
from gpuprof.load.target import Target
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, has_ended, map_of, replica, running, send_until
from tests.serving.test_models import lookup
from tests.serving.test_reliability import Askers
from tests.small_models import write_model

pytestmark = serves_in_real_time


def apply(server: RunningServer, path: Path, document: dict[str, Any]) -> int:
    path.write_text(json.dumps(document))
    return main(["apply", str(path), "--port", str(server.port), "--json"])


def test_only_changes_are_touched_and_no_request_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = {"m": "null:4", "gone": "null:4"}
    before = map_of(
        models, [replica("m"), replica("m", max_wait_ms=1.0, sm_share_pct=25.0), replica("gone", sm_share_pct=25.0)]
    )
    after = map_of(
        {"m": "null:4", "new": "null:8"}, [replica("m"), replica("m", batch=4), replica("new", sm_share_pct=25.0)]
    )
    before["nodes"][0]["gpus"][0]["device"] = after["nodes"][0]["gpus"][0]["device"] = "sim:gpu"
    with running(tmp_path, before) as server:
        with Askers(server, "m", 4, [0.0]) as askers:
            time.sleep(0.2)
            assert apply(server, tmp_path / "after.json", after) == 0
            time.sleep(0.2)
        assert askers.lost == askers.wrong == []
        assert set(askers.statuses) == {200}
        changes = {row["replica"]: row["change"] for row in json.loads(capsys.readouterr().out)}
        assert changes == {"m/0": "kept", "m/1": "stopped", "gone/0": "stopped", "m/2": "started", "new/0": "started"}
        assert server.infer("gone", [1.0])[0] == 404
        assert server.infer("new", [1.0, 2.0])[0] == 200
        assert server.get("/v2/models/m/config")[1]["max_batch_size"] == 4
        four = {"name": "INPUT0", "datatype": "FP32", "shape": [4, 1], "data": [1.0, 2.0, 3.0, 4.0]}
        body = json.dumps({"inputs": [four]}).encode()
        for _ in range(4):  # only one of the two replicas holds so many rows
            assert server.get("/v2/models/m/infer", "POST", body)[1]["outputs"][0]["shape"] == [4, 1]


def test_real_workers_change_places_without_a_gap(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        old = server.workers()[0]
        with Askers(server, "m", 4) as askers:
            time.sleep(0.2)
            assert apply(server, tmp_path / "after.json", map_of({"m": "null:4"}, [replica("m", batch=2)])) == 0
            time.sleep(0.2)
        assert askers.lost == askers.wrong == []
        assert set(askers.statuses) == {200}
        assert eventually(lambda: has_ended(old))
        assert len(server.workers()) == 1


def test_a_map_that_cannot_be_served_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        old = server.workers()[0].pid
        (tmp_path / "bad.onnx").write_bytes(b"rubbish")
        assert apply(server, tmp_path / "after.json", map_of({"bad": "bad.onnx"}, [replica("bad")])) == 3
        assert "is not an ONNX model" in capfd.readouterr().err
        assert [worker.pid for worker in server.workers()] == [old]
        assert server.infer("m", [1.0])[0] == 200
        assert server.infer("bad", [1.0])[0] == 404


def test_an_unfit_model_stays_as_it_is_and_others_move(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def changes() -> dict[str, str]:
        return {row["replica"]: row["change"] for row in json.loads(capfd.readouterr().out)}

    good = write_model(
        tmp_path / "good.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": ["n", 1]}, {"y": ["n", 1]}
    )
    models = {"m": "null:4", "old": str(good), "new": str(tmp_path / "new.onnx")}
    with running(tmp_path, map_of({"m": "null:4", "old": str(good)}, [replica("m"), replica("old")])) as server:
        rubbish = tmp_path / "new.onnx"
        rubbish.write_bytes(b"rubbish")
        models["old"] = models["new"]
        replicas = [replica("m", batch=2, sm_share_pct=25.0), replica("old"), replica("new", sm_share_pct=25.0)]
        assert apply(server, tmp_path / "after.json", map_of(models, replicas)) == 0
        assert changes() == {"m/1": "started", "m/0": "stopped", "old/0": "kept", "old/1": "failed", "new/0": "failed"}
        assert [server.get(f"/v2/models/{name}/ready")[0] for name in models] == [200, 200, 503]
        rubbish.write_bytes(good.read_bytes())
        assert apply(server, tmp_path / "after.json", map_of(models, replicas)) == 0
        assert changes() == {"m/1": "kept", "old/1": "started", "new/0": "started", "old/0": "stopped"}
        assert [server.get(f"/v2/models/{name}/ready")[0] for name in models] == [200, 200, 200]


@pytest.mark.parametrize(
    ("model", "path", "name", "version"),
    [
        ("m", None, "m", "1"),
        ("m@3", None, "m", "3"),
        ("m@x", None, "m@x", "1"),
        ("@3", None, "@3", "1"),
        ("m@03", None, "m@03", "1"),
        ("a@b@12", None, "a@b", "12"),
        ("m", "/repository/m/7/model.onnx", "m", "7"),
        ("m@2", "/repository/m/7/model.onnx", "m", "2"),
        ("m", "/repository/other/7/model.onnx", "m", "1"),
        ("m", "m/007/model.onnx", "m", "1"),
        ("m", "null:4", "m", "1"),
    ],
)
def test_the_version_is_in_the_name_or_in_the_folder(model: str, path: str | None, name: str, version: str) -> None:
    assert PublicName.of(model, path) == PublicName(name, version)


def test_versions_are_served_side_by_side_and_the_newest_by_default(tmp_path: Path) -> None:
    (tmp_path / "doubled" / "10").mkdir(parents=True)
    lookup(tmp_path / "doubled" / "10" / "model.onnx")
    document = map_of(
        {"m@2": "null:4", "m@10": "null:8", "doubled": "doubled/10/model.onnx"},
        [replica("m@2", sm_share_pct=25.0), replica("m@10", sm_share_pct=25.0), replica("doubled")],
    )
    with running(tmp_path, document) as server:
        client = triton.InferenceServerClient(server.address)
        assert client.get_model_metadata("m")["versions"] == ["2", "10"]
        assert client.get_model_metadata("m", "2")["inputs"][0]["shape"] == [-1, 1]
        assert client.get_model_metadata("m")["inputs"][0]["shape"] == [-1, 2]
        tensor = triton.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
        answer = client.infer("m", [tensor], model_version="2").get_response()
        assert (answer["model_name"], answer["model_version"]) == ("m", "2")
        index = {(entry["name"], entry["version"]) for entry in client.get_model_repository_index()}
        assert index == {("m", "2"), ("m", "10"), ("doubled", "10")}
        assert client.get_inference_statistics("m", "2")["model_stats"][0]["inference_count"] == 1
        assert client.is_model_ready("m", "2") and not client.is_model_ready("m", "3")
        assert "it has 2, 10" in server.get("/v2/models/m/versions/3")[1]["error"]
        client.close()
        settings = LoadSettings(0.3, 0.0, clients=1)
        (result,) = run_load(Target.parse(server.url), [RequestStream("m@2", 30.0, 60_000.0)], settings).results
        assert result.answered == result.sent > 0
        after = map_of({"m@2": "null:4", "m@11": "null:8"}, [replica("m@2", sm_share_pct=25.0), replica("m@11")])
        (tmp_path / "after.json").write_text(json.dumps(after))
        assert main(["apply", str(tmp_path / "after.json"), "--port", str(server.port)]) == 0
        assert server.get("/v2/models/m")[1]["versions"] == ["2", "11"]
        assert server.get("/v2/models/m/versions/10")[0] == 404


def test_two_models_cannot_be_one_version(tmp_path: Path) -> None:
    document = map_of({"m": "null:4", "m@1": "null:4"}, [replica("m"), replica("m@1")])
    with pytest.raises(AssertionError, match="'m@1' and 'm' are both version 1 of 'm'"), running(tmp_path, document):
        pass


def test_a_map_of_200_replicas_starts_serves_and_drains(tmp_path: Path) -> None:
    models = {f"m{number}": "nowhere.onnx" for number in range(10)}
    replicas = [
        replica(f"m{number % 10}", batch=4, processes=2, latency_ms=8.0, sm_share_pct=0.5, max_wait_ms=2.0)
        for number in range(200)
    ]
    document = map_of(models, replicas, slo_ms=500.0)
    document["nodes"][0]["gpus"][0]["device"] = "sim:a100-80"
    with running(tmp_path, document) as server:
        assert "serving 10 models with 400 workers" in server.line
        streams = [RequestStream(name, 20.0, 500.0) for name in models]
        outcome = run_load(Target.parse(server.url), streams, LoadSettings(duration_s=1.0, warmup_s=0.2, clients=1))
        assert all(result.answered == result.sent > 0 for result in outcome.results)
        assert all((result.p50_ms or 0.0) >= 4.0 for result in outcome.results)
        code, errors = server.stop()
        assert (code, errors) == (0, "drained\n")


def test_a_map_for_many_machines_is_simulated_whole(tmp_path: Path) -> None:
    document = map_of({"m": "nowhere.onnx"}, [replica("m", latency_ms=2.0)])
    document["nodes"] = [{**document["nodes"][0], "name": f"node{number}"} for number in range(3)]
    document["nodes"][1]["gpus"][0]["device"] = "h100"
    with running(tmp_path, document, "--simulate") as server:
        assert "3 workers" in server.line
        assert server.infer("m", [5.0])[1]["outputs"][0]["data"] == [0.0]


@pytest.mark.slow
def test_at_three_times_its_capacity_a_server_still_does_what_it_can_within_the_slo(tmp_path: Path) -> None:
    latency_ms, slo_ms = 50.0, 1000.0
    document = map_of({"m": "nowhere.onnx"}, [replica("m", batch=4, latency_ms=latency_ms, max_wait_ms=5.0)], slo_ms)
    capacity_rps = 4 * 1000.0 / latency_ms
    with running(tmp_path, document, "--simulate") as server:

        def is_as_it_should_be(results: Sequence[ModelResult]) -> bool:
            (last,) = results
            return last.goodput_rps >= 0.9 * capacity_rps and last.in_slo >= 0.99 * last.answered

        results = send_until(is_as_it_should_be, server, [RequestStream("m", 3.0 * capacity_rps, slo_ms)])
    assert all(result.failed == result.lost == 0 < result.refused for result in results)
    assert is_as_it_should_be(results[-1:])


def test_a_batch_at_hand_behind_another_counts_as_queued(tmp_path: Path) -> None:
    document = map_of({"m": "nowhere.onnx"}, [replica("m", latency_ms=40.0)], slo_ms=60_000.0)
    with running(tmp_path, document, "--simulate") as server:
        target = Target.parse(server.url)
        settings = LoadSettings(duration_s=0.01, warmup_s=0.0, arrivals="constant", clients=1)
        run_load(target, [RequestStream("m", 1000.0, 60_000.0)], settings)  # ten within 10 ms
        statistics = target.statistics("m")
    assert statistics is not None
    queued_ms = statistics["inference_stats"]["queue"]["ns"] / 1e6
    # Each waits for all before it, 40 ms a piece, less the 1 ms that it comes later. 40 ms of each, but for the first,
    # are spent at hand behind another.
    assert queued_ms > 0.85 * sum(39.0 * number for number in range(10))


def test_replicas_that_take_turns_run_one_batch_at_a_time(tmp_path: Path) -> None:
    turns = {"latency_ms": 40.0, "turns": 1}
    replicas = [replica("a", **turns), replica("b", **turns), replica("c", latency_ms=40.0)]
    document = map_of(dict.fromkeys("abc", "nowhere.onnx"), replicas, slo_ms=60_000.0)
    with running(tmp_path, document, "--simulate") as server:
        settings = LoadSettings(duration_s=0.01, warmup_s=0.0, arrivals="constant", clients=1)
        streams = [RequestStream(name, 500.0, 60_000.0) for name in "abc"]  # five of each within 10 ms
        outcome = run_load(Target.parse(server.url), streams, settings)
    a, b, c = outcome.results
    assert all(result.answered == result.sent >= 4 for result in outcome.results)
    server_ms = [model.server_mean_ms or 0.0 for model in (a, b, c)]
    # Of five requests at once the last is answered after 200 ms, of two models by turns after 400.
    assert server_ms[0] + server_ms[1] > 1.5 * 2.0 * server_ms[2] > 0.0
