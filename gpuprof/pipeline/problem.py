"""Planning: options, demands, devices and a database as the problem of a policy, and its checked map."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import ClassVar

from gpuprof.domain.arrival_process import FORMS, ArrivalProcess, parse_arrivals
from gpuprof.domain.catalogue import devices, read_offers
from gpuprof.domain.demand import Demand, DemandFile, is_path, model_name, name_demand
from gpuprof.domain.deployment import DeploymentMap, ModelFile, PlannedDevices, PlannedWith
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimator, TriedRuns, describe_unknown_ops, estimate_smallest, rename_workloads
from gpuprof.domain.fleet import ANY, Fleet, FleetEntry, parse_fleet, read_fleet
from gpuprof.domain.host_work import NO_HOST_WORK, HostWork
from gpuprof.domain.plural import count_of
from gpuprof.domain.runtime_variant import SERVED_BY
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import (
    SizeMix,
    Sizes,
    check_size,
    mixed_name,
    name_parts,
    parse_mix,
    require_dimensions,
    sized_name,
)
from gpuprof.domain.sojourn import ModelQueues, QueueModel, ShapedQueue, queue_of
from gpuprof.domain.validation import Positive, Seed
from gpuprof.errors import InputError, UnstableError
from gpuprof.estimators.builtin import DEFAULT, is_plugin, name_services, name_tried_services, read_premise
from gpuprof.estimators.cross_gpu.kernels import Execution, parse_execution
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.estimators.measured.known_models import KnownModels
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.graph.file import read_onnx
from gpuprof.graph.load import read_fixed_batch
from gpuprof.graph.served_interface import find_uncarried
from gpuprof.kernel_db.store import COPIES, KernelDb
from gpuprof.pipeline.arguments import DemandsArgument, FleetArgument, resolve_demands
from gpuprof.pipeline.devices import (
    describe_choice,
    describe_empty,
    make_database_estimator,
    make_named_estimator,
    open_database,
    read_own_devices,
    resolve_device,
)
from gpuprof.pipeline.estimate import require_sure
from gpuprof.pipeline.result import NoteCallback, say_nothing
from gpuprof.pipeline.serving_cost import serving_overhead_ms, serving_work
from gpuprof.pipeline.settings import DEVICE_FILE, HOST_US, PRECISION, RUNTIME, Dims, Settings, option
from gpuprof.placement.chains import divide_slos, expand_chains
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options, Problem, collect_evidence
from gpuprof.placement.search_space import refuse_oversized
from gpuprof.plugins import identify
from gpuprof.runtime.batch_items import BatchVerdicts, describe_mixing
from gpuprof.runtime.free_batch import copy_with_free_batch
from gpuprof.runtime.optimizer import find_refusal
from gpuprof.simulator.trace import read_trace

_SEARCH = "Search"


class PlanningOptions(Settings):
    """Constraints of a map, limits of its replicas, and the search."""

    title: ClassVar[str] = "Constraints and estimator"

    estimator: str | Estimator = option(
        "database", "Estimator: database, measured, gk, igniter, usher, or package.module:Class."
    )
    arrivals: str | None = option(
        None, "Arrival process: gamma:4, batch:8, bursts:3,2s, or a trace file, read for each model; default: poisson."
    )
    confidence: float | None = option(
        None,
        "Confidence to plan at: 0.9 is the upper ends of all intervals, 0 the means; default: upper ends of everything "
        "that was not measured or is unstable, means of the rest.",
    )
    latency_budget: float | None = option(
        None, "Fraction of the SLO that a batch may take, in place of the queueing model."
    )
    max_batch: int = option(256, "Largest batch size.")
    isolate: bool = option(
        False, "Separate process and share for every replica; by default, light models share workers."
    )
    no_mig: bool = option(False, "GPUs without MIG instances.")
    no_mps: bool = option(False, "GPUs and MIG instances undivided by MPS: light models share them by turns.")
    time_slice_ms: Positive | None = option(
        None,
        "Time slice in ms with which models that share a worker run at once, as in Triton; default: one at a time, by "
        "turns.",
        "--time-slice",
        unit="ms",
    )
    precision: str | None = option(None, PRECISION)
    runtime: str | None = option(None, RUNTIME)
    host_us: Positive | None = option(None, HOST_US)
    device_file: Path | None = option(None, DEVICE_FILE, metavar="FILE")
    prices: Path | None = option(
        None, "Offers of GPU clouds, as gpuhunt writes them: a CSV file, or a folder of them; default: shipped prices."
    )
    strict: bool = option(False, "Refuse estimates with unknown ops or wide intervals.")
    dims: Dims = option(
        {},
        "Size of a free dimension where the CSV gives none; repeatable.",
        "--dim",
        metavar="NAME=SIZE",
        repeated=True,
    )
    time_limit_s: Positive | None = option(
        None,
        "Time of the search, after which the best map so far is taken, as at Ctrl-C; default: 5s and 0.03s for each "
        "demand, in compare for each policy or GPU.",
        "--time-limit",
        unit="s",
        panel=_SEARCH,
    )
    seed: Seed = option(0, "Seed of policies that draw random numbers.", panel=_SEARCH)

    def execution(self) -> Execution:
        """Return precision and runtime of unmeasured models.

        Raises `InputError` when the precision or the runtime is unknown.
        """
        return parse_execution(self.precision, self.runtime, self.host_us)

    def problem_options(self) -> Options:
        """Return the options in the form of policies.

        Raises `InputError` when a number is out of range.
        """
        own = ("overhead_ms", "max_processes")  # of the problem, not of the command
        names = (*(name for name in RECORDED_OPTIONS if name not in own), "time_limit_s", "seed")
        return Options(**{name: getattr(self, name) for name in names})


#: Options of a problem with equal names in a map's record.
RECORDED_OPTIONS = (
    *("confidence", "latency_budget", "overhead_ms", "max_batch", "max_processes"),
    *("isolate", "no_mig", "no_mps", "time_slice_ms"),
)


def build_problem(
    demands: DemandsArgument,
    fleet: FleetArgument | None,
    db: Path | None,
    planning: PlanningOptions,
    note: NoteCallback = say_nothing,
) -> Problem:
    """Read demands, fleet and database into a problem.

    Raises `InputError` for an invalid or unknown file, device or model. ``demands`` and ``fleet``: as in
    `gpuprof.place`; ``db``: kernel database; ``note``: called with each remark immediately.
    """
    options, resolved = planning.problem_options(), resolve_demands(demands)
    options = replace(options, time_limit_s=options.time_limit_s or default_limit_s(len(resolved)))
    requested, chains = expand_chains(resolved)
    paths = _list_graph_files(requested)
    named = tuple(name_demand(demand) for demand in requested)
    models = {demand.model: demand.source_model or demand.model for demand in named}
    is_foreign = is_plugin(planning.estimator)  # such an estimator may have models of its own
    database = open_database(db, needed=not is_foreign and not paths.keys() >= set(models.values()))
    for remark in describe_empty(db, database):
        note(remark)
    # Of a file with a fixed batch, its profiled copy with a free one.
    copies = None if database is None else database.path / COPIES
    graphs = {name: (copies and copy_with_free_batch(path, copies)) or path for name, path in paths.items()}
    devices = find_fleet(fleet, database, planning, note)
    execution = planning.execution()
    measured = make_database_estimator(database, graphs, note, execution)
    profiled_models = measured.known
    foreign = {name for name in models.values() if is_foreign and not profiled_models.is_known(name)}
    named = size_demands(named, profiled_models, planning.dims, note, foreign)
    sources = source_names(named)
    files = _find_files(database, graphs)
    sourced = {model: files[model] for model in models.values() if model in files}
    _require_servable(sourced, profiled_models, devices, planning)
    default = planning.estimator == DEFAULT
    # Notes come from the default estimator, whichever estimator plans: no other reads the database's models.
    estimator = measured if default else make_named_estimator(planning.estimator, database, graphs)
    estimator = name_services(estimator, sources, options.no_mig, options.no_mps)
    services = list(dict.fromkeys(sources[demand.model] for demand in named if models[demand.model] not in foreign))
    names = list(dict.fromkeys(name for model in services for name, _ in name_parts(model)))
    options = replace(options, host=_find_host_work(database, devices, named))
    targets = [entry.device.name for entry in devices.entries]
    if default and not any(set(targets).intersection(profiled_models.devices_of(name)) for name in names):
        options = replace(options, max_processes=1)  # interference between processes is unmeasured
    overhead_ms = max(serving_overhead_ms(database, target, services) for target in targets)
    options = replace(options, overhead_ms=overhead_ms)
    for demand, entry in product(named, devices.entries):
        estimator.shares(demand.model, entry.device)  # report an unknown model at once, as an input error
    if default:
        require_precision(
            devices, execution, lambda name: all(name in profiled_models.devices_of(model) for model in names)
        )
        _judge_doubts(measured, names, devices, planning.strict, note)
    else:
        note_omitted_batches(estimator, name_services(measured, sources), named, devices, options.max_batch, note)
    for remark in describe_choice(measured, names, targets):
        note(remark)
    if options.max_batch > 1:
        _note_mixing_models(measured.verdicts, files, list(dict.fromkeys(models.values())), note)
    files |= {service: files[model] for service, model in models.items() if model in files}
    problem = Problem(
        demands=named,
        fleet=devices,
        estimator=estimator,
        queueing=make_queueing(planning.arrivals, [demand.model for demand in named]),
        options=options,
        files=files,
        planned_with=_record_settings(resolved, database, devices, options, planning),
        tried=name_tried_services(collect_tried_runs(profiled_models, names), sources),
        chains=chains,
    )
    return divide_slos(problem) if chains else problem


def _require_servable(
    files: Mapping[str, ModelFile], models: KnownModels, fleet: Fleet, planning: PlanningOptions
) -> None:
    """Raise `InputError` for a file that cannot be served with ONNX Runtime; measured files have been loaded."""
    on_gpu = any(entry.device.kind != "cpu" for entry in fleet.entries)
    for name, file in files.items():
        path, is_loaded = Path(file.path or ""), models.has_measured(name)
        if is_loaded and not path.is_file():
            continue
        _require_free_batch(path)
        if not (planning.runtime or SERVED_BY).startswith(SERVED_BY):
            continue
        if refusal := find_uncarried(read_onnx(path)) if is_loaded else find_refusal(path, on_gpu):
            raise refusal


def source_names(demands: Iterable[Demand]) -> dict[str, str]:
    """Return the model name of each service, followed by the sizes of its inputs."""
    return {demand.model: mixed_name(demand.source_model or demand.model, demand.dims) for demand in demands}


def default_limit_s(demands: int) -> float:
    """Return the default seconds of a search without a natural end, or of one among many."""
    return 5.0 + 0.03 * demands


def note_omitted_batches(
    chosen: Estimator, default: Estimator, demands: Sequence[Demand], fleet: Fleet, max_batch: int, note: NoteCallback
) -> None:
    """Note models of which the chosen estimator lists only smaller batches than the default estimator."""
    cuts = []
    for demand, entry in product(demands, fleet.entries):
        with suppress(InputError):  # the default estimator may not know the model, either may have no batch
            listed, possible = (
                max((b for b in estimator.batches(demand.model, entry.device, Share()) if b <= max_batch), default=0)
                for estimator in (chosen, default)
            )
            if 0 < listed < possible:
                cuts.append(f"{demand.model} up to {listed} instead of {possible}")
    if cuts:
        note(f"batches are those that the estimator lists: {', '.join(dict.fromkeys(cuts))}")


def size_demands(
    demands: Sequence[Demand],
    models: KnownModels,
    dims: Mapping[str, int],
    note: NoteCallback = say_nothing,
    foreign: Container[str] = (),
) -> tuple[Demand, ...]:
    """Return the demands with their input sizes; a note reports assumed sizes.

    Raises `InputError` when a model lacks a given dimension, or a dimension has neither a usual nor a given size.
    ``dims``: sizes of dimensions without a size in their demand; ``foreign``: models that only a plug-in knows, whose
    demands stay unchanged.
    """
    sources = {demand.model: demand.source_model or demand.model for demand in demands}
    free = {name: models.list_dims(source) for name, source in sources.items() if source not in foreign}
    require_dimensions(dims, free.values())
    dims = {name: check_size(name, size) for name, size in dims.items()}
    sized = []
    for demand in demands:
        model = sources[demand.model]
        if model in foreign:
            sized.append(demand)
            continue
        parts: tuple[tuple[Sizes, float], ...] = (((), 1.0),) if demand.dims is None else parse_mix(demand.dims).parts
        more = tuple((name, size) for name, size in dims.items() if name in free[demand.model])
        whole = []
        for sizes, part in parts:
            sized_model = sized_name(model, {**dict(more), **dict(sizes)}.items())
            whole.append((models.find_model(sized_model).sizes, part))
            if demand.dims is None and (remark := models.describe_sizes(sized_model)):
                note(remark)
        mix = str(SizeMix(tuple(whole))) if any(sizes for sizes, _ in whole) else None
        sized.append(replace(demand, dims=mix))
    return tuple(sized)


def collect_tried_runs(profiled_models: KnownModels, models: Iterable[str]) -> TriedRuns:
    """Return the database's records of successful and failed runs of the given models."""
    tried = []
    names: dict[str, list[str]] = {}
    for model in models:
        with suppress(InputError):
            tried.append(profiled_models.find_model(model).tried_runs(model))
            names.setdefault(profiled_models.find_recorded_name(model), []).append(model)

    def list_names(recorded: str) -> list[str]:
        return names.get(recorded, [])

    groups = profiled_models.groups
    return TriedRuns(
        tuple(failed for runs in tried for failed in runs.failed)
        + tuple(run for group in groups.failed for run in group.rename(list_names)),
        frozenset(measured for runs in tried for measured in runs.measured),
        frozenset(
            (device, tuple(sorted(named)))
            for device, group in groups.together
            for named in rename_workloads(group, list_names)
        ),
    )


