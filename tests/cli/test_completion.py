"""Values that a shell completes, as typer asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuprof.cli.options import complete_devices, complete_models, complete_policies


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
    assert "v100,h200" in complete_devices("v100,h20")
    assert "ffd,parvagpu" in complete_policies("ffd,parva")


def test_onnx_files_and_folders_are_completed_without_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUPROF_DB", str(tmp_path / "none"))
    (tmp_path / "models").mkdir()
    for name in ("net.onnx", "notes.txt", "models/other.onnx"):
        (tmp_path / name).touch()
    assert complete_models("") == ["models/", "net.onnx"]
    assert complete_models("models/") == ["models/other.onnx"]
    assert complete_models("nowhere/") == []
