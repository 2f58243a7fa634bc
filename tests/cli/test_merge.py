import json
from pathlib import Path

import pytest
from onnx import helper

from gpuprof.graph.load import load_graph
from gpuprof.graph.merged_model import read_merged
from tests.command_line import CommandLine
from tests.merging.models import finetune_model, residual, save, transformer
from tests.small_models import integers, write_model


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    base = transformer()
    made = {"a": base, "b": finetune_model(base, 0.6), "other": transformer(seed=4), "image": residual()}
    return {name: str(save(model, tmp_path, name)) for name, model in made.items()}


def test_merge_writes_a_file_that_knows_its_models(models: dict[str, str], tmp_path: Path, cli: CommandLine) -> None:
    output = tmp_path / "m.onnx"
    out, err = cli("merge", models["a"], models["b"], models["image"], "-o", output, "--json")
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


def test_unrelated_models_are_left_alone(models: dict[str, str], tmp_path: Path, cli: CommandLine) -> None:
    output = tmp_path / "m.onnx"
    message = cli("merge", models["a"], models["other"], "-o", output, code=1).err
    assert "nothing to merge, so nothing is written" in message
    assert not output.exists()


def test_similarity_prints_each_pair_of_models_and_a_map(models: dict[str, str], cli: CommandLine) -> None:
    rows = cli.json("similarity", models["a"], models["b"], models["image"])
    assert [(row["first"], row["second"]) for row in rows] == [("a", "b"), ("a", "image"), ("b", "image")]
    assert rows[0]["matched"] > 0.5 > rows[1]["matched"]
    assert all(row["exact"] for row in rows)
    assert "█" in cli("similarity", models["a"], models["b"]).out


def test_the_list_has_every_network_with_its_origin(cli: CommandLine) -> None:
    rows = {row["name"]: row for row in cli.json("zoo list")}
    assert rows["resnet50"]["origin"] == "onnx"
    assert rows["resnet50"]["needs"] == ""
    assert rows["bert_base"]["needs"] == "export"


def test_a_network_is_built_where_it_is_asked(tmp_path: Path, cli: CommandLine) -> None:
    path = tmp_path / "net.onnx"
    printed = cli("zoo build squeezenet --batch 2 -o", path)
    assert load_graph(path, 2).batch == 2
    assert printed.out == "" and str(path) in printed.err


def test_a_model_is_rebatched(tmp_path: Path, cli: CommandLine) -> None:
    nodes = [helper.make_node("Reshape", ["x", "t"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": [1, 2, 3]}, {"y": [1, 6]}, {"t": integers(1, 6)})
    message = cli("zoo rebatch", path, "-o", tmp_path / "free.onnx").err
    assert "its batch was 1, 1 node changed, same outputs at batches 1 and more" in message
    assert load_graph(tmp_path / "free.onnx", 5).outputs[0].shape == (5, 6)


def test_what_was_not_run_is_not_called_the_same(tmp_path: Path, cli: CommandLine) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["batch", 2]}, {"y": ["batch", 2]})
    stderr = cli("zoo rebatch", path, "--batch 4 -o", tmp_path / "four.onnx").err
    assert "four.onnx: its batch was free already, it is 4 now, 0 nodes changed\n" in stderr
