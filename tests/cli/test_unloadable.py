"""Plans and checks ask the runtime whether it loads a file, so that `serve` never has to refuse a sound map."""

import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gpuprof.cli.main import main
from tests.small_models import Dims, write_model


def _write(path: Path, op: str = "Relu", domain: str = "", opset: int = 17) -> Path:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], domain=domain)], "g", values[:1], values[1:])
    imports = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), str(path))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "fine.onnx")
    (tmp_path / "slo.csv").write_text("model,rate_rps,slo_ms\nfine.onnx,20,50\nother.onnx,10,60\n")
    return tmp_path


@pytest.mark.parametrize(
    ("op", "domain", "opset", "message"),
    [("Frobnicate", "acme.ops", 17, "is not a registered function"), ("Relu", "", 99, "has opset 99 of ai.onnx")],
    ids=["foreign domain", "newer opset"],
)
def test_place_refuses_a_file_that_the_runtime_does_not_load(
    folder: Path, capsys: pytest.CaptureFixture[str], op: str, domain: str, opset: int, message: str
) -> None:
    _write(folder / "other.onnx", op, domain, opset)
    assert main(["place", "--gpus", "t4"]) == 3
    stderr = capsys.readouterr().err
    assert "other.onnx" in stderr and message in stderr


def test_check_names_a_file_that_the_runtime_does_not_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(folder / "other.onnx")
    assert main(["place", "--gpus", "t4"]) == 0
    _write(folder / "other.onnx", "Frobnicate", "acme.ops")
    capsys.readouterr()
    assert main(["check", "map.json", "--allow-changed", "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["violations"]
    assert fault["rule"] == "file" and "is not a registered function" in fault["message"]


def test_place_refuses_types_that_the_protocol_lacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [helper.make_tensor_value_info(name, kind, ["n", 4]) for name, kind in (("x", 19), ("y", 1))]
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)], "g", values[:1], values[1:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.save(model, folder / "other.onnx")
    assert main(["place", "--gpus", "h100-sxm"]) == 3
    assert "tensor 'x' has type float8e5m2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dims", "axis", "message"),
    [(["n", 4], 0, "its output y for one depends on the others"), ([4, 4], 1, "has no free batch")],
)
def test_check_names_a_file_whose_requests_cannot_share_a_batch(
    folder: Path, capsys: pytest.CaptureFixture[str], dims: Dims, axis: int, message: str
) -> None:
    _write(folder / "other.onnx")
    assert main(["place", "--gpus", "t4"]) == 0
    plan = (folder / "map.json").read_text().replace('"batch": 1,', '"batch": 4,')
    (folder / "map.json").write_text(plan)
    node = helper.make_node("Softmax", ["x"], ["y"], axis=axis)
    write_model(folder / "other.onnx", [node], {"x": dims}, {"y": dims})
    capsys.readouterr()
    assert main(["check", "map.json", "--allow-changed", "--json"]) == 1
    faults = {fault["where"]: fault["message"] for fault in json.loads(capsys.readouterr().out)["violations"]}
    assert message in faults["other"] and "fine" not in faults
