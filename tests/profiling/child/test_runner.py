from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from gpuprof.errors import InputError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.profiling.child.runner import nvtx_unavailable_reason, open_run, outputs_differ
from gpuprof.profiling.child.task import RecordedTask, write_task
from gpuprof.profiling.gpu import recorded_run
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.runtime.providers import ORT_CPU
from tests.profiling.models import write_mlp
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time


@pytest.fixture
def task(tmp_path: Path) -> RecordedTask:
    model = write_mlp(tmp_path / "mlp.onnx")
    np.savez(tmp_path / "inputs.npz", **random_inputs(load_graph(model, 2)))  # type: ignore[arg-type]
    return RecordedTask(
        provider=ORT_CPU,
        model=model,
        inputs=tmp_path / "inputs.npz",
        warm_up=1,
        repeats=2,
        outputs=tmp_path / "outputs.npz",
    )


@pytest.mark.parametrize("kind", [TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN])
def test_types_that_numpy_lacks_go_in_and_come_out_from_a_file(tmp_path: Path, kind: int) -> None:
    x = helper.make_tensor_value_info("x", kind, ["n", 8])
    y = helper.make_tensor_value_info("y", kind, ["n", 8])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
    opset = [helper.make_opsetid("", 21)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=10), str(tmp_path / "same.onnx"))
    given = random_inputs(load_graph(tmp_path / "same.onnx", 3))
    np.savez(tmp_path / "inputs.npz", **given)  # type: ignore[arg-type]
    read = dict(np.load(tmp_path / "inputs.npz"))
    found = open_run(tmp_path / "same.onnx", read, ORT_CPU, 1)()["y"]
    assert found.shape == (3, 8)
    assert np.array_equal(found, given["x"].astype(np.float32))


def _run(task: RecordedTask, tmp_path: Path) -> int:
    path = tmp_path / "task.json"
    path.write_text(write_task(task))
    return recorded_run.main([str(path)])


def test_the_recorded_program_leaves_the_models_outputs(task: RecordedTask, tmp_path: Path) -> None:
    assert _run(task, tmp_path) == 0
    expected = open_run(task.model, dict(np.load(task.inputs)), ORT_CPU, 1)()
    assert outputs_differ(expected, dict(np.load(tmp_path / "outputs.npz"))) is None


@pytest.mark.slow
def test_torchs_profiler_marks_each_run(task: RecordedTask, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    trace = tmp_path / "trace.json"
    assert _run(replace(task, kineto=trace), tmp_path) == 0
    timeline = read_json_trace(trace, expect_kernels=False)
    assert timeline.ranges["name"].tolist().count("gpuprof-run") == 2


def test_what_goes_wrong_stands_on_stderr_in_one_line(
    task: RecordedTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task.model.write_bytes(b"no model")
    assert _run(task, tmp_path) == InputError.exit_code
    assert capsys.readouterr().err.startswith("error: ")


def test_outputs_agree_within_what_another_order_of_additions_makes() -> None:
    values = np.array([1.0, -2.0, 3.0], np.float32)
    shifted = values + np.eye(3, dtype=np.float32)[2]
    assert outputs_differ({"y": values}, {"y": values * 1.001}) is None
    assert "differs under the share by" in str(outputs_differ({"y": values}, {"y": shifted}))
    assert "not finite" in str(outputs_differ({"y": values}, {"y": np.where(values < 0, np.nan, values)}))
    assert "shape" in str(outputs_differ({"y": values}, {"y": values[:2]}))
    whole = np.array([1, 2])
    assert outputs_differ({"y": whole}, {"y": whole}) is None
    assert "another under the share" in str(outputs_differ({"y": whole}, {"y": whole + 1}))
    with pytest.raises(InputError, match="different names"):
        outputs_differ({"y": values}, {"z": values})


@pytest.mark.parametrize(("cuda", "works"), [("13.0", True), (None, False)])
def test_pytorch_for_cuda_marks_runs_where_nvtx_is_not_installed(
    cuda: str | None, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nvtx" else found(name))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert (nvtx_unavailable_reason() is None) == works
