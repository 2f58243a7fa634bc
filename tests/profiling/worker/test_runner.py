from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from gpuprof.errors import InputError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.profiling.worker.runner import session_run
from gpuprof.runtime.outputs import outputs_differ
from gpuprof.runtime.session import open_session


@pytest.mark.parametrize("kind", [TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN])
def test_types_that_numpy_lacks_go_in_and_come_out(tmp_path: Path, kind: int) -> None:
    x = helper.make_tensor_value_info("x", kind, ["n", 8])
    y = helper.make_tensor_value_info("y", kind, ["n", 8])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
    opset = [helper.make_opsetid("", 21)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=10), str(tmp_path / "same.onnx"))
    given = random_inputs(load_graph(tmp_path / "same.onnx", 3))
    session = open_session(tmp_path / "same.onnx", threads=1)
    answer = session_run(session, pickle.loads(pickle.dumps(given)), tmp_path / "same.onnx")()["y"]
    assert answer.shape == (3, 8)
    assert np.array_equal(answer, given["x"].astype(np.float32))


def test_outputs_agree_within_what_another_order_of_additions_makes() -> None:
    values = np.array([1.0, -2.0, 3.0], np.float32)
    shifted = values + np.eye(3, dtype=np.float32)[2]
    assert outputs_differ({"y": values}, {"y": values * 1.001}) is None
    assert "differs under the share by" in str(outputs_differ({"y": values}, {"y": shifted}))
    assert "not finite" in str(outputs_differ({"y": values}, {"y": np.where(values < 0, np.nan, values)}))
    assert "shape" in str(outputs_differ({"y": values}, {"y": values[:2]}))
    whole = np.array([1, 2])
    assert outputs_differ({"y": whole}, {"y": whole}) is None
    assert "differs under the share" in str(outputs_differ({"y": whole}, {"y": whole + 1}))
    with pytest.raises(InputError, match="different names"):
        outputs_differ({"y": values}, {"z": values})
