"""What ONNX Runtime makes of a model is found without the model's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from gpuprof.domain.catalogue import device
from gpuprof.domain.model import ModelGraph
from gpuprof.graph.executed_graph import read_executed
from gpuprof.graph.load import load_graph
from gpuprof.machine.cpu import local_cpu
from gpuprof.runtime.optimizer import arithmetic_precision, executed_nodes, executed_variant, find_refusal
from gpuprof.runtime.session import open_session
from tests.small_models import integers, write_model


def _network(path: Path, domain: str = "") -> Path:
    """Write two wide layers whose ReLU and batch normalisation the runtime fuses into the convolution."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(32, 16, 3, 3)),
        **{name: random.uniform(0.5, 1.0, 32) for name in ("scale", "shift", "mean", "variance")},
        "dense": random.normal(size=(32, 2000)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["n"], name="norm"),
        helper.make_node("Relu", ["n"], ["r"], name="relu", domain=domain),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flat"),
        helper.make_node("MatMul", ["f", "dense"], ["y"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", 1, ["N", 16, 8, 8])],
        [helper.make_tensor_value_info("y", 1, ["N", 2000])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("nobody", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))
    return path


def test_the_same_nodes_are_found_without_the_weights_as_with_them(tmp_path: Path) -> None:
    path = _network(tmp_path / "network.onnx")
    open_session(path, threads=1, optimized_path=tmp_path / "optimized.onnx")
    with_weights = read_executed(tmp_path / "optimized.onnx")
    nodes = executed_nodes(path)
    assert nodes is not None
    assert [(node.op_type, node.outputs) for node in nodes] == [(node.op_type, node.outputs) for node in with_weights]
    assert "Relu" not in {node.op_type for node in nodes} and "BatchNormalization" not in {n.op_type for n in nodes}


def test_external_weights_are_not_read(tmp_path: Path) -> None:
    path = _network(tmp_path / "network.onnx")
    model = onnx.load(path)
    inside = executed_nodes(path)
    onnx.save(model, str(path), save_as_external_data=True, location="weights", size_threshold=1024)
    outside = executed_nodes(path)
    assert inside is not None and outside is not None
    assert [node.op_type for node in inside] == [node.op_type for node in outside]


def test_a_model_that_the_runtime_refuses_is_not_known(tmp_path: Path) -> None:
    assert executed_nodes(_network(tmp_path / "odd.onnx", domain="nobody")) is None


@pytest.mark.parametrize(
    ("kind", "opset", "cpu", "gpu"),
    [
        (TensorProto.FLOAT, 7, None, None),
        (TensorProto.FLOAT, 6, "lacks", "lacks"),  # no device has kernels of opsets before 7
        (TensorProto.BFLOAT16, 14, "lacks", None),  # a GPU may have a kernel
        (TensorProto.FLOAT8E5M2, 19, "Protocol cannot carry", "Protocol cannot carry"),
    ],
)
def test_what_serving_refuses_is_known_before(
    tmp_path: Path, kind: int, opset: int, cpu: str | None, gpu: str | None
) -> None:
    op = "Identity" if kind == TensorProto.FLOAT8E5M2 else "Gemm" if opset < 8 else "Add"
    nodes = [helper.make_node(op, ["x"] * {"Identity": 1, "Gemm": 3, "Add": 2}[op], ["y"])]
    types = {"x": kind, "y": kind}
    path = write_model(tmp_path / "m.onnx", nodes, {"x": [4, 4]}, {"y": [4, 4]}, opset=opset, types=types)
    for on_gpu, message in ((False, cpu), (True, gpu)):
        error = find_refusal(path, on_gpu)
        assert message in str(error) if message else error is None


def test_a_shape_in_external_data_is_refused_as_onnx_runtime_does(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["N", 8]}, {"y": ["N", 2, 4]}, {"shape": integers(-1, 2, 4)})
    assert find_refusal(path, on_gpu=True) is None
    onnx.save(onnx.load(path), str(path), save_as_external_data=True, location="shapes", size_threshold=0)
    assert "Reshape" in str(find_refusal(path, on_gpu=True))


def _embedding(path: Path, kind: int = TensorProto.FLOAT) -> ModelGraph:
    """Token ids in, a product of what they stand for out: as language models have it."""
    dtype = np.float16 if kind == TensorProto.FLOAT16 else np.float32
    weights = {"table": np.ones((32, 8), dtype), "matrix": np.ones((8, 4), dtype)}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["found"]),
        helper.make_node("MatMul", ["found", "matrix"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", 6])]
    outputs = [helper.make_tensor_value_info("y", kind, ["N", 6, 4])]
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "m", inputs, outputs, constants)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return load_graph(path, 2)


def test_precision_is_that_of_the_arithmetic_not_of_the_token_ids(tmp_path: Path) -> None:
    graph = _embedding(tmp_path / "m.onnx")
    assert graph.inputs[0].dtype == "int64"
    assert arithmetic_precision(graph, local_cpu()) == "float32"


@pytest.mark.parametrize(("name", "expected"), [("v100", "float32"), ("t4", "float32"), ("a100-80", "tf32")])
def test_float32_is_computed_in_tf32_where_the_gpu_has_it(tmp_path: Path, name: str, expected: str) -> None:
    graph = _embedding(tmp_path / "m.onnx")
    assert executed_variant(graph, device(name)).precision == expected
    assert executed_variant(_embedding(tmp_path / "h.onnx", TensorProto.FLOAT16), device(name)).precision == ("float16")


def test_the_runtime_and_whether_it_fuses_are_told_from_the_provider(tmp_path: Path) -> None:
    graph = _embedding(tmp_path / "m.onnx")
    assert str(executed_variant(graph, device("h200"))) == "onnxruntime fused tf32"
    assert str(executed_variant(graph, local_cpu())) == "onnxruntime fused float32"
    nothing = ModelGraph("named", 1, (), (), (), (), 0, "", "")
    assert executed_variant(nothing, device("h200")).precision is None
