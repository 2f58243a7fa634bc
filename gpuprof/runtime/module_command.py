"""Command that starts gpuprof's child processes."""

from __future__ import annotations

import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter.

    ``python -m`` searches the working directory first. Unless this process does so too, a file there with the name of a
    library's module, such as ``profile.py``, must not shadow the module.
    """
    isolated = [] if sys.path[0] in ("", str(Path.cwd())) else ["-P"]
    return [sys.executable, *isolated, "-m", module, *arguments]
