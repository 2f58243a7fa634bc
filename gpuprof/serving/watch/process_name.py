"""Names a process that was forked as if it had been started with a command line of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

#: An argument for a process whose children want names: long enough for theirs.
PADDING = " " * 200
_ARG_START, _ARG_END = 45, 46  # of the fields of /proc/self/stat after the name in brackets


def name_process(words: Sequence[str]) -> None:
    """Let ``ps`` show this process with the command line ``words``, cut to the length of its own.

    Linux reads a command line where the program was given it, so that is what is written over. Nothing happens where
    it does not say where that is.
    """
    with suppress(OSError, IndexError, ValueError):
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        start, length = int(fields[_ARG_START]), int(fields[_ARG_END]) - int(fields[_ARG_START])
        if start and length > 1:
            text = "\0".join(words).encode()[: length - 1]
            ctypes.memmove(start, text.ljust(length, b"\0"), length)