def _note_mixing_models(
    verdicts: BatchVerdicts, files: Mapping[str, ModelFile], models: Sequence[str], note: NoteCallback
) -> None:
    """Note models whose requests must not share a batch; absent files are not examined."""
    for model in models:
        file = files.get(model)
        if file is None or not file.sha256 or not file.path or not Path(file.path).is_file():
            continue
        if (output := verdicts.judge(Path(file.path), file.sha256)) is not None:
            note(f"{describe_mixing(model, output)}; it is placed with batches of 1")


def _judge_doubts(
    estimator: DatabaseEstimator, models: Sequence[str], fleet: Fleet, strict: bool, note: NoteCallback
) -> None:
    """Note unmeasured models with unknown ops; if ``strict``, refuse them and models with wide intervals."""
    for model in models:
        measured = estimator.known.devices_of(model)
        for entry in fleet.entries if strict else ():
            if (estimate := estimate_smallest(estimator, model, entry.device)) is not None:
                require_sure(estimate)
        guessed = any(entry.device.name not in measured for entry in fleet.entries)
        if guessed and (unknown := estimator.known.unknown_ops(model)):
            note(describe_unknown_ops(model, unknown))


def _find_host_work(database: KernelDb | None, fleet: Fleet, demands: Sequence[Demand]) -> HostWork:
    """Return the host work of serving; none for a fleet of several kinds of devices, for which it is unknown."""
    if len(fleet.entries) != 1:
        return NO_HOST_WORK
    entry = fleet.entries[0]
    rates_rps: dict[str, float] = {}
    for demand in demands:
        model = source_names([demand])[demand.model]
        rates_rps[model] = rates_rps.get(model, 0.0) + demand.rate_rps
    return serving_work(database, entry.device, rates_rps, alone=entry.count == 1)


