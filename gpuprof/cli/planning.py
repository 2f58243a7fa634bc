"""What the placing verbs share: from files and names to a problem, a policy's map and the check of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import InputError, UnstableError

if TYPE_CHECKING:
    from gpuprof.domain.demand import Demand
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.domain.device import Device
    from gpuprof.domain.estimate import Estimator
    from gpuprof.domain.fleet import Fleet
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.placement.feasibility import Evidence
    from gpuprof.placement.policies import Policy
    from gpuprof.placement.problem import ModelFile, Options, Problem
    from gpuprof.rules.host_work import HostWork
    from gpuprof.runtime.batch_verdicts import BatchVerdicts

_OPTIONS = ("confidence", "latency_budget", "overhead_ms", "max_batch", "max_processes")


def build_problem(
    slo_file: Path,
    gpus: str | None,
    fleet_file: Path | None,
    db: Path | None,
    options: Options,
    overhead_ms: float | None = None,
) -> Problem:
    """Read demands, fleet and database into a problem; the overhead of a request is the measured one unless given.

    Raises
    ------
    InputError
        For a file, device or model that is wrong or unknown.
    """
    from gpuprof.cli.output import say_note
    from gpuprof.domain.demand import read_demands
    from gpuprof.estimators.queueing.queueing import BatchQueue
    from gpuprof.pipeline.devices import describe_superseded, make_database_estimator, open_database
    from gpuprof.placement.problem import Problem

    demands = read_demands(slo_file)
    given = _graphs(demands)
    demands = tuple(replace(demand, model=_name(demand.model)) for demand in demands)
    database = open_database(db, needed=len(given) < len(demands))
    graphs = {name: _of_any_batch(path, database) for name, path in given.items()}
    fleet = _fleet(gpus, fleet_file, database)
    estimator = make_database_estimator(database, graphs, say_note)
    models = [demand.model for demand in demands]
    if overhead_ms is None:
        overhead_ms = _overhead_ms(database, fleet, models)
    options = replace(options, overhead_ms=overhead_ms, host=_host_work(database, fleet, demands))
    for demand in demands:
        for entry in fleet.entries:
            estimator.shares(demand.model, entry.device)  # an unknown model is an error of the input, said at once
    for remark in describe_superseded(estimator, models):
        say_note(remark)
    files = _files(database, graphs)
    if options.max_batch > 1:
        _say_what_mixes(estimator.verdicts, files, models)
    return Problem(
        demands=demands,
        fleet=fleet,
        estimator=estimator,
        queueing=BatchQueue(),
        options=options,
        files=files,
        inputs=_inputs(slo_file, database, fleet, options),
    )


def _say_what_mixes(verdicts: BatchVerdicts, files: Mapping[str, ModelFile], models: Sequence[str]) -> None:
    """Find the models whose requests must not share a batch, and say it; those whose files are not here are trusted."""
    from gpuprof.cli.output import say
    from gpuprof.runtime.batch_verdicts import describe_mixing

    for model in models:
        file = files.get(model)
        if file is None or not file.sha256 or not file.path or not Path(file.path).is_file():
            continue
        if (output := verdicts.judge(Path(file.path), file.sha256)) is not None:
            say(f"gpuprof: {describe_mixing(model, output)}; it is placed with batches of 1")


def _overhead_ms(database: KernelDb | None, fleet: Fleet, models: Sequence[str]) -> float:
    from gpuprof.pipeline.serving_cost import serving_overhead_ms

    return max(serving_overhead_ms(database, entry.device.name, models) for entry in fleet.entries)


def _host_work(database: KernelDb | None, fleet: Fleet, demands: Sequence[Demand]) -> HostWork:
    """Return what serving costs the machine; of a fleet of several kinds of devices, nothing is said."""
    from gpuprof.pipeline.serving_cost import serving_work
    from gpuprof.rules.host_work import NO_HOST_WORK

    if len(fleet.entries) != 1:
        return NO_HOST_WORK
    entry = fleet.entries[0]
    rates_rps = {demand.model: demand.rate_rps for demand in demands}
    return serving_work(database, entry.device, rates_rps, alone=entry.count == 1)


def plan(problem: Problem, policy: Policy, created: str | None = None) -> DeploymentMap:
    """Return the policy's map, checked.

    Raises
    ------
    UnstableError
        When the map breaks a rule: the policy is wrong, and its map must not be deployed.
    """
    from gpuprof.placement.deploy import to_map
    from gpuprof.placement.feasibility import check

    deployment = to_map(problem, policy.place(problem), created or _source_date())
    broken = check(deployment, problem_evidence(problem))
    if broken:
        raise UnstableError(
            f"the policy {deployment.policy} made a map that breaks {len(broken)} rules, first: {broken[0]}",
            "choose another policy with --policy",
        )
    return deployment


def problem_evidence(problem: Problem) -> Evidence:
    """Return what a map for ``problem`` is checked against."""
    from gpuprof.placement.feasibility import Evidence

    return Evidence(
        devices={entry.device.name: entry.device for entry in problem.fleet.entries},
        queueing=problem.queueing,
        estimator=problem.estimator,
        confidence=problem.options.confidence,
        latency_budget=problem.options.latency_budget,
        overhead_ms=problem.options.overhead_ms,
        host=problem.options.host,
        counts={entry.device.name: entry.count for entry in problem.fleet.entries},
    )


def map_evidence(deployment: DeploymentMap, db: Path | None, against: Path | None, base: Path = Path()) -> Evidence:
    """Return what a map from a file in ``base`` is checked against; without a database, its own times."""
    from gpuprof.cli.output import say_note
    from gpuprof.domain.demand import read_demands
    from gpuprof.estimators.queueing.queueing import BatchQueue
    from gpuprof.pipeline.devices import make_database_estimator, open_database, resolve_device
    from gpuprof.placement.feasibility import Evidence
    from gpuprof.rules.host_work import recorded_work
    from gpuprof.rules.merged_estimate import MergedEstimator, merged_works

    database = open_database(db, needed=False)
    names = {gpu.device for node in deployment.nodes for gpu in node.gpus}
    found: dict[str, Device] = {}
    for name in sorted(names):
        try:
            found[name] = resolve_device(name, database)
        except InputError:
            continue  # the check names it
    demands = None if against is None else read_demands(against)
    graphs = {name: Path(model.path) for name, model in deployment.models.items() if model.path}
    estimator: Estimator | None = None
    if database is not None:
        measured = make_database_estimator(database, note=say_note)
        known = {name: path for name, path in graphs.items() if name not in measured.models and path.is_file()}
        estimator = make_database_estimator(database, known, say_note)
        estimator = MergedEstimator(estimator, merged_works(deployment, base)) if deployment.merges else estimator
    return Evidence(
        devices=found,
        queueing=BatchQueue(),
        estimator=estimator,
        demands=None if demands is None else tuple(replace(demand, model=_name(demand.model)) for demand in demands),
        confidence=map_setting(deployment, "confidence"),
        latency_budget=map_setting(deployment, "latency_budget"),
        overhead_ms=map_setting(deployment, "overhead_ms") or 0.0,
        host=recorded_work(deployment.inputs),
    )


def map_setting(deployment: DeploymentMap, name: str) -> float | None:
    """Return a setting that the map was planned with.

    Raises
    ------
    InputError
        When what stands in the map is no number.
    """
    text = deployment.inputs.get(name)
    try:
        return None if text is None else float(text)
    except ValueError:
        raise InputError(f"the map's {name} must be a number but is {text!r}") from None


def _graphs(demands: Sequence[Demand]) -> dict[str, Path]:
    """Return the files of the models that are named by a path."""
    return {_name(demand.model): Path(demand.model) for demand in demands if _is_path(demand.model)}


def _of_any_batch(path: Path, database: KernelDb | None) -> Path:
    """Return the file, or the copy that was profiled in its place because the file fixes its batch.

    Raises
    ------
    InputError
        When it fixes its batch and was never profiled.
    """
    from gpuprof.graph.load import only_batch
    from gpuprof.kernel_db.store import COPIES
    from gpuprof.runtime.free_batch import freed_copy

    fixed = only_batch(path) or 1
    copy = None if database is None else freed_copy(path, database.path / COPIES)
    if copy is None and fixed > 1:
        raise InputError(
            f"{path} takes batches of {fixed} only, and requests come one by one",
            f"gpuprof profile {path} measures a copy that takes any, gpuprof zoo rebatch {path} -o FILE writes one",
        )
    return copy or path


def _is_path(model: str) -> bool:
    return model.endswith(".onnx") or os.sep in model


def _name(model: str) -> str:
    return Path(model).stem if _is_path(model) else model


def _fleet(gpus: str | None, fleet_file: Path | None, database: KernelDb | None) -> Fleet:
    from gpuprof.domain.fleet import Fleet, FleetEntry, parse_fleet, read_fleet
    from gpuprof.pipeline.devices import resolve_device

    if gpus is not None and fleet_file is not None:
        raise InputError("--gpus and --fleet exclude each other")
    if fleet_file is not None:
        return read_fleet(fleet_file, lambda name: resolve_device(name, database))
    if gpus is not None:
        return parse_fleet(gpus, lambda name: resolve_device(name, database))
    return Fleet((FleetEntry(resolve_device(None, database)),))


def _files(database: KernelDb | None, graphs: dict[str, Path]) -> dict[str, ModelFile]:
    from gpuprof.placement.problem import ModelFile

    files = {}
    rows = (
        []
        if database is None
        else database.read("models", ["run_id", "model", "model_path", "model_sha256"]).to_pylist()
    )
    for row in sorted(rows, key=lambda row: str(row["run_id"])):
        if row["model_path"]:
            files[row["model"]] = ModelFile(row["model_path"], row["model_sha256"])
    for name, path in graphs.items():
        from gpuprof.graph.load import load_graph

        files[name] = ModelFile(str(path), load_graph(path).sha256)
    return files


def _inputs(slo_file: Path, database: KernelDb | None, fleet: Fleet, options: Options) -> dict[str, str]:
    """Return hashes of what the map is computed from, and the settings that a check of it must know."""
    devices = ",".join(f"{e.device.name}{'' if e.count is None else f':{e.count}'}" for e in fleet.entries)
    inputs = {"slo_sha256": hashlib.sha256(slo_file.read_bytes()).hexdigest(), "fleet": devices}
    if database is not None:
        runs = sorted(set(database.read("models", ["run_id"])["run_id"].to_pylist()))
        inputs["database_sha256"] = hashlib.sha256("\n".join(runs).encode()).hexdigest()
    for key in _OPTIONS:
        value = getattr(options, key)
        if value:
            inputs[key] = repr(value)
    inputs |= {key: repr(value) for key, value in asdict(options.host).items() if value}
    return inputs


def _source_date() -> str | None:
    """Return the time that reproducible builds agree on, None where none is set."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    try:
        return datetime.fromtimestamp(int(text), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        raise InputError(f"SOURCE_DATE_EPOCH must be seconds since 1970 but got {text!r}") from None


def map_problem(deployment: DeploymentMap, db: Path | None) -> Problem:
    """Return the problem that a map answers, from what the map says of it.

    Raises
    ------
    InputError
        When the database is missing, or the map does not say what fleet it was planned for.
    """
    from gpuprof.cli.output import say_note
    from gpuprof.domain.demand import Demand, Slo
    from gpuprof.domain.fleet import parse_fleet
    from gpuprof.estimators.queueing.queueing import BatchQueue
    from gpuprof.pipeline.devices import make_database_estimator, open_database, resolve_device
    from gpuprof.placement.problem import Options, Problem
    from gpuprof.rules.host_work import recorded_work

    database = open_database(db)
    kinds = {gpu.device for node in deployment.nodes for gpu in node.gpus}
    return Problem(
        demands=tuple(Demand(name, m.rate_rps, Slo(m.slo_ms, m.percentile)) for name, m in deployment.models.items()),
        fleet=parse_fleet(
            deployment.inputs.get("fleet") or ",".join(sorted(kinds)), lambda name: resolve_device(name, database)
        ),
        estimator=make_database_estimator(database, note=say_note),
        queueing=BatchQueue(),
        options=Options(
            confidence=map_setting(deployment, "confidence"),
            latency_budget=map_setting(deployment, "latency_budget"),
            overhead_ms=map_setting(deployment, "overhead_ms") or 0.0,
            host=recorded_work(deployment.inputs),
            max_batch=int(map_setting(deployment, "max_batch") or 256),
            max_processes=int(map_setting(deployment, "max_processes") or 0) or None,
        ),
    )


def map_policy(deployment: DeploymentMap) -> Policy:
    """Return the policy that made a map, with its default options; the default one where it is not known."""
    from gpuprof.placement.policies import DEFAULT, make_policy, policy_names

    known = [name for name in policy_names() if deployment.policy.startswith(name)]
    return make_policy(max(known, key=len) if known else DEFAULT)
