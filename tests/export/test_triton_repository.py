"""The model repositories for Triton: files, names, versions, and when batches are formed."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from google.protobuf import text_format
from onnx import helper, numpy_helper
from tritonclient.grpc import model_config_pb2

from gpuprof.domain.deployment import DeploymentMap, parse_map
from gpuprof.errors import InputError
from gpuprof.export.bundle import Bundle
from gpuprof.export.targets import export
from gpuprof.pipeline.export import MapExportResult
from tests.export.test_export import MAP
from tests.export.test_manifests import model_with_external_data
from tests.small_models import write_classifier, write_model


def _with_file(name: str, path: str, batch: int = 2) -> DeploymentMap:
    """Return a map with one replica, of a model that has a file."""
    content = json.loads(MAP.to_json())
    content["models"] = {name: content["models"]["b"] | {"path": path}}
    content["nodes"] = content["nodes"][1:]
    (partition,) = content["nodes"][0]["gpus"][0]["partitions"]
    partition["replicas"] = [partition["replicas"][0] | {"model": name, "batch": batch, "batch_latency_ms": None}]
    return parse_map(content, "map")


def _config(bundle: Bundle) -> model_config_pb2.ModelConfig:
    (text,) = (content for name, content in bundle.files.items() if name.endswith(".pbtxt"))
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def _save_identity(path: Path, *dims: int | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_model(path, [helper.make_node("Relu", ["x"], ["y"])], {"x": dims}, {"y": dims})


def test_the_model_and_its_external_data_are_in_the_repository_and_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "b.onnx").write_bytes(model_with_external_data(tmp_path))
    bundle = export(_with_file("My.Net", "b.onnx"), "triton", base=tmp_path)
    folder = tmp_path / "out"
    for _ in range(2):  # the second export replaces the first
        MapExportResult(files=bundle.files, models=bundle.models).write(folder)
    (repository,) = folder.glob("*/My.Net")
    assert sorted(path.name for path in (repository / "1").iterdir()) == ["b.data", "model.onnx"]
    assert (repository / "1/model.onnx").samefile(tmp_path / "b.onnx")
    session = ort.InferenceSession(str(repository / "1/model.onnx"))  # the runtime of Triton's backend
    (answer,) = session.run(None, {"x": np.ones((2, 4), np.float32)})
    assert answer.tolist() == [[4.0] * 4] * 2
    assert _config(bundle).name == "My.Net" and not bundle.notes


def test_a_version_is_the_folder_that_triton_serves_it_from(tmp_path: Path) -> None:
    _save_identity(tmp_path / "net.onnx", "batch", 3)
    bundle = export(_with_file("net@3", "net.onnx"), "triton", base=tmp_path)
    assert [Path(name).parts[1:] for name in bundle.models] == [("net", "3", "model.onnx")]


@pytest.mark.parametrize(
    ("dims", "batch", "largest", "is_dynamic"),
    [
        (("batch", 3), 4, 4, True),
        (("batch", 3), 1, 1, False),  # a batch of one forms by itself
        ((1, 3), 1, 0, False),
        ((1, 3), 4, 0, False),
        (("sequence", 3), 4, 0, False),
    ],
)
def test_batches_are_formed_where_the_model_has_a_batch_and_the_map_more_than_one(
    tmp_path: Path, dims: tuple[int | str, ...], batch: int, largest: int, is_dynamic: bool
) -> None:
    _save_identity(tmp_path / "net.onnx", *dims)
    bundle = export(_with_file("net", "net.onnx", batch), "triton", base=tmp_path)
    config = _config(bundle)
    assert config.max_batch_size == largest
    assert config.HasField("dynamic_batching") is is_dynamic
    assert any("without batches, which the map has" in note for note in bundle.notes) is (batch > 1 and not largest)


def test_weights_of_any_size_do_not_keep_a_model_from_batches(tmp_path: Path) -> None:
    text = "(float[batch, 64] x) => (float[batch, 64] y) { y = MatMul(x, w) }"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> net {text}')
    model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    onnx.save(model, tmp_path / "net.onnx")
    bundle = export(_with_file("net", "net.onnx", 4), "triton", base=tmp_path)
    assert _config(bundle).max_batch_size == 4 and _config(bundle).HasField("dynamic_batching") and not bundle.notes


def test_a_name_that_no_folder_can_have_is_changed_and_said(tmp_path: Path) -> None:
    bundle = export(_with_file("models/net", "net.onnx"), "triton", base=tmp_path)
    assert _config(bundle).name == "models_net"
    assert any("ask for models/net as models_net" in note for note in bundle.notes)
    assert any("the file of models/net is not here" in note for note in bundle.notes)


def test_a_model_with_maps_as_output_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write_classifier(tmp_path / "c.onnx")
    with pytest.raises(InputError, match=r"scores is of kind sequence, and it takes tensors alone.*zipmap"):
        export(_with_file("c", "c.onnx"), "triton", base=tmp_path)
