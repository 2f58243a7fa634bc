"""Files of the user: which paths cannot be read as input, and how files are written atomically."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from gpuprof.errors import InputError

#: Where a shell puts the pipes that it makes itself, as in ``--slo-file <(command)``: those have a writer.
_OPEN_FILES = tuple(map(Path, ("/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/proc")))


def refuse_pipe(path: Path) -> Path:
    """Return a path that is to be read, unless it is a named pipe or a device.

    Opening a named pipe blocks until there is a writer, possibly for ever, and devices such as ``/dev/zero`` never end.
    A path that does not exist is returned: opening it gives the error. Raises `InputError` for a pipe or a device.
    """
    kind = describe_special_file(path)
    if kind is not None:
        raise InputError(f"cannot read {path}: it is {kind}, which may never end", "give the path of a file")
    return path


def describe_special_file(path: Path) -> str | None:
    """Name the kind of an existing path that is neither a file nor a folder; None for pipes that a shell opened."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    if _is_open_already(path):
        return None
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else None


def _is_open_already(path: Path) -> bool:
    return any(path == folder or folder in path.parents for folder in _OPEN_FILES)


def refuse_to_replace(path: Path) -> Path:
    """Return a path that a finished file is to be moved to, unless it is a device or a pipe.

    Raises `InputError` when it is: if root runs this, the file would replace, say, ``/dev/null``.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"cannot write {path}: it is {describe_special_file(path) or 'no file'}", "name a file")
    return path


def find_write_obstacle(folder: Path) -> str | None:
    """Return why no file can be created in an existing folder, None where one can.

    Permission bits are not enough: root passes them all, in ``/proc`` and on a full disk, too.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        return "permission denied"
    try:
        Path(tempfile.mkdtemp(dir=folder, prefix=".gpuprof-")).rmdir()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, readable for all.

    A device, such as ``/dev/null``, is written to and stays one, and so is ``/dev/stdout``, which root could replace
    even where it leads to a file. Of a symbolic link the file that it leads to is replaced.

    Raises `OSError` when the folder cannot be written to, or the disk is full.
    """
    if _is_open_already(path) or (path.exists() and not path.is_file()):
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))
    # In the same folder: a rename replaces the old file in one step only within a file system.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)  # temporary files are for their owner alone
        Path(temporary).replace(path)
    except BaseException:  # Ctrl-C, too, must leave nothing behind
        Path(temporary).unlink(missing_ok=True)
        raise
