from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper

from gpuprof.graph.dims import Dim
from gpuprof.graph.file import read_onnx
from gpuprof.graph.served_interface import find_unbatched, find_uncarried
from tests.small_models import write_model

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
