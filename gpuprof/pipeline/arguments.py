"""Arguments given as a file's path or as its content, and the locations of a map's model files.

A map records the name, path and sha256 of each model; relative paths start at the map's own folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pydantic import InstanceOf

from gpuprof.domain.demand import Demand, DemandFile, read_demands, require_possible
from gpuprof.domain.deployment import DeploymentMap, read_map
from gpuprof.domain.fleet import Fleet
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap, RequestedModel

#: A file or folder.
PathArgument: TypeAlias = str | os.PathLike[str]
#: A deployment map, or the path of its file.
MapArgument: TypeAlias = DeploymentMap | PathArgument
#: Demands, or the path of their slo.csv.
DemandsArgument: TypeAlias = InstanceOf[DemandFile] | Sequence[Demand] | PathArgument
#: Devices: a fleet, the path of a fleet.toml, or text in the form of ``--gpus``: ``"a100-80:8,v100"``.
FleetArgument: TypeAlias = Fleet | os.PathLike[str] | str


def name_models(models: Sequence[PathArgument] | PathArgument) -> list[str]:
    """Return the names or files of models as a list; a single model may be given without one."""
    return [str(model) for model in ((models,) if isinstance(models, str | os.PathLike) else models)]


def optional_path(path: PathArgument | None) -> Path | None:
    """Return a string or path as a path, and None as None."""
    return None if path is None else Path(path)


def resolve_map(source: MapArgument) -> DeploymentMap:
    """Return the map, read from its file if a path is given. Raises `InputError` when the file holds no map."""
    return source if isinstance(source, DeploymentMap) else read_map(Path(source))


def map_folder(source: MapArgument) -> Path:
    """Return the folder for relative model paths of a map: the folder of its file, or the current one."""
    return Path.cwd() if isinstance(source, DeploymentMap) else Path(source).absolute().parent


def map_label(source: MapArgument) -> str:
    """Return the name of a map in messages: its path, or ``the map``."""
    return "the map" if isinstance(source, DeploymentMap) else str(source)


def resolve_demands(source: DemandsArgument) -> tuple[Demand, ...]:
    """Return the demands, read from their file if a path is given; demands of a file carry its hash.

    Raises `InputError` when the file holds no demands, or a demand is impossible.
    """
    if isinstance(source, str | os.PathLike):
        return read_demands(Path(source))
    demands = source if isinstance(source, DemandFile) else tuple(source)
    for demand in demands:
        require_possible(demand)
    return demands


def locate_files(deployment: DeploymentMap, folder: Path) -> DeploymentMap:
    """Return a map from a file in ``folder`` with full paths for the model files in the folder."""

    def find(path: str | None) -> str | None:
        return str((folder / path).resolve()) if path is not None and (folder / path).is_file() else path

    return _with_paths(deployment, find)


def relate_files(deployment: DeploymentMap, folder: Path) -> DeploymentMap:
    """Return a map for a file in ``folder``: paths relative to the current folder become relative to ``folder``."""

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
