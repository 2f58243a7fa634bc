"""Programs that behave as a profiler does, well or badly."""

import stat
from pathlib import Path


def write_program(path: Path, body: str) -> Path:
    """A shell script that can be executed."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
