from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from gpuprof.domain.catalogue import device
from gpuprof.domain.model import ModelGraph
from gpuprof.graph.load import load_graph
from gpuprof.machine.cpu import local_cpu
from gpuprof.runtime.optimizer import arithmetic_precision, executed_variant


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
