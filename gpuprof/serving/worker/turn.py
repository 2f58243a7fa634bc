"""Turns of worker processes that share a part of a device in time: one batch runs at once, first come, first served.

The processes meet in a file, by locks of its bytes, which the kernel releases when a process dies. Each takes the
next number, locks the byte of that number, and waits for the byte of the previous number. This is a queue without
overtaking, even by the worker that has just had its turn. Plain locks of a whole file guarantee no order.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from hashlib import sha256
from pathlib import Path

_NUMBER_BYTES = 8


class _Byte(IntEnum):
    """Locked bytes: by all users of the file, to take a number, and to run a batch; then a byte for each number."""

    USERS = 0
    NUMBERS = 1
    RUNNING = 2
    FIRST = 3


class Turn:
    """The turn of this process, as a context: entering waits for the turn, leaving passes it on.

    ``file``: descriptor of the shared file. No other descriptor of the file may be closed in this process: closing
    would release its locks.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._number = 0

    def __enter__(self) -> Turn:
        """Wait for all earlier turns."""
        self._lock(_Byte.NUMBERS)
        try:
            self._number = int.from_bytes(os.pread(self._file, _NUMBER_BYTES, 0), "little")
            os.pwrite(self._file, (self._number + 1).to_bytes(_NUMBER_BYTES, "little"), 0)
            self._lock(_Byte.FIRST + self._number)  # before another process can take the next number
        finally:
            self._release(_Byte.NUMBERS)
        if self._number:
            self._lock(_Byte.FIRST + self._number - 1)
            self._release(_Byte.FIRST + self._number - 1)
        self._lock(_Byte.RUNNING)  # the death of a waiting process may have let this process pass a running batch
        return self

    def __exit__(self, *_: object) -> None:
        """Pass the turn on."""
        self._release(_Byte.RUNNING)
        self._release(_Byte.FIRST + self._number)

    def _lock(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, byte)

    def _release(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


@contextmanager
def open_turns(group: str) -> Iterator[Turn]:
    """Join the turn group of this machine; the last process to leave removes its file."""
    path = Path(tempfile.gettempdir()) / f"gpuprof-turns-{os.getuid()}-{sha256(group.encode()).hexdigest()[:16]}"
    file = _open_shared(path)
    try:
        yield Turn(file)
    finally:
        # Released before the exclusive lock: two processes that leave at once would otherwise block each other.
        fcntl.lockf(file, fcntl.LOCK_UN, 1, _Byte.USERS)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _Byte.USERS)
        except OSError:
            pass  # other processes use it, or the last of them is about to remove it
        else:
            if os.fstat(file).st_nlink:  # else the file was removed already, and its name belongs to a new file
                path.unlink()
        os.close(file)


def _open_shared(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.lockf(file, fcntl.LOCK_SH, 1, _Byte.USERS)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # removed by the last earlier user, after it was opened here
