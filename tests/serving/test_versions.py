"""Versions of models: from names in the map, and from where a repository keeps a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from gpuprof.cli.main import main
from gpuprof.domain.deployment import PublicName
from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.target import Target
from tests.reruns import serves_in_real_time
from tests.serving.running import map_of, replica, running
from tests.serving.test_models import lookup

pytestmark = serves_in_real_time


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
    with (
        pytest.raises(AssertionError, match="'m@1' and 'm' are both version 1 of 'm'"),
        running(tmp_path, document),
    ):
        pass
