"""Brings the placement policies into a running server: ``gpuprof serve --adapt``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuprof.deployment import DeploymentMap
    from gpuprof.fleet import Fleet
    from gpuprof.placement.problem import ModelFile
    from gpuprof.serving.adapt import Load

#: Parts of a load that are tried, one after another, until a map is found that bears them.
_PARTS = (1.0, 0.9, 0.8, 0.7, 0.6)


@dataclass(frozen=True, slots=True)
class MapReplanner:
    """Plans the map for a measured load, with the policy and the settings of the map that is served.

    Attributes
    ----------
    base : Path
        Directory of the first map, in which the files of its models are looked for.
    db : Path or None
        Kernel database.
    more_devices : bool
        Whether a fleet without a count may grow; else the devices of the map are all there are.
    """

    base: Path
    db: Path | None
    more_devices: bool

    def __call__(self, deployment: DeploymentMap, load: Load) -> DeploymentMap | None:
        """Return a map for the load, for as much of it as the devices bear; None when that is not more than now.

        Raises
        ------
        GpuprofError
            When the database does not know a model or a device.
        """
        from gpuprof.cli.planning import map_policy, map_problem, plan
        from gpuprof.estimators.corrected import CorrectedEstimator

        problem = map_problem(deployment, self.db)
        fleet = problem.fleet if self.more_devices else _present(problem.fleet, deployment)
        estimator = CorrectedEstimator(problem.estimator, load.slowdowns)
        problem = replace(
            problem,
            fleet=fleet,
            estimator=estimator,
            files=_files(deployment, self.base),
            inputs=deployment.inputs,
            previous=deployment,
        )
        policy = map_policy(deployment)
        for part in _PARTS:
            rates = {name: part * rate for name, rate in load.rates_rps.items()}
            if part < 1.0 and not load.slowdowns and not _is_more(deployment, rates, load):
                return None
            demands = tuple(replace(demand, rate_rps=rates[demand.model]) for demand in problem.demands)
            try:
                wanted = plan(replace(problem, demands=demands), policy)
            except InfeasibleError:
                continue
            if not wanted.unplaced:
                return wanted
        return None


def check_adaptable(deployment: DeploymentMap, db: Path | None, node: str | None) -> None:
    """Find out at the start, rather than when the load changes, whether a map can be planned anew.

    Raises
    ------
    InputError
        When only one node of several is served here, or the database lacks a model or a device of the map.
    """
    from gpuprof.cli.planning import map_problem

    if node is not None and len(deployment.nodes) > 1:
        raise InputError("--adapt and --node exclude each other: a plan is for all nodes")
    problem = map_problem(deployment, db)
    for demand in problem.demands:
        for entry in problem.fleet.entries:
            problem.estimator.shares(demand.model, entry.device)


def _present(fleet: Fleet, deployment: DeploymentMap) -> Fleet:
    """Return the fleet with as many devices as it says, or as the map has where it says nothing."""
    names = [gpu.device for node in deployment.nodes for gpu in node.gpus]
    entries = tuple(
        entry if entry.count is not None else replace(entry, count=max(1, names.count(entry.device.name)))
        for entry in fleet.entries
    )
    return replace(fleet, entries=entries)


def _files(deployment: DeploymentMap, base: Path) -> dict[str, ModelFile]:
    """Return the map's files, found from anywhere: the new map stands in another directory."""
    from gpuprof.placement.problem import ModelFile

    def found(path: str) -> str:
        beside = base / path
        return str(beside.resolve()) if beside.is_file() else path

    return {
        name: ModelFile(None if model.path is None else found(model.path), model.sha256)
        for name, model in deployment.models.items()
    }


def _is_more(deployment: DeploymentMap, rates: Mapping[str, float], load: Load) -> bool:
    """Return whether a part of a load is still more than the map was planned for, where more is wanted."""
    return any(
        rates[name] > model.rate_rps and load.rates_rps[name] > model.rate_rps
        for name, model in deployment.models.items()
    )
