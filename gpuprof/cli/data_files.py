"""Reads ``--input-data``: a file for all models, or one for each that is named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gpuprof.errors import InputError


def parse_data_files(texts: Iterable[str]) -> dict[str, Path]:
    """Return the files by the models' names; ``""``: for all that are not named.

    Raises `InputError` when a model is given two files.
    """
    files: dict[str, Path] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        if not separator or Path(text).exists():
            name, path = "", text
        if name in files:
            raise InputError(f"--input-data gives {name or 'all models'} two files", "write MODEL=FILE for each model")
        files[name] = Path(path)
    return files