def _list_graph_files(demands: Sequence[Demand]) -> dict[str, Path]:
    """Return the files of the models that are given by a path or in ``file``.

    Raises `InputError` when a model has two files.
    """
    files: dict[str, Path] = {}
    for demand in demands:
        model = demand.source_model or demand.model
        if demand.file is None and not is_path(model):
            continue
        path = Path(demand.file or model)
        if files.setdefault(model_name(model), path) != path:
            raise InputError(
                f"{demand.model}: the model {model_name(model)!r} is {files[model_name(model)]} and {path}",
                "give one file the same name everywhere, and another file another name",
            )
    return files


def _require_free_batch(path: Path) -> None:
    """Raise `InputError` for a file with a fixed batch of several items."""
    if (fixed := read_fixed_batch(path) or 1) > 1:
        raise InputError(
            f"{path} takes batches of {fixed} only, and requests come one by one",
            f"gpuprof profile {path} measures a copy that takes any, gpuprof zoo rebatch {path} -o FILE writes one",
        )


def _find_files(database: KernelDb | None, graphs: dict[str, Path]) -> dict[str, ModelFile]:
    files, columns = {}, ("run_id", "model", "model_path", "model_sha256")
    rows = [] if database is None else database.read_table("models", columns).to_pylist()
    # Sorted by time: the last file measured under a name is used.
    for row in sorted(rows, key=lambda row: str(row["run_id"])):
        if row["model_path"]:
            files[row["model"]] = ModelFile(row["model_path"], row["model_sha256"])
    for name, path in graphs.items():
        files[name] = ModelFile(str(path), read_onnx(path).sha256)
    return files


