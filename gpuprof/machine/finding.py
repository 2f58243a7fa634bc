"""What ``gpuprof doctor`` reads of a machine, and the findings it reports.

Everything that is looked at goes through a `MachineView`, so that a test can play any machine.
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

_TIMEOUT_S = 120.0  # a first start of CUDA on a cold disk takes tens of seconds


class Status(StrEnum):
    """Whether something can be used."""

    OK = "ok"
    LIMITED = "limited"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    topic: str  #: ``"gpu"``, ``"profilers"``, ``"runtime"``, ``"cpu"`` or ``"storage"``.
    name: str  #: What was looked at.
    status: Status
    detail: str  #: What was found.
    fix: str = ""  #: What to do about it; empty when nothing is wrong.


def _load_module(name: str) -> Any:
    try:
        return import_module(name)
    # Such as ONNX Runtime against another NumPy, which ends in whatever its extension raises.
    except Exception:  # a broken library must not break the look at it, whatever it raises
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
    """Return what the command prints, or None when it cannot be run, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _affinity() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class MachineView:
    """Access to a machine, replaceable in tests."""

    root: Path = Path("/")  #: Root of its file system.
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    which: Callable[[str], str | None] = shutil.which  #: Name of a program → its path, or None.
    load: Callable[[str], Any] = _load_module  #: Name of a module → the module, or None when it cannot be imported.
    #: Name of a distribution → its version, or None when it is not installed.
    version: Callable[[str], str | None] = _version
    #: Name of a distribution → its requirements, in the words of its metadata.
    requirements: Callable[[str], Sequence[str]] = _requirements
    affinity: Callable[[], Sequence[int]] = _affinity  #: → the processors that this process may run on.
    #: A command → what it prints, or None when it cannot be run, fails or hangs.
    execute: Callable[[Sequence[str]], str | None] = _execute_command
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)

    def read_text(self, path: str) -> str:
        """Return the text of the file at ``path`` below the root; empty when it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
