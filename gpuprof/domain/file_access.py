"""Access to the user's files: refusal of special files as input, and atomic writing."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuprof.errors import InputError, refuse_unwritable

#: Files are parsed as a whole, into objects several times as large.
_MAX_INPUT_BYTES = 512 << 20
#: Folders of the pipes created by a shell, as in ``--slo-file <(command)``, which always have a writer.
_OPEN_FILES = tuple(map(Path, ("/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/proc")))


def refuse_pipe(path: Path) -> Path:
    """Return the path of an input file. Raises `InputError` for a named pipe or a device.

    Opening a named pipe blocks until there is a writer, possibly for ever, and devices such as ``/dev/zero`` never end.
    A missing path is returned: opening the path raises the error.
    """
    kind = describe_special_file(path)
    if kind is not None:
        raise InputError(f"cannot read {path}: it is {kind}, which may never end", "give the path of a file")
    return path


def read_input(path: Path, fix: str) -> bytes:
    """Return the content of a file that the user named.

    Raises `InputError`, with the remedy ``fix``, for a file that cannot be read or is larger than any input.
    """
    try:
        if refuse_pipe(path).stat().st_size > _MAX_INPUT_BYTES:
            raise InputError(f"cannot read {path}: larger than {_MAX_INPUT_BYTES >> 20} MiB", fix)
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", fix) from None


def decode_text(content: bytes, path: Path, errors: str = "strict") -> str:
    """Return the text of a file: UTF-8 or, as PowerShell writes, UTF-16, with or without a byte-order mark.

    Raises `InputError` for bytes that are no text, unless ``errors`` is ``"replace"``.
    """
    encoding = "utf-8-sig"
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    elif b"\x00" in content[:64]:
        encoding = "utf-16-le" if content[1:2] == b"\x00" else "utf-16-be"
    try:
        return content.decode(encoding, errors)
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file in UTF-8", "save it as UTF-8") from None


def describe_special_file(path: Path) -> str | None:
    """Return the kind of a pipe or device; None for other paths and for pipes opened by a shell."""
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
    """Return the destination of a finished file. Raises `InputError` for a device or a pipe.

    With root's permissions, the file would replace, say, ``/dev/null``.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"cannot write {path}: it is {describe_special_file(path) or 'no file'}", "name a file")
    return path


@contextmanager
def write_beside(path: Path, fix: str) -> Iterator[Path]:
    """Yield the path of a new file, moved to ``path`` at the end, after all files that were written beside it.

    So a model becomes visible after its data files. Nothing is moved after an exception.

    Raises `InputError` for a directory, a device or a pipe and, with the remedy ``fix``, where it is not writable.
    """
    if path.is_dir():
        raise InputError(f"{path} is a directory", "give the name of the file to write")
    with (
        refuse_unwritable(refuse_to_replace(path), fix),
        tempfile.TemporaryDirectory(prefix=".gpuprof-", dir=path.parent) as folder,
    ):
        new = Path(folder, path.name)
        yield new
        for file in sorted(new.parent.iterdir(), key=lambda file: file == new):
            file.replace(path.parent / file.name)


def find_write_obstacle(folder: Path) -> str | None:
    """Return the reason why files cannot be created in an existing folder, None where they can.

    Permission bits are not sufficient: root passes them even in ``/proc`` and on a full disk.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        return "permission denied"
    try:
        Path(tempfile.mkdtemp(dir=folder, prefix=".gpuprof-")).rmdir()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically, readable for all users.

    Devices, such as ``/dev/null``, and ``/dev/stdout`` are written to, not replaced. The target of a symbolic link is
    replaced, not the link.

    Raises `OSError` when the folder is not writable, or the disk is full.
    """
    if _is_open_already(path) or (path.exists() and not path.is_file()):
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))
    # In the same folder: a rename is atomic only within a file system.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)  # temporary files are created for their owner alone
        Path(temporary).replace(path)
    except BaseException:  # Ctrl-C, too, must leave nothing behind
        Path(temporary).unlink(missing_ok=True)
        raise
