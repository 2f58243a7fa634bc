"""Options of verbs from a YAML file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuprof.cli.main import main


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUPROF_DB", raising=False)
    assert main(["zoo", "build", "random_mlp", "-o", "net.onnx"]) == 0


_GIVEN = """\
estimate:
  models: [net.onnx]
  batch: [1, 4]
  device: a100-80
  json: true
zoo:
  build:
    seed: 3
"""


def _batches(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, int]]:
    return [(row["device"], row["batch"]) for row in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize(
    "words", [["estimate", "--config", "run.yaml"], ["--config=run.yaml", "estimate"]], ids=["behind", "before"]
)
def test_what_the_command_line_leaves_out_is_read_from_the_file(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(_GIVEN)
    assert main(words) == 0
    assert _batches(capsys) == [("a100-80", 1), ("a100-80", 4)]
    assert main([*words, "--batch", "2"]) == 0  # the command line has the last word
    assert _batches(capsys) == [("a100-80", 2)]


def test_the_commands_of_a_group_have_options_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(_GIVEN)
    assert main(["zoo", "build", "random_mlp", "-o", "third.onnx", "--config", "run.yaml"]) == 0
    assert main(["zoo", "build", "random_mlp", "-o", "same.onnx", "--seed", "3"]) == 0
    assert Path("third.onnx").read_bytes() == Path("same.onnx").read_bytes() != Path("net.onnx").read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("estimate:\n  batc: 1\n", "run.yaml:2: unknown option of estimate 'batc' (did you mean batch?)"),
        ("estimat:\n  batch: 1\n", "run.yaml:1: unknown verb 'estimat' (did you mean estimate?)"),
        ("estimate:\n  batch: {a: 1}\n", "run.yaml:2: an option takes a value or a list of values"),
        ("estimate:\n  json: maybe\n", "run.yaml:2: as_json takes true or false but got 'maybe'"),
        ("estimate: 5\n", "run.yaml:1: expected an option on each line"),
        ("- estimate\n", "run.yaml:1: expected a verb on each line"),
        ("estimate: [\n", "run.yaml:2 is not YAML"),
    ],
)
def test_what_is_wrong_in_the_file_is_told_with_its_line(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(text)
    assert main(["estimate", "--config", "run.yaml"]) == 3
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--config"], "takes one file but got 0"), (["--config", "none.yaml"], "cannot read none.yaml")],
)
def test_a_file_that_is_not_there_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *words]) == 3
    assert said in capsys.readouterr().err
