"""Values that a shell completes, as typer asks for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuprof.cli.options import COMPLETERS, complete_models
from tests.export.test_export import MAP


def _complete(words: str, folder: Path, **environment: str) -> list[str]:
    variables: Mapping[str, str] = {
        **os.environ,
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - (not words.endswith(" "))),
        "_GPUPROF_COMPLETE": "complete_bash",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **environment,
    }
    command = [sys.executable, "-m", "gpuprof"]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True).stdout.split()


def test_a_shell_completes_devices(tmp_path: Path) -> None:
    assert "a100-80" in _complete("gpuprof estimate --device a100", tmp_path)


def test_the_last_of_several_is_completed() -> None:
    assert COMPLETERS["devices"]("v100,h20") == ["v100,h20", "v100,h200"] or "v100,h200" in (
        COMPLETERS["devices"]("v100,h20")
    )
    assert "ffd,parvagpu" in COMPLETERS["policies"]("ffd,parva")


def test_networks_models_of_the_map_and_files_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUPROF_DB", raising=False)
    (tmp_path / "models").mkdir()
    for name in ("net.onnx", "notes.txt", "models/other.onnx"):
        (tmp_path / name).touch()
    (tmp_path / "map.json").write_text(json.dumps(json.loads(MAP.to_json())))
    assert COMPLETERS["networks"]("resn") == [n for n in COMPLETERS["networks"]("") if n.startswith("resn")]
    assert "resnet50" in COMPLETERS["networks"]("resn")
    assert complete_models("") == ["models/", "net.onnx"]
    assert complete_models("models/") == ["models/other.onnx"]
    assert COMPLETERS["map models"]("") == ["Net/A", "b"]


def test_nothing_is_completed_and_nothing_fails_where_there_is_no_database_and_no_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUPROF_DB", str(tmp_path / "none"))
    assert COMPLETERS["measured models"]("") == COMPLETERS["map models"]("") == []
    assert complete_models("nowhere/") == []
