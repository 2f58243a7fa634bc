"""Which paths are no input, since reading them may never end."""

from __future__ import annotations

import stat
from pathlib import Path

from gpuprof.errors import InputError

#: Where a shell puts the pipes that it makes itself, as in ``--slo-file <(command)``: those have a writer.
_OPEN_FILES = (Path("/dev/fd"), Path("/dev/stdin"), Path("/proc"))


def refuse_pipe(path: Path) -> Path:
    """Return a path that is to be read, unless it is a named pipe or a device.

    Whoever opens a named pipe waits for a writer, who may never come, and devices such as ``/dev/zero`` never end.
    What is not there is left to whoever opens it.

    Raises
    ------
    InputError
        When it is one of them.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return path
    if any(path == folder or folder in path.parents for folder in _OPEN_FILES):
        return path
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        what = "a named pipe" if stat.S_ISFIFO(mode) else "a device"
        raise InputError(f"cannot read {path}: it is {what}, which may never end", "give the path of a file")
    return path
