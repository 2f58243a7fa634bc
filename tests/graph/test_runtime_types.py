from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

from gpuprof.errors import InputError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from tests.small_models import floats


def write(path: Path, text: str, weights: dict[str, np.ndarray], opset: int = 17, ir_version: int = 8) -> Path:
    model = parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}, "com.microsoft": 1]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(model, path)
    return path


def test_an_op_of_the_runtime_gives_what_the_runtime_says(tmp_path: Path) -> None:
    text = "(float[batch,6] x) => (float[] y) { a = com.microsoft.FusedMatMul <transB = 1> (x, w) y = Relu (a) }"
    fused, relu = load_graph(write(tmp_path / "m.onnx", text, {"w": floats(4, 6)}), 3).ops
    assert fused.outputs[0].shape == relu.outputs[0].shape == (3, 4)
    assert fused.outputs[0].dtype == "float32"
    assert fused.flops == 2 * 3 * 4 * 6


def test_a_quantised_product_has_the_shape_type_and_flops_of_its_own(tmp_path: Path) -> None:
    text = "(uint8[batch,6] x) => (uint8[] y) { y = com.microsoft.QGemm (x, s, z, w, s, z, c, s, z) }"
    weights: dict[str, np.ndarray] = {
        "s": np.array(0.1, np.float32),
        "z": np.array(3, np.uint8),
        "c": np.ones(4, np.int32),
    }
    path = write(tmp_path / "m.onnx", text, {**weights, "w": np.ones((6, 4), np.uint8)})
    op = load_graph(path, 2).ops[0]
    assert (op.outputs[0].shape, op.outputs[0].dtype) == ((2, 4), "uint8")
    assert op.flops == 2 * 4 * (2 * 6 + 1 + 5)


def test_an_op_that_nobody_knows_is_refused_still(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", "(float[batch,6] x) => (float[] y) { y = com.microsoft.Unheard (x) }", {})
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
    text = """(float[batch,16,8,8] x) => (float[batch,32,4,4] y) { c = Conv <pads = [1,1,1,1]> (x, w) r = Relu (c)
        y = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r) }"""
    plain = write(tmp_path / "plain.onnx", text, {"w": floats(32, 16, 3, 3)})
    path = write_optimized(plain, tmp_path / "m.onnx")
    assert outputs_agree(path, 3)
    assert None not in [op.flops for op in load_graph(path, 3).ops]
    work = sum(op.flops or 0 for op in load_graph(path, 3).ops)
    assert work == pytest.approx(sum(op.flops or 0 for op in load_graph(plain, 3).ops), rel=0.05)


def test_an_old_model_need_not_list_the_weights_that_a_tool_added(tmp_path: Path) -> None:
    text = "(float[batch,6] x) => (float[batch,6] y) { y = Mul (x, w) }"
    assert outputs_agree(write(tmp_path / "m.onnx", text, {"w": floats(6)}, opset=7, ir_version=3), 2)


def test_a_norm_of_the_runtime_in_the_domain_of_onnx_is_known(tmp_path: Path) -> None:
    text = "(float[batch,6] x) => (float[] y) { y = SimplifiedLayerNormalization (x, w) }"
    path = write(tmp_path / "m.onnx", text, {"w": floats(6)})
    assert load_graph(path, 3).ops[0].flops == 4 * 18 + 3 * 3
    assert outputs_agree(path, 3)
