"""Arguments given as a file's path or as its content."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from pydantic import InstanceOf

from gpuprof.domain.demand import Demand, DemandFile, read_demands, require_possible
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.fleet import Fleet
from gpuprof.domain.map_file import read_map

#: A file or folder.
PathArgument: TypeAlias = str | os.PathLike[str]
#: A deployment map, or the path of its file.
MapArgument: TypeAlias = DeploymentMap | PathArgument
#: Demands, or the path of their slo.csv.
DemandsArgument: TypeAlias = InstanceOf[DemandFile] | Sequence[Demand] | PathArgument
#: Devices: a fleet, the path of a fleet.toml, or text in the form of ``--gpus``: ``"a100-80:8,v100"``.
FleetArgument: TypeAlias = Fleet | os.PathLike[str] | str


def name_models(models: Sequence[PathArgument] | PathArgument) -> list[str]:
    """Return the names or files of models; a single one needs no list."""
    return [str(model) for model in ((models,) if isinstance(models, str | os.PathLike) else models)]


def optional_path(path: PathArgument | None) -> Path | None:
    """Return the path, None for None."""
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


def is_path(model: str) -> bool:
    """Return whether a demand names its model by a path."""
    return model.endswith(".onnx") or os.sep in model


def model_name(model: str) -> str:
    """Return the name of a demand's model: for a file its stem, for a chain the names of its steps."""
    steps = (step.strip() for step in model.split(">"))
    return ">".join(Path(step).stem if is_path(step) else step for step in steps)


def name_demand(demand: Demand) -> Demand:
    """Return a demand with names in place of paths; ``source_model`` only where the service has another name."""
    name = demand.model if demand.source_model else model_name(demand.model)
    source = model_name(demand.source_model or demand.model)
    return replace(demand, model=name, source_model=None if source == name else source)
