"""Locations of a map's model files, and a check that they are unchanged since planning.

A map records the name, path and sha256 of each model; relative paths start at the map's own folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap, RequestedModel


def locate_files(deployment: DeploymentMap, folder: Path) -> DeploymentMap:
    """Return a map from a file in ``folder`` with full paths for the model files in the folder."""

    def find(path: str | None) -> str | None:
        return str((folder / path).resolve()) if path is not None and (folder / path).is_file() else path

    return _with_paths(deployment, find)


def relate_files(deployment: DeploymentMap, folder: Path) -> DeploymentMap:
    """Return a map for a file in ``folder``: relative paths, which count from here, count from there."""

    def relate(path: str | None) -> str | None:
        if path is None or Path(path).is_absolute() or not Path(path).is_file():
            return path
        return os.path.relpath(path, folder)

    return _with_paths(deployment, relate)


def model_paths(deployment: DeploymentMap) -> dict[str, Path]:
    """Return the existing files of a map's models, and of their members, by their names in the kernel database."""
    return {
        model.source_model or name: Path(model.path)
        for name, model in _all_models(deployment)
        if model.path is not None and Path(model.path).is_file()
    }


def find_changed(deployment: DeploymentMap) -> Iterator[tuple[str, str]]:
    """Yield the models of a located map whose file changed since planning, and a message.

    Unreadable files are treated as changed; missing files are skipped.
    """
    from gpuprof.graph.file import read_onnx

    for name, model in _all_models(deployment):
        if model.path is None or not model.sha256 or not Path(model.path).is_file():
            continue
        try:
            sha256 = read_onnx(Path(model.path)).sha256
        except InputError as error:
            yield name, f"{model.path} is not the file that the map was planned with: {error.message}"
            continue
        if sha256 != model.sha256:
            yield (
                name,
                f"{model.path} is not the file that the map was planned with: its sha256 is {sha256[:12]}… but the map "
                f"has {model.sha256[:12]}…",
            )


def require_planned_files(deployment: DeploymentMap) -> None:
    """Check that the files of a located map are unchanged since planning.

    Raises `InputError` for a changed file: its predicted times no longer hold.
    """
    for _, change in find_changed(deployment):
        raise InputError(change, "profile and place it anew; or take it as it is with --allow-changed")


def _all_models(deployment: DeploymentMap) -> Iterator[tuple[str, RequestedModel]]:
    for name, model in deployment.models.items():
        yield name, model
        yield from model.members.items()


def _with_paths(deployment: DeploymentMap, change: Callable[[str | None], str | None]) -> DeploymentMap:
    models = {}
    for name, model in deployment.models.items():
        members = {
            member: demand.model_copy(update={"path": change(demand.path)}) for member, demand in model.members.items()
        }
        models[name] = model.model_copy(update={"path": change(model.path), "members": members})
    return deployment.model_copy(update={"models": models})
