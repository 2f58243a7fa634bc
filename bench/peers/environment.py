"""Environments of their own for other servers: never ours, and never one with CUDA."""

from __future__ import annotations

import json
import re
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

#: Where they are kept for the next run.
CACHE = Path.home() / ".cache" / "gpuprof" / "peers"
_UNWANTED = re.compile(r"torch|torchvision|triton|nvidia-.*|cuda-.*")
_MARK = "installed.json"


class PeerMissingError(Exception):
    """A peer cannot be installed or started, with the reason."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment: its name, and what pip is asked to install there; ``alone`` without what that asks for."""

    name: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()

    def python(self, cache: Path = CACHE) -> Path:
        """Return its interpreter; it is made when it is first asked for.

        Raises
        ------
        PeerMissingError
            When the packages are not to be had, or would bring CUDA.
        """
        home = cache / self.name
        python, mark = home / "bin" / "python", home / _MARK
        wanted = json.dumps((self.packages, self.alone))
        if mark.is_file() and mark.read_text() == wanted:
            return python
        venv.create(home, with_pip=True, clear=True)
        self._refuse_cuda(python)
        self._pip(python, *self.packages)
        if self.alone:
            self._pip(python, "--no-deps", *self.alone)
        mark.write_text(wanted)
        return python

    def _refuse_cuda(self, python: Path) -> None:
        report = json.loads(self._pip(python, "--dry-run", "--report", "-", *self.packages))
        names = [entry["metadata"]["name"].lower() for entry in report["install"]]
        heavy = sorted(name for name in names if _UNWANTED.fullmatch(name))
        if heavy:
            raise PeerMissingError(f"{self.name} would bring {', '.join(heavy)}")

    def _pip(self, python: Path, *words: str) -> str:
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *words]
        completed = subprocess.run(command, capture_output=True, text=True)
        if completed.returncode:
            lines = [line for line in completed.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            raise PeerMissingError(f"{self.name} cannot be installed: {lines[-1]}")
        return completed.stdout
