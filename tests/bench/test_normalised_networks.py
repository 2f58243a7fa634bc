"""The networks that published tables are compared with have PyTorch's nodes."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from bench.normalised_networks import write_unfolded
from tests.small_models import floats, write_model


def _write_scaled(path: Path) -> Path:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "one", "zero", "zero", "one"], ["n"]),
        helper.make_node("Mul", ["n", "a"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["s"]),
        helper.make_node("Relu", ["s"], ["r"]),
        helper.make_node("Add", ["r", "n"], ["y"]),
    ]
    ones = {name: np.full(shape, value, np.float32) for name, shape, value in
            (("one", 4, 1.0), ("zero", 4, 0.0), ("a", (4, 1, 1), 1.0), ("b", (4, 1, 1), 0.0))}  # fmt: skip
    return write_model(
        path, nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 4, 6, 6]}, {"w": floats(4, 3, 3, 3), **ones}, opset=17
    )


def _run(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": floats(1, 3, 8, 8)})[0])


def test_caffes_scale_layers_are_dropped_and_residual_additions_stay(tmp_path: Path) -> None:
    source = _write_scaled(tmp_path / "a.onnx")
    write_unfolded("densenet121", source, tmp_path / "b.onnx")
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "b.onnx").graph.node)
    assert kinds == {"Conv": 1, "BatchNormalization": 1, "Relu": 1, "Add": 1}
    assert np.allclose(_run(source), _run(tmp_path / "b.onnx"))


def test_folded_normalisations_are_put_back_where_pytorch_runs_them(tmp_path: Path) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    source = write_model(
        tmp_path / "a.onnx", [node], {"x": [1, 3, 8, 8]}, {"y": [1, 4, 6, 6]}, {"w": floats(4, 3, 3, 3)}
    )
    write_unfolded("mobilenet_v2", source, tmp_path / "b.onnx")
    assert [op.op_type for op in onnx.load(tmp_path / "b.onnx").graph.node] == ["Conv", "BatchNormalization"]
    assert np.allclose(_run(source), _run(tmp_path / "b.onnx"), atol=1e-4)
    write_unfolded("vgg19", source, tmp_path / "c.onnx")
    assert [op.op_type for op in onnx.load(tmp_path / "c.onnx").graph.node] == ["Conv"]