def _record_settings(
    demands: Sequence[Demand], database: KernelDb | None, fleet: Fleet, options: Options, planning: PlanningOptions
) -> PlannedWith:
    """Return hashes of the map's inputs, and the settings that a check of the map needs."""
    database_sha256 = None
    if database is not None:
        # Hash of the runs' ids and not of the files: compaction changes files but no figure.
        runs = sorted(set(database.read_table("models", ["run_id"])["run_id"].to_pylist()))
        database_sha256 = hashlib.sha256("\n".join(runs).encode()).hexdigest()
    return PlannedWith(
        estimator=identify(planning.estimator),
        premise=read_premise(planning.estimator),
        arrivals=planning.arrivals,
        fleet=tuple(map(_record_devices, fleet.entries)),
        **{name: getattr(options, name) for name in RECORDED_OPTIONS},
        host=options.host,
        precision=planning.precision,
        runtime=planning.runtime,
        host_us=planning.host_us,
        slo_sha256=demands.sha256 if isinstance(demands, DemandFile) else None,
        database_sha256=database_sha256,
    )


def _record_devices(entry: FleetEntry) -> PlannedDevices:
    """Return the devices of a fleet entry as a map records them, with the price if it differs from the catalogue's."""
    device, price = devices().get(entry.device.name), entry.device.price_per_hour
    is_own = price is not None and (device is None or device.price_per_hour != price)
    return PlannedDevices(device=entry.device.name, count=entry.count, price_per_hour=price if is_own else None)


