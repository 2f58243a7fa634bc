"""Gives a forked process a command line of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

#: Argument that reserves room for the command lines of forked children.
PADDING = " " * 200
_ARG_START, _ARG_END = 45, 46  # of the fields of /proc/self/stat after the name in brackets


def name_process(words: Sequence[str]) -> None:
    """Make ``ps`` show this process with the command line ``words``, cut to the length of its own.

    Linux reads the command line from the process's memory, which this function overwrites. Without the address,
    nothing happens.
    """
    with suppress(OSError, IndexError, ValueError):
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        start, length = int(fields[_ARG_START]), int(fields[_ARG_END]) - int(fields[_ARG_START])
        if start and length > 1:
            text = "\0".join(words).encode()[: length - 1]
            ctypes.memmove(start, text.ljust(length, b"\0"), length)
