from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.runtime.module_command import module_command

#: Named as modules of Python's library that ONNX Runtime, NumPy and multiprocessing import.
SHADOWS = ("random", "calendar", "queue", "profile")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose files have the names of library modules, and end whoever imports them."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    return tmp_path


@pytest.mark.slow
def test_a_process_takes_no_file_of_the_working_directory_for_a_library_s(folder: Path) -> None:
    model = folder / "mlp.onnx"
    assert main(["zoo", "build", "mlp", "-o", str(model)]) == 0
    command = [sys.executable, "-P", "-m", "gpuprof", "profile", "mlp.onnx", "--batch", "1", "--share", "100", "--json"]
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert completed.returncode in (0, 2), completed.stderr  # 2: the machine is too noisy
    assert [row["model"] for row in json.loads(completed.stdout)] == ["mlp"]


def test_it_does_so_where_its_parent_does_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    assert module_command("gpuprof", "x") == [sys.executable, "-P", "-m", "gpuprof", "x"]
    for folder_entry in ("", str(folder)):
        monkeypatch.setattr(sys, "path", [folder_entry, "/elsewhere"])
        assert module_command("gpuprof") == [sys.executable, "-m", "gpuprof"]
