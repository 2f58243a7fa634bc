from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from gpuprof.errors import InputError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from tests.small_models import floats

node = helper.make_node
FLOAT, UINT8 = TensorProto.FLOAT, TensorProto.UINT8
RUNTIMES = "com.microsoft"


def write(path: Path, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], dtype: int = FLOAT) -> Path:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", dtype, ["batch", 6])],
        [helper.make_tensor_value_info("y", dtype, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(RUNTIMES, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def test_an_op_of_the_runtime_gives_what_the_runtime_says(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.onnx",
        [node("FusedMatMul", ["x", "w"], ["a"], domain=RUNTIMES, transB=1), node("Relu", ["a"], ["y"])],
        {"w": floats(4, 6)},
    )
    fused, relu = load_graph(path, 3).ops
    assert fused.outputs[0].shape == relu.outputs[0].shape == (3, 4)
    assert fused.outputs[0].dtype == "float32"
    assert fused.flops == 2 * 3 * 4 * 6


def test_a_quantised_product_has_the_shape_type_and_flops_of_its_own(tmp_path: Path) -> None:
    scale, zero = np.array(0.1, np.float32), np.array(3, np.uint8)
    path = write(
        tmp_path / "m.onnx",
        [node("QGemm", ["x", "s", "z", "w", "s", "z", "c", "s", "z"], ["y"], domain=RUNTIMES)],
        {"s": scale, "z": zero, "w": np.ones((6, 4), np.uint8), "c": np.ones(4, np.int32)},
        UINT8,
    )
    op = load_graph(path, 2).ops[0]
    assert (op.outputs[0].shape, op.outputs[0].dtype) == ((2, 4), "uint8")
    assert op.flops == 2 * 4 * (2 * 6 + 1 + 5)


def test_an_op_that_nobody_knows_is_refused_still(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Unheard", ["x"], ["y"], domain=RUNTIMES)], {})
    with pytest.raises(InputError, match=r"the shape of 'y', which node y \(Unheard\) of domain com.microsoft"):
        load_graph(path)


def write_optimized(path: Path, output: Path) -> Path:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(output)
    options.log_severity_level = 4
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return output


def outputs_agree(path: Path, batch: int) -> bool:
    graph = load_graph(path, batch)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    given = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, random_inputs(graph))
    return [value.shape for value in given] == [tensor.shape for tensor in graph.outputs]


def test_a_model_that_the_runtime_optimised_is_read_as_it_stands(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("MaxPool", ["r"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 16, 8, 8])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 32, 4, 4])],
        [numpy_helper.from_array(floats(32, 16, 3, 3), "w")],
    )
    plain = tmp_path / "plain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), plain)
    path = write_optimized(plain, tmp_path / "m.onnx")
    assert outputs_agree(path, 3)
    assert None not in [op.flops for op in load_graph(path, 3).ops]
    work = sum(op.flops or 0 for op in load_graph(path, 3).ops)
    assert work == pytest.approx(sum(op.flops or 0 for op in load_graph(plain, 3).ops), rel=0.05)


def old_model() -> ModelProto:
    nodes = [node("Mul", ["x", "w"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 6])],
        [numpy_helper.from_array(floats(6), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 7)], ir_version=3)


def test_an_old_model_need_not_list_the_weights_that_a_tool_added(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(old_model(), path)
    assert outputs_agree(path, 2)


def test_a_norm_of_the_runtime_in_the_domain_of_onnx_is_known(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("SimplifiedLayerNormalization", ["x", "w"], ["y"])], {"w": floats(6)})
    assert load_graph(path, 3).ops[0].flops == 4 * 18 + 3 * 3
    assert outputs_agree(path, 3)
