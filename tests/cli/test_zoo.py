from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import helper

from gpuprof.cli.main import main
from gpuprof.graph.load import load_graph
from tests.small_models import integers, write_model


def test_the_list_has_every_network_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["resnet50"]["origin"] == "onnx"
    assert rows["resnet50"]["needs"] == ""
    assert rows["bert_base"]["needs"] == "export"


def test_a_network_is_built_where_it_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.onnx"
    assert main(["zoo", "build", "squeezenet", "-o", str(path), "--batch", "2"]) == 0
    assert load_graph(path, 2).batch == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(path) in captured.err


def test_a_model_is_rebatched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [helper.make_node("Reshape", ["x", "t"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": [1, 2, 3]}, {"y": [1, 6]}, {"t": integers(1, 6)})
    assert main(["zoo", "rebatch", str(path), "-o", str(tmp_path / "free.onnx")]) == 0
    assert load_graph(tmp_path / "free.onnx", 5).outputs[0].shape == (5, 6)
    assert "its batch was 1, 1 node changed, same outputs at batches 1 and more" in capsys.readouterr().err


def test_what_was_not_run_is_not_called_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["batch", 2]}, {"y": ["batch", 2]})
    assert main(["zoo", "rebatch", str(path), "--batch", "4", "-o", str(tmp_path / "four.onnx")]) == 0
    stderr = capsys.readouterr().err
    assert "four.onnx: its batch was free already, it is 4 now, 0 nodes changed\n" in stderr
