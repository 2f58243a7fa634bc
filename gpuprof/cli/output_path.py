"""Checks that an output can be written before the work that produces it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from gpuprof.domain.file_access import describe_special_file, find_write_obstacle
from gpuprof.errors import InputError


def check_output_file(path: Path | None) -> Path | None:
    """Return the path of a file to write, as the callback of an option.

    Raises `InputError` when it is a directory or a named pipe, its directory is not there, or nothing may be written to
    it.
    """
    if path is None:
        return None
    folder = path.absolute().parent
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a directory", "name a file in it")
    if path.is_fifo() and describe_special_file(path):
        raise InputError(f"cannot write {path}: it is a named pipe, which nobody may read", "name a file")
    if not folder.is_dir():
        what = "is no directory" if folder.exists() else "does not exist"
        raise InputError(f"cannot write {path}: {folder} {what}", "name a file in a directory that exists")
    if path.exists():
        obstacle = None if os.access(path, os.W_OK) else "permission denied"
    else:
        obstacle = find_write_obstacle(folder)
    if obstacle is not None:
        raise InputError(f"cannot write {path}: {obstacle}", "name a file that you may write")
    return path


def check_output_folder(path: Path | None) -> Path | None:
    """Return the path of a directory to write into, which is made where it is missing, as the callback of an option.

    Raises `InputError` when it is a file or below one, or may not be made or written to.
    """
    if path is None:
        return None
    nearest = path.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise InputError(f"cannot write to {path}: {nearest} is no directory", "name another directory")
    if (obstacle := find_write_obstacle(nearest)) is not None:
        raise InputError(f"cannot write to {path}: {obstacle}", "name a directory that you may write to")
    return path


def output_option(text: str, **more: Any) -> Any:
    """Return the option ``-o``, ``--output`` for a file that a command writes, with ``text`` as its help."""
    return typer.Option("-o", "--output", callback=check_output_file, help=text, **more)