def find_fleet(
    source: FleetArgument | None, database: KernelDb | None, planning: PlanningOptions, note: NoteCallback
) -> Fleet:
    """Return the devices that a plan may use; ``"any"`` excludes devices without the requested precision.

    Raises `InputError` when a name or a file is wrong.
    """
    own_devices = read_own_devices(planning.device_file)
    boards = {**devices(), **own_devices}
    offers = boards if planning.prices is None else read_offers(planning.prices, boards.values())

    def find(name: str | None) -> Device:
        device = resolve_device(name, database, own_devices, note)
        offer = offers.get(device.name, device)
        return device.with_price(offer.price_per_hour, offer.price_interval, offer.price_date)

    if isinstance(source, Fleet):
        fleet = source
    elif source is None:
        profiled = find(None)
        fleet = Fleet((FleetEntry(profiled, 1 if profiled.kind == "cpu" else None),))  # this machine, once
    elif isinstance(source, os.PathLike) or source.endswith(".toml"):
        fleet = read_fleet(Path(source), find)
    else:
        words = {item.strip().lower() for item in source.split(",")}
        fleet = parse_fleet(source, find, _priced_devices(find, offers, planning, note) if ANY in words else ())
    unpriced = [entry.device.name for entry in fleet.entries if entry.device.price_per_hour is None]
    if unpriced and len(unpriced) < len(fleet.entries):
        note(f"without a price, counted as 1 $/h: {', '.join(unpriced)}; a fleet.toml can give one")
    if planning.prices is not None:
        note(f"prices: {'; '.join(_describe_price(entry.device) for entry in fleet.entries)}")
    return fleet


