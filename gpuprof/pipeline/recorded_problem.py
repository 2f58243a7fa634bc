"""Restoration of a map's problem and policy, and the evidence for its check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from gpuprof.domain.demand import Demand, Slo, join_demands, name_demand, require_possible
from gpuprof.domain.deployment import DeploymentMap, PlannedDevices
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import NOTHING_TRIED, Estimator, TriedRuns
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.sizes import mixed_name, name_parts
from gpuprof.errors import InputError, PluginError
from gpuprof.estimators.builtin import DEFAULT, is_plugin, name_services, name_tried_services
from gpuprof.estimators.cross_gpu.kernels import parse_execution
from gpuprof.graph.file import read_onnx
from gpuprof.kernel_db.store import KernelDb
from gpuprof.pipeline.arguments import PathArgument, locate_files, model_paths
from gpuprof.pipeline.devices import (
    make_database_estimator,
    make_named_estimator,
    open_database,
    read_own_devices,
    resolve_device,
)
from gpuprof.pipeline.problem import RECORDED_OPTIONS, collect_tried_runs, make_queueing
from gpuprof.pipeline.result import NoteCallback, say_nothing
from gpuprof.pipeline.settings import DEVICE_FILE, PRECISION, RUNTIME, Settings, option
from gpuprof.placement.feasibility import Evidence
from gpuprof.placement.policies import DEFAULT as DEFAULT_POLICY
from gpuprof.placement.policies import Policy, make_policy, policy_names
from gpuprof.placement.predict import retime_map
from gpuprof.placement.problem import Options, Problem
from gpuprof.plugins import identify, require_importable
from gpuprof.rules.merged_estimate import estimate_merged


class OtherTimes(Settings):
    """Source of a check's times; by default the map's own."""

    title: ClassVar[str] = "Estimator and database"

    db: Path | None = option(
        None,
        "Kernel database; default: the map's own times, or new predictions where all were predicted from model files.",
    )
    estimator: str | Estimator | None = option(
        None, "Estimator to use in place of the one that the map was planned with."
    )
    precision: str | None = option(None, PRECISION)
    runtime: str | None = option(None, RUNTIME)
    device_file: Path | None = option(None, DEVICE_FILE, metavar="FILE")


def restore_problem(
    deployment: DeploymentMap,
    db: Path | None,
    note: NoteCallback = say_nothing,
    estimator: str | Estimator | None = None,
) -> Problem:
    """Return the problem that a located map solves, with its own estimator unless another is named.

    Models that the database lacks are read from their files; where all files are there, no database is needed. Raises
    `InputError` when the database is missing, or lacks a device of the map; or when the map's demands are impossible.
    """
    paths = model_paths(deployment)
    lacking = [name for name, model in deployment.requested.items() if (model.source_model or name) not in paths]
    settings = deployment.planned_with
    database = open_database(db, needed=bool(lacking) and not is_plugin(estimator or settings.estimator))
    if database is None and settings.database_sha256 is not None:
        note(
            "the kernel database that the map was planned from is not here: times come from the models' files alone "
            "(name it with --db)"
        )
    kinds = sorted({gpu.device for node in deployment.nodes for gpu in node.gpus})
    devices = settings.fleet or tuple(PlannedDevices(device=kind) for kind in kinds)
    times, tried = _restore_estimator(deployment, database, paths, OtherTimes(estimator=estimator), note)
    demands = tuple(
        Demand(name, m.rate_rps, Slo(m.slo_ms, m.percentile), source_model=m.source_model, dims=m.dims)
        for name, m in deployment.models.items()
    )
    for demand in demands:  # a map may come from other tools than place
        require_possible(demand)
    return Problem(
        demands=demands,
        fleet=Fleet(
            tuple(
                FleetEntry(_with_price(resolve_device(device.device, database), device), device.count)
                for device in devices
            )
        ),
        estimator=times,
        tried=tried,
        queueing=make_queueing(settings.arrivals, deployment.models),
        options=Options(**{name: getattr(settings, name) for name in RECORDED_OPTIONS}, host=settings.host),
        files={name: model.file for name, model in deployment.models.items()},
        chains=deployment.chains,
    )


def _restore_estimator(
    deployment: DeploymentMap,
    database: KernelDb | None,
    paths: Mapping[str, Path],
    times: OtherTimes,
    note: NoteCallback,
) -> tuple[Estimator, TriedRuns]:
    """Return an estimator of a map's services, and the database's records of their successful and failed runs."""
    settings = deployment.planned_with
    # Names of the map's models in the database, with their sizes.
    sources = {name: mixed_name(model.source_model or name, model.dims) for name, model in deployment.requested.items()}
    parts = list(dict.fromkeys(name for source in sources.values() for name, _ in name_parts(source)))
    runtime = times.runtime or settings.runtime
    execution = parse_execution(times.precision or settings.precision, runtime, settings.host_us)
    # Only models that the database lacks: measurements of a name take precedence over predictions from its file.
    models = make_database_estimator(database, note=note).known
    graphs = {name: path for name, path in paths.items() if not models.has_measured(name)}
    measured = make_database_estimator(database, graphs, note, execution)
    source = times.estimator or settings.estimator
    if times.estimator is None:
        require_importable("estimator", settings.estimator)
    estimator = measured if source == DEFAULT else make_named_estimator(source, database, graphs)
    tried = name_tried_services(collect_tried_runs(measured.known, parts), sources)
    files = {name: model.file for name, model in deployment.models.items()}
    return estimate_merged(name_services(estimator, sources, settings.no_mig, settings.no_mps), files), tried


def _with_price(device: Device, planned: PlannedDevices | None) -> Device:
    price = None if planned is None else planned.price_per_hour
    return device if price is None else device.with_price(price)


def _join_members(deployment: DeploymentMap, demands: Sequence[Demand]) -> tuple[Demand, ...]:
    """Return the demands for the map's models: one for all members of a merged model."""
    by_model: dict[str, list[Demand]] = {}
    for demand in demands:
        by_model.setdefault(deployment.serving.get(demand.model, demand.model), []).append(demand)
    return tuple(
        members[0] if members[0].model == model else join_demands(model, members) for model, members in by_model.items()
    )


