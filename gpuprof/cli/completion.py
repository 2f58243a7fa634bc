"""Completion of values on a command line: devices, policies, networks of the zoo, models of the database."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path


def _complete(list_names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completer of the last of the names that commas separate."""

    def complete(incomplete: str) -> list[str]:
        before, comma, word = incomplete.rpartition(",")
        with suppress(Exception):  # a shell has no place to show an error
            return [f"{before}{comma}{name}" for name in sorted(set(list_names())) if name.startswith(word)]
        return []

    return complete


def _list_devices() -> Iterable[str]:
    from gpuprof.domain.catalogue import devices

    return ["cpu", *devices()]


def _list_policies() -> Iterable[str]:
    from gpuprof.placement.policies import policy_names

    return policy_names()


def _list_networks() -> Iterable[str]:
    from gpuprof.zoo.architecture import ARCHITECTURES

    return ARCHITECTURES


def _list_map_models() -> Iterable[str]:
    from gpuprof.domain.map_file import read_map

    return read_map(Path("map.json")).models


def _list_measured_models() -> Iterable[str]:
    from gpuprof.pipeline.db import list_measured_models

    return (str(row["model"]) for row in list_measured_models().rows())


#: Completers by the kind of names; ``models``: of the database.
COMPLETERS = {
    "devices": _complete(_list_devices),
    "policies": _complete(_list_policies),
    "networks": _complete(_list_networks),
    "map models": _complete(_list_map_models),
    "measured models": _complete(_list_measured_models),
}


def complete_models(incomplete: str) -> list[str]:
    """Return the models of the database, ONNX files, and folders, which may hold ONNX files."""
    folder, slash, begun = incomplete.rpartition("/")
    names = COMPLETERS["measured models"](incomplete)
    with suppress(OSError, ValueError):
        for path in sorted(Path(f"{folder}{slash}").iterdir()):
            if path.name.startswith(begun) and not path.name.startswith("."):
                if path.is_dir():
                    names.append(f"{folder}{slash}{path.name}/")
                elif path.suffix == ".onnx":
                    names.append(f"{folder}{slash}{path.name}")
    return names
