"""The command by which gpuprof starts its child processes."""

from __future__ import annotations

import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter.

    ``python -m`` looks for every module in the working directory first. Unless this process does so, too, a file there
    that is named as a library's module, as ``profile.py`` is, must not be taken for it.
    """
    isolated = [] if "" in sys.path or str(Path.cwd()) in sys.path else ["-P"]
    return [sys.executable, *isolated, "-m", module, *arguments]