def _describe_price(device: Device) -> str:
    if device.price_per_hour is None:
        return f"{device.name} none"
    spread = " ({:.4g} to {:.4g})".format(*device.price_interval) if device.price_interval else ""
    return f"{device.name} {device.price_per_hour:.4g}{spread} $/h of {device.price_date or 'unknown date'}"


def require_precision(fleet: Fleet, execution: Execution, is_measured: Callable[[str], bool]) -> None:
    """Refuse GPUs that lack the requested precision of unmeasured models.

    Raises `InputError` for the first such GPU.
    """
    for entry in fleet.entries:
        device = entry.device
        if device.kind == "gpu" and not execution.is_possible(device) and not is_measured(device.name):
            precisions = ", ".join(execution.possible_precisions(device))
            raise InputError(
                f"{device.name} has no {execution.precision} arithmetic", f"leave it out, or choose one of {precisions}"
            )


def _priced_devices(
    find: Callable[[str | None], Device],
    offers: Mapping[str, Device],
    planning: PlanningOptions,
    note: NoteCallback,
) -> list[Device]:
    priced = [find(name) for name, device in offers.items() if device.price_per_hour is not None]
    execution = planning.execution()
    lacking = [device.name for device in priced if not execution.is_possible(device)]
    if lacking:
        note(f"left out, without {execution.precision} arithmetic: {', '.join(lacking)}")
    return [device for device in priced if device.name not in lacking]


#: The default arrivals of a plan.
POISSON = "poisson"


def make_queueing(arrivals: str | None, models: Iterable[str]) -> QueueModel:
    """Return the queueing model for arrivals of a shape, at the rates of the demands.

    Raises `InputError` for an unknown shape, and for a trace that is missing, unreadable or lacks a planned model.
    ``arrivals``: as `gpuprof.domain.arrival_process.parse_arrivals` reads it, or the path of a trace; None: Poisson. A
    trace with model names gives a shape for each model, without names or with a single name one shape for all.
    """
    if arrivals is None or arrivals.strip().lower() == POISSON:
        return BatchQueue()
    shapes = _read_shapes(arrivals)
    if len(shapes) == 1:
        return ShapedQueue(BatchQueue(), next(iter(shapes.values())))
    queues = ModelQueues({model: ShapedQueue(BatchQueue(), shape) for model, shape in shapes.items()}, BatchQueue())
    # Query each model now, so that a trace without a model is refused here and not in the middle of a search.
    for model in models:
        queue_of(queues, model)
    return queues


def _read_shapes(text: str) -> Mapping[str, ArrivalProcess]:
    """Return the shape of each model's arrivals, or a single shape for all models."""
    path = Path(text)
    if not path.is_file():
        # The end of gamma:0.5 is no suffix.
        if path.suffix and text.partition(":")[0].strip().lower() not in FORMS:
            raise InputError(
                f"there is no trace {text}", "name a file with the column time_s, or a shape as in gamma:4"
            )
        return {"": parse_arrivals(text, 1.0)}
    return read_trace(path).arrivals()


def plan_map(problem: Problem, policy: Policy) -> DeploymentMap:
    """Return the policy's map after a feasibility check.

    Raises `InputError` when a demand is too large to be planned; `UnstableError` when the map breaks a rule: the policy
    is faulty, and its map must not be deployed.
    """
    refuse_oversized(problem)
    deployment = to_map(problem, policy.place(problem), _read_source_date())
    # The check covers every policy, plug-ins and our own alike. The rule on device time is excepted: it fails under an
    # estimator's premise (USHER's), which the user chose by name: `place` warns, and `check` refuses the map.
    broken = [fault for fault in check(deployment, collect_evidence(problem)) if fault.rule != "time"]
    if broken:
        rules = count_of(len(broken), "rule")
        raise UnstableError(
            f"the policy {deployment.policy} made a map that breaks {rules}, first: {broken[0]}",
            "choose another policy with --policy",
        )
    return deployment


def _read_source_date() -> str | None:
    """Return the time of the variable for reproducible builds; None where it is unset."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    try:
        return datetime.fromtimestamp(int(text), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        raise InputError(f"SOURCE_DATE_EPOCH must be seconds since 1970 but got {text!r}") from None
