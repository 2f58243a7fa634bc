"""Machine access and findings of ``gpuprof doctor``.

All access goes through a `MachineView`, so that a test can simulate any machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

#: Time for an answer of a tool or the driver: a first start of CUDA on a cold disk takes tens of seconds.
ANSWER_S = 120.0


class Status(StrEnum):
    """Usability of a component."""

    OK = "ok"
    LIMITED = "limited"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the doctor's report."""

    topic: str  #: ``"gpu"``, ``"profilers"``, ``"runtime"``, ``"cpu"`` or ``"storage"``.
    name: str  #: Component examined.
    status: Status
    detail: str  #: Result of the examination.
    fix: str = ""  #: Remedy; empty when nothing is wrong.


def _load_module(name: str) -> Any:
    try:
        return import_module(name)
    # For example ONNX Runtime built for another NumPy: its extension may raise anything.
    except Exception:  # a broken library must not end the examination, whatever the error
        return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirements(distribution: str) -> Sequence[str]:
    with suppress(metadata.PackageNotFoundError):
        return metadata.requires(distribution) or ()
    return ()


def _execute_command(command: Sequence[str]) -> str | None:
    """Return the output of the command, or None when the command cannot be started, fails or hangs."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout if process.returncode == 0 else None


def _affinity() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class MachineView:
    """Access to a machine, replaceable in tests."""

    root: Path = Path("/")  #: Root of its file system.
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    which: Callable[[str], str | None] = shutil.which  #: Name of a program → its path, or None.
    load: Callable[[str], Any] = _load_module  #: Name of a module → the module; None: import failed.
    #: Name of a distribution → its version; None: not installed.
    version: Callable[[str], str | None] = _version
    #: Name of a distribution → its requirements, in the words of its metadata.
    requirements: Callable[[str], Sequence[str]] = _requirements
    affinity: Callable[[], Sequence[int]] = _affinity  #: → processors available to this process.
    #: Command → its output; None: cannot be started, fails or hangs.
    execute: Callable[[Sequence[str]], str | None] = _execute_command
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)

    def read_text(self, path: str) -> str:
        """Return the text of the file at ``path`` below the root; empty when unreadable."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
