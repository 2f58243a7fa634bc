"""Checks that a model's file is the file of the plan."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gpuprof.domain.file_access import refuse_pipe
from gpuprof.errors import InputError


def check_model_file(path: Path, planned_sha256: str) -> None:
    """Check that a file, with its external data, is the file that was profiled and placed.

    ``planned_sha256``: from the map; empty: unknown. Raises `InputError` for another file: the predicted times and
    memory do not hold for it.
    """
    if not planned_sha256:
        return
    try:
        with refuse_pipe(path).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if sha256 != planned_sha256 and _sha256_with_data(path) != planned_sha256:
        raise InputError(
            f"{path} is not the file that the map was planned with: its sha256 is {sha256[:12]}… but the map has "
            f"{planned_sha256[:12]}…",
            "profile and place it anew; or serve it as it is with --allow-changed",
        )


def _sha256_with_data(path: Path) -> str:
    """Return the hash of a file with its external data, which needs the package onnx."""
    from gpuprof.graph.file import read_onnx

    try:
        return read_onnx(path).sha256
    except InputError:  # a damaged file differs in any case
        return ""