def _is_recomputable(deployment: DeploymentMap, graphs: Mapping[str, Path]) -> bool:
    """Return whether all of the map's times were predicted from files alone, which all exist here unchanged."""
    if deployment.planned_with.database_sha256 is not None:
        return False
    for name, model in deployment.requested.items():
        path, sha256 = graphs.get(model.source_model or name), model.sha256
        if path is None or (sha256 and read_onnx(path).sha256 != sha256):
            return False
    return True


def time_map_by(
    deployment: DeploymentMap,
    estimator: str | Estimator | None,
    db: Path | None,
    base: Path,
    note: NoteCallback = say_nothing,
) -> DeploymentMap:
    """Return a map from a file in ``base`` with the times of the named estimator; None leaves the map unchanged.

    Raises `InputError` when the estimator, the database or its data on a replica is missing.
    """
    if estimator is None:
        return deployment

    evidence = collect_map_evidence(deployment, base, OtherTimes(db=db, estimator=estimator), note=note)
    return retime_map(deployment, evidence, identify(estimator))


def restore_policy(deployment: DeploymentMap) -> Policy:
    """Return the policy of a map, with its default options; the default policy where the map's is unknown."""
    return make_policy(find_policy_name(deployment))


def find_policy_name(deployment: DeploymentMap) -> str:
    """Return the name of the policy that `restore_policy` returns."""
    # A map appends the options to the policy's name; of several matching prefixes the longest is right.
    prefixes = [name for name in policy_names() if deployment.policy.startswith(name)]
    return max(prefixes, key=len) if prefixes else DEFAULT_POLICY


def collect_map_evidence(
    deployment: DeploymentMap,
    base: Path = Path(),
    source: OtherTimes | None = None,
    against: Sequence[Demand] | None = None,
    note: NoteCallback = say_nothing,
) -> Evidence:
    """Return the evidence to check a map from a file in ``base``; without a database and model files, its own times.

    ``against``: demands to check instead of the map's own; ``source``: source of the times, by default the map's own.
    """
    settings, source = deployment.planned_with, source or OtherTimes()
    database = open_database(source.db, needed=False)
    located = locate_files(deployment, base)
    paths = model_paths(located)
    times: Estimator | None = None
    tried = NOTHING_TRIED
    is_required = database is not None or source.estimator is not None
    if is_required or _is_recomputable(deployment, paths):
        try:
            times, tried = _restore_estimator(located, database, paths, source, note)
        except (InputError, PluginError) as error:
            if is_required:
                raise
            note(str(error))
    return Evidence(
        devices=_find_devices(deployment, database, source.device_file),
        queueing=make_queueing(settings.arrivals, deployment.models),
        estimator=times,
        demands=None if against is None else _join_members(deployment, [name_demand(demand) for demand in against]),
        confidence=settings.confidence,
        latency_budget=settings.latency_budget,
        overhead_ms=settings.overhead_ms,
        host=settings.host,
        counts={devices.device: devices.count for devices in settings.fleet},
        tried=tried,
    )


def _find_devices(
    deployment: DeploymentMap, database: KernelDb | None, device_file: PathArgument | None
) -> dict[str, Device]:
    """Return the known devices of a map, with the prices that it was planned with."""
    resolved: dict[str, Device] = {}
    planned = {entry.device: entry for entry in deployment.planned_with.fleet}
    for name in sorted({gpu.device for node in deployment.nodes for gpu in node.gpus}):
        with suppress(InputError):  # the check reports unknown devices
            resolved[name] = _with_price(
                resolve_device(name, database, read_own_devices(device_file)), planned.get(name)
            )
    return resolved
