from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpuprof.runtime.module_command import module_command

#: Named as modules of Python's library that ONNX Runtime, NumPy and multiprocessing import.
SHADOWS = ("random", "calendar", "queue", "profile")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose files have the names of library modules, and end whoever imports them."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    return tmp_path


def test_it_does_so_where_its_parent_does_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    assert module_command("gpuprof", "x") == [sys.executable, "-P", "-m", "gpuprof", "x"]
    for folder_entry in ("", str(folder)):
        monkeypatch.setattr(sys, "path", [folder_entry, "/elsewhere"])
        assert module_command("gpuprof") == [sys.executable, "-m", "gpuprof"]
