"""Completion of values on a command line: devices, policies, networks of the zoo, models of the database.

Errors complete nothing: a shell has no place to show them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from pathlib import Path


def _quietly(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completer of the last of the names that commas separate."""

    @wraps(names)
    def complete(incomplete: str) -> list[str]:
        before, comma, word = incomplete.rpartition(",")
        with suppress(Exception):
            return [f"{before}{comma}{name}" for name in sorted(set(names())) if name.startswith(word)]
        return []

    complete.__annotations__ = {"incomplete": str, "return": list[str]}
    del complete.__wrapped__  # typer reads the signature of the wrapped function
    return complete


@_quietly
def complete_devices() -> Iterable[str]:
    """Return the devices of the catalogue, and the CPU."""
    from gpuprof.domain.catalogue import devices

    return ["cpu", *devices()]


@_quietly
def complete_policies() -> Iterable[str]:
    """Return the built-in and the installed policies."""
    from gpuprof.placement.policies import policy_names

    return policy_names()


@_quietly
def complete_networks() -> Iterable[str]:
    """Return the networks of the zoo."""
    from gpuprof.zoo.architecture import ARCHITECTURES

    return ARCHITECTURES


@_quietly
def complete_measured_models() -> Iterable[str]:
    """Return the models of the database that verbs read by default."""
    from gpuprof.pipeline.db import list_measured_models

    return (str(row["model"]) for row in list_measured_models().rows())


def complete_models(incomplete: str) -> list[str]:
    """Return the models of the database, ONNX files, and folders, which may hold ONNX files."""
    names = complete_measured_models(incomplete)
    with suppress(OSError, ValueError):
        folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
        shown = incomplete[: incomplete.rfind("/") + 1]
        for path in sorted(folder.iterdir()):
            name = f"{shown}{path.name}" + ("/" if path.is_dir() else "")
            if (
                name.startswith(incomplete)
                and not path.name.startswith(".")
                and (path.is_dir() or path.suffix == ".onnx")
            ):
                names.append(name)
    return names


def complete_map_models(incomplete: str) -> list[str]:
    """Return the models of the map in the current folder."""
    with suppress(Exception):
        from gpuprof.domain.map_file import read_map

        return sorted(name for name in read_map(Path("map.json")).models if name.startswith(incomplete))
    return []
