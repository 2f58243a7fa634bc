"""Command that starts gpuprof's child processes."""

from __future__ import annotations

import sys
from pathlib import Path

#: Time for an answer of a tool or the driver: a first start of CUDA on a cold disk takes tens of seconds.
ANSWER_S = 120.0
#: Time for a running process to answer or to end.
REACTION_S = 5.0


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter.

    ``python -m`` searches the working directory first. Unless this process does so too, a file there with the name of a
    library's module, such as ``profile.py``, must not shadow the module.
    """
    isolated = [] if sys.path[0] in ("", str(Path.cwd())) else ["-P"]
    return [sys.executable, *isolated, "-m", module, *arguments]
