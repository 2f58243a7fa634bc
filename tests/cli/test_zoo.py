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


def test_the_list_fits_eighty_columns_and_says_below_it_what_is_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["zoo", "list"]) == 0
    shown = capsys.readouterr()
    assert max(map(len, shown.out.splitlines())) <= 80
    (line,) = (line for line in shown.out.splitlines() if line.startswith("resnet50"))
    assert line.split()[-4:] == ["gpu_0/data_0", "[3,", "224,", "224]"]  # in one line
    assert shown.err == "gpuprof: networks of transformers need the extra export to be built\n"


def test_a_network_is_built_where_it_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.onnx"
    assert main(["zoo", "build", "squeezenet", "-o", str(path), "--batch", "2"]) == 0
    assert load_graph(path, 2).batch == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(path) in said.err


def test_an_unknown_network_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "build", "squeezenat"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("gpuprof: unknown network of the zoo 'squeezenat' (did you mean squeezenet")
    assert error.count("\n") == 1


@pytest.mark.parametrize("batch", ["0", "-1", "two", "1.5", ""])
def test_a_batch_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: str) -> None:
    assert main(["zoo", "build", "squeezenet", "-o", str(tmp_path / "m.onnx"), f"--batch={batch}"]) == 3
    assert f"--batch must be a number from 1 to 65,536, or 'dynamic', but is {batch!r}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
    said = capsys.readouterr().err
    assert "four.onnx: its batch was free already, it is 4 now, 0 nodes changed\n" in said


def test_what_is_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    path.write_text("not a model")
    assert main(["zoo", "rebatch", str(path), "-o", str(tmp_path / "free.onnx")]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is not an ONNX model" in error
