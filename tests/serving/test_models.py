"""Models of ONNX behind the server: every data type, batches, and models that fail."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from onnx import TensorProto, helper

from gpuprof.errors import InputError
from gpuprof.runtime.providers import ORT_CPU
from gpuprof.serving.transport.datatypes import FROM_ONNX, NUMPY_NAMES
from gpuprof.serving.worker.runtime import OnnxRuntime
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, map_of, replica, running
from tests.small_models import Dims, integers, write_classifier, write_encoder, write_model, write_splitter, write_text

pytestmark = serves_in_real_time

TYPES = {
    "BOOL": TensorProto.BOOL, "UINT8": TensorProto.UINT8, "UINT16": TensorProto.UINT16, "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64, "INT8": TensorProto.INT8, "INT16": TensorProto.INT16, "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64, "FP16": TensorProto.FLOAT16, "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16, "BYTES": TensorProto.STRING,
}  # fmt: skip


def identity(path: Path, types: Mapping[str, int]) -> str:
    """A model that gives back each of its inputs, of the given types."""
    nodes = [helper.make_node("Identity", [f"in_{name}"], [f"out_{name}"]) for name in types]
    inputs, outputs = ({f"{side}_{name}": ["n", "m"] for name in types} for side in ("in", "out"))
    kinds = {f"{side}_{name}": kind for name, kind in types.items() for side in ("in", "out")}
    return str(write_model(path, nodes, inputs, outputs, types=kinds))


def lookup(path: Path) -> str:
    """Rows of a table of 5, doubled: an index of 5 or more is an error of the model."""
    nodes = [helper.make_node("Gather", ["table", "i"], ["rows"]), helper.make_node("Add", ["rows", "rows"], ["y"])]
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    return str(write_model(path, nodes, {"i": ["n"]}, {"y": ["n", 2]}, {"table": table}, types={"i": TYPES["INT64"]}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("models")
    models = {
        "strings": identity(directory / "strings.onnx", {"BYTES": TYPES["BYTES"]}),
        "types": identity(directory / "types.onnx", {name: kind for name, kind in TYPES.items() if name != "BYTES"}),
        "lookup": lookup(directory / "lookup.onnx"),
        "classes": str(write_classifier(directory / "classes.onnx")),
        "parts": str(write_splitter(directory / "parts.onnx")),
        "cities": str(write_encoder(directory / "cities.onnx")),
    }
    replicas = [
        replica("strings", batch=2, sm_share_pct=15.0),
        replica("types", batch=4, sm_share_pct=15.0),
        replica("lookup", batch=4, max_wait_ms=60.0, sm_share_pct=25.0),
        replica("classes", batch=4, max_wait_ms=60.0, sm_share_pct=15.0),
        replica("parts", sm_share_pct=15.0),
        replica("cities", batch=2, sm_share_pct=15.0),
    ]
    with running(directory, map_of(models, replicas)) as running_server:
        yield running_server


def example(datatype: str) -> np.ndarray[Any, Any]:
    if datatype == "BYTES":
        return np.array([["a", "é", ""], ["long" * 50, "b", "c"]], dtype=object)
    if datatype == "BF16":
        return np.array([[1.5, -2.0, 0.0], [4.0, 0.5, 1.0]], dtype=ml_dtypes.bfloat16)
    return (np.arange(6).reshape(2, 3) % 2).astype(NUMPY_NAMES[datatype])


def test_every_type_of_the_protocol_is_served() -> None:
    assert set(TYPES) == set(FROM_ONNX.values())


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("model", ["types", "strings"])
def test_every_type_comes_back_as_it_went(server: RunningServer, model: str, binary: bool) -> None:
    client = triton.InferenceServerClient(server.address)
    tensors, outputs = [], []
    names = [name for name in TYPES if (name == "BYTES") == (model == "strings")]
    for datatype in names:
        tensor = triton.InferInput(f"in_{datatype}", [2, 3], datatype)
        is_binary = binary or datatype in ("BF16", "FP16")  # the client itself sends half floats only as binary data
        tensor.set_data_from_numpy(example(datatype), binary_data=is_binary)
        tensors.append(tensor)
        outputs.append(triton.InferRequestedOutput(f"out_{datatype}", binary_data=is_binary))
    result = client.infer(model, tensors, outputs=outputs)
    for datatype in names:
        values = result.as_numpy(f"out_{datatype}")
        if datatype == "BYTES":
            values = np.array([text.decode() if isinstance(text, bytes) else text for text in values.ravel()]).reshape(
                2, 3
            )
        assert values.tolist() == example(datatype).tolist(), datatype
    client.close()


def types_in_json(datatype: str) -> dict[str, Any]:
    """A request for one output with every input in JSON but the one that JSON cannot carry."""
    inputs: list[dict[str, Any]] = []
    for name in TYPES:
        if name == "BF16":
            inputs.append({"name": "in_BF16", "datatype": name, "shape": [1, 1], "parameters": {"binary_data_size": 2}})
        elif name != "BYTES":
            data = [[True]] if name == "BOOL" else [[1]]
            inputs.append({"name": f"in_{name}", "datatype": name, "shape": [1, 1], "data": data})
    return {"inputs": inputs, "outputs": [{"name": f"out_{datatype}"}]}


@pytest.mark.parametrize(("datatype", "status", "said"), [("FP16", 200, "1.0"), ("BF16", 400, "BF16")])
def test_half_floats_may_be_json_not_bfloat16(server: RunningServer, datatype: str, status: int, said: str) -> None:
    text = json.dumps(types_in_json(datatype)).encode()
    length = {"Inference_Header_Content_Length": str(len(text))}
    code, answer = server.get("/v2/models/types/infer", "POST", text + b"\x80\x3f", **length)
    assert code == status and said in str(answer)


def test_unfit_models_keep_no_other_from_being_served(tmp_path: Path) -> None:
    def save(name: str, op: str, outputs: dict[str, Dims]) -> str:
        value = helper.make_tensor("v", TensorProto.FLOAT, [2, 1], [1, 2])
        nodes = [helper.make_node(op, ["x"], ["y"]), helper.make_node("Constant", [], ["c"], value=value)]
        return str(write_model(tmp_path / name, nodes, {"x": ["n", 1]}, {"y": ["n", 1], **outputs}))

    (tmp_path / "corrupt.onnx").write_bytes(b"rubbish")
    models = {
        "missing": ("nowhere.onnx", "no such file"),
        "corrupt": ("corrupt.onnx", "is not an ONNX model"),
        "foreign": (save("foreign.onnx", "Unheard", {}), "Unheard"),
        "mixed": (save("mixed.onnx", "Relu", {"c": ["m", 1]}), "cannot be served with batches of 4"),
        "both": (identity(tmp_path / "both.onnx", {kind: TYPES[kind] for kind in ("BF16", "BYTES")}), "bfloat16"),
        "null": ("null:huge", "not a null model"),
    }
    paths = {name: path for name, (path, _) in models.items()}
    replicas = [replica(name, batch=4 if name == "mixed" else 1, sm_share_pct=10.0) for name in paths]
    with running(
        tmp_path, map_of(paths | {"good": "null:4"}, [*replicas, replica("good", sm_share_pct=20.0)])
    ) as server:
        assert "serving 1 model with 1 worker" in server.line
        assert server.infer("good", [1.0])[0] == 200
        assert server.get("/v2/health/ready")[0] == 200
        index = {row["name"]: row for row in server.get("/v2/repository/index", "POST")[1]}
        assert index["good"]["state"] == "READY"
        for name, (_, reason) in models.items():
            for status, answer in (server.get(f"/v2/models/{name}/ready"), server.infer(name, [1.0])):
                assert (
                    status == 503 and f"model {name!r} is not served" in answer["error"] and reason in answer["error"]
                )
            assert index[name]["state"] == "UNAVAILABLE" and reason in index[name]["reason"]
        _, log = server.stop()
        for name, (_, reason) in models.items():
            assert any(f"model is not served (model {name}," in line and reason in line for line in log.splitlines())
    with pytest.raises(AssertionError, match="no such file"), running(tmp_path, map_of(paths, replicas)):
        pass


def ask(server: RunningServer, rows: list[int]) -> tuple[int, dict[str, object]]:
    tensor = {"name": "i", "datatype": "INT64", "shape": [len(rows)], "data": rows}
    status, answer = server.get("/v2/models/lookup/infer", "POST", json.dumps({"inputs": [tensor]}).encode())
    return status, answer


def test_requests_that_share_a_batch_get_their_own_rows(server: RunningServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda row: ask(server, [row]), range(4)))
    for row, (_, answer) in enumerate(answers):
        outputs = answer["outputs"]
        assert isinstance(outputs, list) and outputs[0]["data"] == [4.0 * row, 4.0 * row + 2.0]
    stats = server.get("/v2/models/lookup/stats")[1]["model_stats"][0]
    assert max(entry["batch_size"] for entry in stats["batch_stats"]) > 1


def test_a_request_that_the_model_fails_on_is_refused_and_its_neighbours_are_answered(server: RunningServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda row: ask(server, [row])[0], (1, 2, 77, 3))) == [200, 200, 400, 200]
    assert "the model failed on these inputs" in str(ask(server, [99])[1]["error"])


def infer(server: RunningServer, model: str, name: str, datatype: str, rows: list[Any]) -> dict[str, Any]:
    tensor = {"name": name, "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": rows}
    status, answer = server.get(f"/v2/models/{model}/infer", "POST", json.dumps({"inputs": [tensor]}).encode())
    assert status == 200, answer
    return {output["name"]: output for output in answer["outputs"]}


def test_maps_of_scores_are_served_as_texts_of_json_each_request_with_its_own(server: RunningServer) -> None:
    described = server.get("/v2/models/classes")[1]["outputs"]
    assert [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in described] == [
        ("label", "INT64", [-1]),
        ("scores", "BYTES", [-1]),
    ]

    def classify(row: int) -> dict[str, Any]:
        return infer(server, "classes", "x", "FP32", [[float(row), 1.5]] * (1 + row % 2))

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(classify, range(4)))
    for row, answer in enumerate(answers):
        rows = 1 + row % 2
        assert answer["label"]["data"] == [7 if row > 1.5 else 9] * rows
        assert [json.loads(text) for text in answer["scores"]["data"]] == [{"7": float(row), "9": 1.5}] * rows
    stats = server.get("/v2/models/classes/stats")[1]["model_stats"][0]
    assert max(entry["batch_size"] for entry in stats["batch_stats"]) > 1


def test_a_sequence_of_tensors_is_served_as_texts_and_in_no_batch(server: RunningServer) -> None:
    (parts,) = infer(server, "parts", "x", "FP32", [[1.0, 2.0], [3.0, 4.0]]).values()
    assert [json.loads(text) for text in parts["data"]] == [[[1.0, 2.0]], [[3.0, 4.0]]]


def test_a_model_of_texts_takes_them_as_json(server: RunningServer) -> None:
    (output,) = infer(server, "cities", "city", "BYTES", [["rome"], ["oslo"]]).values()
    assert output["data"] == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("nodes", "width", "message", "most"),
    [
        ([("Transpose", ["x"], ["t"], {"perm": [1, 0]}), ("MatMul", ["x", "t"], ["y"], {})], "N",
         "the first dimension alone of its output y must be the batch", 0),
        ([("Softmax", ["x"], ["y"], {"axis": 0})], 4, "output y relates its items to one another", 1),
    ],
    ids=["in its shape", "behind its shape"],
)  # fmt: skip
def test_a_model_that_relates_the_items_of_a_batch_is_served_by_batches_of_one_alone(
    tmp_path: Path, nodes: list[Any], width: int | str, message: str, most: int
) -> None:
    made = [helper.make_node(kind, inputs, outputs, **attributes) for kind, inputs, outputs, attributes in nodes]
    path = write_model(tmp_path / "m.onnx", made, {"x": ["N", 4]}, {"y": ["N", width]})
    with pytest.raises(InputError, match=message):
        OnnxRuntime("m", "1", path, 2, 1, ORT_CPU)
    assert OnnxRuntime("m", "1", path, 1, 1, ORT_CPU).spec.max_batch == most


def test_models_that_do_not_run_on_made_up_inputs_are_served_all_the_same(tmp_path: Path) -> None:
    text = "(float[N,length] x) => (float[N,2,2] y) { y = Reshape (x, shape) }"  # the open dimension must be 4
    path = write_text(tmp_path / "m.onnx", text, {"shape": integers(-1, 2, 2)})
    assert OnnxRuntime("m", "1", path, 2, 1, ORT_CPU).spec.max_batch == 2
