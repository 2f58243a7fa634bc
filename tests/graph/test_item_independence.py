"""Which ops keep the items of a batch apart, by their types, attributes and shapes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gpuprof.graph.dims import Dim
from gpuprof.graph.file import read_onnx
from gpuprof.graph.item_independence import BatchedTensors, keeps_items_apart
from gpuprof.graph.load import load_graph, load_nodes
from gpuprof.graph.served_interface import find_unbatched, find_uncarried
from tests.small_models import floats, write_model

_NUMBERS = {
    **{"rows": [1, 0, 3, 2], "along": [1], "zero": [0], "last": [-1], "four": [4], "far": [2**40], "back": [-(2**40)]},
    **{"one": [1], "reverse": [-1], "beside": [0, 1, 0, 1], "moved": [1, 0, -1, 0], "each": [1, 4], "pairs": [-1, 2]},
    **{"columns": [4, -1]},
}


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes", "is_apart"),
    [
        ("Gemm", ["x", "w", "b"], {}, True),
        ("MatMul", ["x", "w"], {}, True),
        ("Add", ["x", "b"], {}, True),
        ("Add", ["x", "two"], {}, False),
        ("Softmax", ["x"], {"axis": 1}, True),
        ("Softmax", ["x"], {"axis": 0}, False),
        ("Softmax", ["x"], {"axis": -2}, False),
        ("ReduceMean", ["x"], {"axes": [1]}, True),
        ("ReduceMean", ["x"], {"axes": [0]}, False),
        ("Concat", ["x", "x"], {"axis": 1}, True),
        ("Concat", ["x", "x"], {"axis": 0}, False),
        ("Gather", ["x", "rows"], {"axis": 1}, True),
        ("Transpose", ["x"], {"perm": [1, 0]}, False),
        ("TopK", ["x", "four"], {"axis": 1}, True),
        ("TopK", ["x", "one"], {"axis": 0}, False),
        ("Pad", ["x", "beside"], {}, True),
        ("Pad", ["x", "moved"], {}, False),
        ("Slice", ["x", "zero", "far", "zero", "one"], {}, True),
        ("Slice", ["x", "last", "back", "zero", "reverse"], {}, False),
        ("Tile", ["x", "each"], {}, True),
        ("Reshape", ["x", "pairs"], {}, True),
        ("Reshape", ["x", "columns"], {}, False),
        ("CumSum", ["x", "zero"], {}, False),
    ],
)
def test_ops_along_other_dimensions_keep_items_apart(
    tmp_path: Path, kind: str, inputs: list[str], attributes: dict[str, Any], is_apart: bool
) -> None:
    constants = {"w": floats(4, 4), "b": floats(4), "two": floats(2, 4)}
    constants |= {name: np.array(numbers, np.int64) for name, numbers in _NUMBERS.items()}
    outputs = ["y", "z"] if kind == "TopK" else ["y"]
    used = {name: value for name, value in constants.items() if name in inputs}
    node = helper.make_node(kind, inputs, outputs, **attributes)
    path = write_model(tmp_path / "m.onnx", [node], {"x": ["N", 4]}, {"y": None}, used)
    (single,), (batched,) = (load_graph(path, batch).ops for batch in (1, 2))
    shapes = {tensor.name: tensor.shape for tensor in (*single.inputs, *single.outputs)}
    tensors = BatchedTensors(2, load_nodes(path, 2)[1], shapes, {"x"})
    assert keeps_items_apart(batched, tensors) == is_apart


_Dims = tuple[Dim, ...]


@pytest.mark.parametrize(
    ("inputs", "outputs", "name"),
    [
        ({"x": ("N", 4)}, {"y": ("N", 4), "unknown": None}, None),
        ({"x": ("N", 4)}, {"y": ("M", 4)}, None),
        ({"x": ("N", "N")}, {}, "input x"),
        ({"x": ("seq", "batch", 4)}, {}, "input x"),
        ({"x": ("N", 4), "scale": ()}, {}, "input scale"),
        ({"x": ("N", 4)}, {"y": (4, "N")}, "output y"),
        ({"x": ("N", 4)}, {"y": ("N", "N")}, "output y"),
        ({"x": ("N", 4)}, {"y": ("N", 4), "mean": ()}, "output mean"),
    ],
)
def test_only_the_first_dimension_of_all_may_be_the_batch(
    inputs: dict[str, _Dims], outputs: dict[str, _Dims | None], name: str | None
) -> None:
    assert find_unbatched(inputs, outputs) == name


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (TensorProto.BFLOAT16, TensorProto.FLOAT, None),
        (TensorProto.STRING, TensorProto.FLOAT, None),
        (TensorProto.STRING, TensorProto.BFLOAT16, "strings and bfloat16"),
        (TensorProto.FLOAT8E5M2, TensorProto.FLOAT, "'x' has type float8e5m2"),
        (TensorProto.FLOAT, TensorProto.INT4, "'y' has type int4"),
        (TensorProto.COMPLEX64, TensorProto.FLOAT, "'x' has type complex64"),
    ],
)
def test_types_that_the_protocol_lacks_are_refused(tmp_path: Path, x: int, y: int, message: str | None) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=y)]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["N"]}, {"y": ["N"]}, opset=21, types={"x": x, "y": y})
    error = find_uncarried(read_onnx(path))
    assert message in str(error) if message else error is None
