import json
from pathlib import Path

import pytest
from onnx import helper

from gpuprof.cli.main import main
from gpuprof.graph.load import load_graph
from gpuprof.graph.merged_model import read_merged
from tests.merging.models import finetune_model, residual, save, transformer
from tests.small_models import integers, write_model


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    base = transformer()
    made = {"a": base, "b": finetune_model(base, 0.6), "other": transformer(seed=4), "image": residual()}
    return {name: str(save(model, tmp_path, name)) for name, model in made.items()}


def test_merge_writes_a_file_that_knows_its_models(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "m.onnx"
    assert main(["merge", models["a"], models["b"], models["image"], "-o", str(output), "--json"]) == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)
    assert row["models"] == ["a", "b"]
    assert row["weight_bytes_after"] < row["weight_bytes_before"]
    assert row["largest_difference"] <= 1e-4
    assert ["matmul11", "matmul11"] in [group["operators"] for group in row["report"]]
    assert {output["output"] for output in row["outputs"]} == {"logits"}
    assert "image is not merged: no other model has an architecture like it" in err
    described = read_merged(output)
    assert described is not None
    assert [member.name for member in described.members] == ["a", "b"]


def test_unrelated_models_are_left_alone(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "m.onnx"
    assert main(["merge", models["a"], models["other"], "-o", str(output)]) == 1
    assert "nothing to merge, so nothing is written" in capsys.readouterr().err
    assert not output.exists()


def test_similarity_prints_each_pair_of_models_and_a_map(
    models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["similarity", models["a"], models["b"], models["image"], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["first"], row["second"]) for row in rows] == [("a", "b"), ("a", "image"), ("b", "image")]
    assert rows[0]["matched"] > 0.5 > rows[1]["matched"]
    assert all(row["exact"] for row in rows)
    assert main(["similarity", models["a"], models["b"]]) == 0
    assert "█" in capsys.readouterr().out


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
