from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.graph.merged_model import read_merged
from tests.merging.models import finetune_model, residual, save, transformer


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
