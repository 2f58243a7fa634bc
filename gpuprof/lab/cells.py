"""Cells of an experiment: one scenario, planned by one policy and simulated; kept as lines of JSON, run in parallel."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gpuprof.domain.arrival_process import ArrivalProcess, DeterministicArrivals, GammaArrivals, RecordedArrivals, Times
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import DeployedModel, DeploymentMap, Gpu, ModelFile, Partition, Replica, share_of
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimator, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry, parse_fleet, read_fleet
from gpuprof.domain.map_sources import describe_sources
from gpuprof.errors import DISTRIBUTION, GpuprofError, InputError, PluginError
from gpuprof.estimators.builtin import make_estimator, name_services, read_premise
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.kernel_db.store import KernelDb
from gpuprof.lab.scenarios import Manner, Scenario, Setup, Traffic, build_database, leg_ms, stretch_time_ms
from gpuprof.placement.deploy import Outcome, compare, measure
from gpuprof.placement.policies import Policy, describe_policy, make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.plugins import hash_source, identify
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.outcome import ModelOutcome, SimulationOutcome

#: A cell's outcome: plain numbers, texts and mappings, as JSON holds them.
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LabCell:
    """A cell of an experiment: a scenario planned by a policy."""

    scenario: Scenario
    #: ``name``, ``name+option=value``, ``module:Class`` or an object; the suffix ``@setup`` selects its conditions.
    policy: str | Policy
    estimator: str | Estimator | None = None  #: Estimator of the policy; None: the scenario's.
    seed: int = 0
    limit_s: float | None = None  #: Longest search; None: the scenario's.
    repeats: int = 1  #: Simulations with other arrivals, of which the mean is taken.
    varied: tuple[tuple[str, str], ...] = ()  #: Changes made to the scenario, for the record.

    @property
    def setup(self) -> Setup:
        """The conditions under which the policy plans."""
        return self.scenario.setup(describe_policy(self.policy))

    @property
    def key(self) -> str:
        """Hash of everything that determines the record, plug-ins' files included."""
        scenario, setup = self.scenario, self.setup
        plugins = [self.policy, setup.estimator if self.estimator is None else self.estimator]
        content = [
            scenario.title,
            [asdict(demand) for demand in scenario.demands],
            scenario.gpus,
            asdict(setup),
            None if scenario.traffic is None else asdict(scenario.traffic),
            [self.seed, self.limit_s, self.repeats, version(DISTRIBUTION)],
            [(plugin if isinstance(plugin, str) else repr(plugin), hash_source(plugin)) for plugin in plugins],
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def parse_policy(spec: str | Policy) -> Policy:
    """Return a policy, that of ``name``, ``name+option=value+…`` or ``module:Class``, with or without ``@setup``.

    Raises `InputError` for a policy or an option that does not exist.
    """
    if not isinstance(spec, str):
        return make_policy(spec)
    name, *options = spec.partition("@")[0].split("+")
    pairs = [option.partition("=") for option in options]
    return make_policy(name, {key: value for key, _, value in pairs})


def read_records(path: Path) -> dict[str, Record]:
    """Return the records of a file by their cells' keys; an incomplete last line is skipped."""
    records = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a killed run
            continue
        records[record["key"]] = record
    return records


def run_cells(
    cells: Sequence[LabCell],
    work: Path,
    data: Path,
    jobs: int = 1,
    progress: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> list[Record]:
    """Return the record of each cell; cells already in ``work/results.jsonl`` are not run again.

    Each record is appended as soon as its cell is done, so that a later call can resume. Cells with objects run in this
    process. Raises `InputError` for missing published data, or for an unknown policy or estimator.
    """
    for cell in cells:
        parse_policy(cell.policy)
        read_premise(cell.estimator or cell.setup.estimator)
        _database_path(cell.setup, work, data)
    path = work / "results.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    records = read_records(path)
    waiting = list({cell.key: cell for cell in cells if cell.key not in records}.values())
    done, total = len(cells) - len(waiting), len(cells)
    progress("begun", done, total)
    with path.open("a", encoding="utf-8") as file:
        for record in _run_all(waiting, work, data, jobs):
            file.write(json.dumps(record) + "\n")
            file.flush()
            records[record["key"]] = record
            done += 1
            progress(f"{record['scenario']} by {record['policy']}", done, total)
    return [records[cell.key] for cell in cells]


def _run_all(cells: Sequence[LabCell], work: Path, data: Path, jobs: int) -> Iterable[Record]:
    has_objects = any(not isinstance(plugin, str | None) for cell in cells for plugin in (cell.policy, cell.estimator))
    if jobs <= 1 or len(cells) <= 1 or has_objects:
        yield from (run_cell(cell, work, data) for cell in cells)
        return
    # Forked children would share the threads of pyarrow and HiGHS with this process.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(cells)), mp_context=context) as pool:
        for future in as_completed([pool.submit(run_cell, cell, work, data) for cell in cells]):
            yield future.result()


def run_cell(cell: LabCell, work: Path, data: Path) -> Record:
    """Plan and simulate one cell; the record of a failed policy has a ``reason``."""
    scenario, setup = cell.scenario, cell.setup
    record: Record = {
        "key": cell.key,
        "suite": scenario.suite,
        "scenario": scenario.name,
        "policy": describe_policy(cell.policy),
        "estimator": identify(cell.estimator or setup.estimator),
        "database": setup.database,
        "gpus_allowed": setup.gpus or scenario.gpus,
        **dict(cell.varied),
        "seed": cell.seed,
        "rate_rps": sum(demand.rate_rps for demand in scenario.demands),
        "arriving_rps": sum(demand.rate_rps for demand in scenario.demands)
        * (scenario.traffic or Traffic(1.0)).arrived,
    }
    try:
        problem, judge = make_problem(cell, work, data)
        outcome = compare(problem, [(record["policy"], parse_policy(cell.policy))])[0]
        record["has_failed"] = outcome.has_failed
        record |= _planned_figures(outcome, problem, judge)
    except GpuprofError as error:
        return {**record, "reason": str(error), "has_failed": isinstance(error, PluginError)}
    deployment = outcome.deployment
    if deployment is None or scenario.traffic is None:
        return record
    count = scenario.gpus.rpartition(":")[2]
    if setup.is_cut and count.isdigit():
        deployment = keep_first_gpus(deployment, int(count))
    try:
        record |= _simulated_figures(cell, deployment, judge)
    except GpuprofError as error:
        record["reason"] = f"not simulated: {error}"
    return record


def make_problem(cell: LabCell, work: Path, data: Path) -> tuple[Problem, Estimator]:
    """Return a cell's problem, and the estimator that times the simulated batches.

    Raises `InputError` when its data are not there, or a demand, device or estimator is unknown.
    """
    scenario, setup = cell.scenario, cell.setup
    path = _database_path(setup, work, data)
    judge = planner = _make_estimator(setup.estimator, path)
    if cell.estimator is not None:
        planner = make_estimator(cell.estimator, KernelDb(path))
    sources = {demand.model: demand.source_model or demand.model for demand in scenario.demands}
    planning_services, judging_services = (name_services(estimator, sources) for estimator in (planner, judge))
    fleet = _find_fleet(setup.gpus or scenario.gpus, path)
    if setup.is_cut:
        fleet = Fleet(tuple(FleetEntry(entry.device) for entry in fleet.entries))
    options = Options(
        latency_budget=setup.latency_budget,
        max_processes=setup.max_processes,
        overhead_ms=setup.overhead_ms,
        time_limit_s=setup.limit_s if cell.limit_s is None else cell.limit_s,
        seed=cell.seed,
    )
    files = {service: ModelFile(None, model) for service, model in sources.items()}
    return Problem(scenario.demands, fleet, planning_services, BatchQueue(), options, files), judging_services


def _database_path(setup: Setup, work: Path, data: Path) -> Path:
    path = Path(setup.database)
    is_path = path.is_dir() and (path.is_absolute() or len(path.parts) > 1)
    return path if is_path else build_database(setup.database, work, data)


@cache
def _make_estimator(name: str, database: Path) -> Estimator:
    return make_estimator(name, KernelDb(database))


def _find_fleet(gpus: str, database: Path) -> Fleet:
    if gpus.endswith(".toml"):
        return read_fleet(Path(gpus), device)
    if gpus:
        return parse_fleet(gpus, device)
    profiled = Counter(KernelDb(database).read_table("models", ["device"])["device"].to_pylist())
    if not profiled:
        raise InputError(f"{database} holds no measurement", "profile models into it, or name devices in a fleet.toml")
    return parse_fleet(profiled.most_common(1)[0][0], device)


def _planned_figures(outcome: Outcome, problem: Problem, judge: Estimator) -> Record:
    figures: Record = {"milliseconds": 1000.0 * outcome.seconds, "reason": outcome.reason}
    deployment, objective = outcome.deployment, outcome.objective
    if deployment is None or objective is None:
        return figures
    replicas = [replica for *_, replica in deployment.places()]
    devices = {entry.device.name: entry.device for entry in problem.fleet.entries}
    shares: Counter[str] = Counter()
    for replica in replicas:
        shares[replica.model] += replica.sm_share_pct  # type: ignore[assignment]  # counts shares, not things
    counts = Counter(replica.model for replica in replicas)
    serves_all = outcome.missing_rps <= 0.0
    figures |= {
        "gpus": objective.gpus,
        "gpus_for_all": objective.gpus if serves_all else None,
        "cost_per_hour": objective.cost_per_hour,
        "planned_rps": objective.goodput_rps,
        "missing_rps": outcome.missing_rps,
        "lower_bound_gpus": deployment.predicted.lower_bound_gpus,
        "broken_rules": len(outcome.violations),
        "sources": describe_sources(deployment),
        "slack_pct": 100.0 * objective.internal_slack,
        "fragmentation_pct": 100.0 * _measure_fragmentation(deployment, devices, objective.external_fragmentation),
        "shares": dict(shares),
        "batches": {replica.model: replica.batch for replica in replicas if counts[replica.model] == 1},
        "replicas": dict(counts),
        "plan": describe_plan(deployment),
    }
    for name, busy in (("slack_asked_pct", False), ("slack_busy_pct", True)):
        activity = _make_activity(judge, devices, problem.options.max_processes or 1, deployment, busy=busy)
        try:
            slack = measure(deployment, devices, activity).internal_slack
        except GpuprofError:  # the estimator has no figure of a share invented by the policy
            continue
        figures[name] = 100.0 * slack
    return figures


def _measure_fragmentation(deployment: DeploymentMap, devices: Mapping[str, Device], unused_part: float) -> float:
    """Return the fraction of the GPUs in no share (ParvaGPU, eq. 4); under MIG, of the units instances can have."""
    cut = {gpu.device for _, gpu, partition, _ in deployment.places() if partition.mig}
    if len(devices) != 1 or not cut:
        return unused_part
    (kind,) = devices.values()
    most = max(profile.sms for profile in kind.mig_profiles)
    return max(0.0, 1.0 - (1.0 - unused_part) * kind.compute_units / most)


def _make_activity(
    estimator: Estimator, devices: Mapping[str, Device], most_processes: int, deployment: DeploymentMap, *, busy: bool
) -> Callable[[str, Replica], float]:
    """Return the activity of a replica: its throughput over the highest of any batch and processes in its share.

    ``busy``: as if each share were busy all the time.
    """
    shares = {id(replica): share_of(partition, replica) for _, _, partition, replica in deployment.places()}

    def activity(kind: str, replica: Replica) -> float:
        share, utilization = shares[id(replica)], replica.predicted.utilization or 0.0
        most = 0.0
        for batch in estimator.batches(replica.model, devices[kind], share):
            for processes in range(1, most_processes + 1):
                try:
                    estimate = estimator.estimate(replica.model, devices[kind], batch, share, (), processes)
                except InputError:  # not every batch was measured with so many processes
                    continue
                most = max(most, estimate.throughput_rps.value)
        part = min(1.0, (replica.predicted.throughput_rps or 0.0) / most) if most else 1.0
        return part / min(1.0, utilization) if busy and utilization > 0 else part

    return activity


def _simulated_figures(cell: LabCell, deployment: DeploymentMap, judge: Estimator) -> Record:
    scenario, manner = cell.scenario, cell.setup.manner
    traffic = scenario.traffic or Traffic(1.0)
    runs = [
        simulate_service(deployment, scenario.demands, manner, judge, replace(traffic, seed=cell.seed + number))
        for number in range(cell.repeats)
    ]
    services = [service for run in runs for service in run.values()]
    unmeasured = cell.setup.manner == "batches" and {
        replica.model
        for _, gpu, partition, replica in deployment.places()
        if _time_by_measurements(judge, gpu, partition, replica) is replica
    }
    late = sorted(
        {model for run in runs for model, service in run.items() if service.is_late}, key=lambda name: (len(name), name)
    )
    requests = sum(service.requests for service in services)
    text = f"{', '.join(sorted(unmeasured))} simulated by the planned times: not measured" if unmeasured else ""
    return {
        "reason": text,
        "goodput_rps": sum(service.goodput_rps for service in services) / cell.repeats,
        "in_time_pct": 100.0 * sum(service.in_time for service in services) / requests if requests else None,
        "late": " ".join(late),
        "late_count": len(late),
    }


def keep_first_gpus(deployment: DeploymentMap, count: int) -> DeploymentMap:
    """Return the map without all GPUs after the first ``count``."""
    nodes = []
    for node in deployment.nodes:
        first = node.gpus[: max(0, count)]
        count -= len(first)
        if first:
            nodes.append(node.model_copy(update={"gpus": first}))
    return deployment.model_copy(update={"nodes": tuple(nodes)})


def describe_plan(deployment: DeploymentMap) -> str:
    """Return ``[model batch share%, …] …`` with a bracket for each GPU; the share, or the requirement used instead."""

    def describe(replica: Replica) -> str:
        creq = replica.predicted.creq
        return f"{replica.model} {replica.batch} {replica.sm_share_pct if creq is None else creq.pct:.3g}%"

    gpus = [gpu for node in deployment.nodes for gpu in node.gpus]
    return " ".join(
        "[" + ", ".join(describe(replica) for part in gpu.partitions for replica in part.replicas) + "]" for gpu in gpus
    )


#: MAX_WAIT_TIME of the thesis's router (§4.3.3).
_ROUTER_WAIT_MS = 100.0
#: iGniter §3.1: half of the SLO is for filling the batch; a workload below this part of its rate has failed.
_IGNITER_BUDGET, _LEAST_THROUGHPUT = 0.5, 0.99


@dataclass(frozen=True, slots=True)
class ServedDemand:
    """Simulated service of one demand."""

    goodput_rps: float
    requests: int
    in_time: int
    is_late: bool  #: Misses its SLO, or less than 99% of its requests are answered.


def simulate_service(
    deployment: DeploymentMap, demands: Sequence[Demand], manner: Manner, estimator: Estimator, traffic: Traffic
) -> dict[str, ServedDemand]:
    """Return the simulated service of each demand by its model.

    ``estimator`` gives the times of ``batches`` and ``neighbours``: the scenario's own, whichever planned the map.
    """
    if not any(True for _ in deployment.places()):
        return {demand.model: _serve_nothing(demand, traffic) for demand in demands}
    outcome = _MANNERS[manner](deployment, demands, estimator, traffic)
    streams: defaultdict[str, list[ModelOutcome]] = defaultdict(list)
    for model in outcome.models:
        streams[model.model.split("@")[0]].append(model)
    return {
        demand.model: _sum_streams(served) if (served := streams[demand.model]) else _serve_nothing(demand, traffic)
        for demand in demands
    }


def _serve_nothing(demand: Demand, traffic: Traffic) -> ServedDemand:
    requests = round(demand.rate_rps * traffic.arrived * (traffic.seconds - traffic.warmup_s))
    return ServedDemand(0.0, requests, 0, is_late=True)


def _sum_streams(streams: Sequence[ModelOutcome]) -> ServedDemand:
    requests, answered = sum(stream.requests for stream in streams), sum(stream.answered for stream in streams)
    late = any(stream.p99_ms is None or stream.p99_ms > stream.slo_ms for stream in streams if stream.requests)
    return ServedDemand(
        goodput_rps=sum(stream.goodput_rps for stream in streams),
        requests=requests,
        in_time=sum(stream.in_time for stream in streams),
        is_late=late or answered < _LEAST_THROUGHPUT * requests or not requests,
    )


def draw_arrivals(demand: Demand, number: int, traffic: Traffic) -> Times:
    """Draw the requests of a demand with exponential gaps (thesis §4.3.1); ``number``: its position."""
    mean = demand.rate_rps * traffic.arrived
    random = np.random.default_rng([traffic.seed, number])
    expected = mean * traffic.seconds
    times = GammaArrivals(mean).stream(random).take(int(expected + 10.0 * expected**0.5 + 10))
    return times[times < traffic.seconds * 1e9]


def _serve(
    deployment: DeploymentMap, demands: Sequence[Demand], estimator: Estimator, traffic: Traffic
) -> SimulationOutcome:
    return simulate(deployment, _record(deployment, demands, traffic), _options(traffic))


def _serve_stretched(
    deployment: DeploymentMap, demands: Sequence[Demand], estimator: Estimator, traffic: Traffic
) -> SimulationOutcome:
    stretched = deployment.change_replicas(lambda gpu, partition, replica: _stretch(replica))
    legs: dict[str, tuple[float, float]] = {}
    for *_, replica in stretched.places():
        legs[replica.model] = (max(leg_ms(replica.model, replica.batch), legs.get(replica.model, (0.0, 0.0))[0]), 0.0)
    return simulate(stretched, _record(stretched, demands, traffic), _options(traffic, legs_ms=legs))


def _serve_batches(
    deployment: DeploymentMap, demands: Sequence[Demand], estimator: Estimator, traffic: Traffic
) -> SimulationOutcome:
    timed = deployment.change_replicas(partial(_time_by_measurements, estimator))
    return simulate(timed, _space_evenly(timed), _options(traffic, refuse_hopeless=False))


def _time_by_measurements(estimator: Estimator, gpu: Gpu, partition: Partition, replica: Replica) -> Replica:
    """Return the replica with the estimator's times; unchanged if the estimator has none for its batch."""
    share, kind = share_of(partition, replica), device(gpu.device)
    times_ms = {}
    for size in estimator.batches(replica.model, kind, share):
        with suppress(InputError):  # more processes exceed the memory earlier
            time = estimator.estimate(replica.model, kind, size, share, (), replica.processes).latency_ms
            times_ms[size] = time.value
    if max(times_ms, default=0) < replica.batch:
        return replica
    batch_ms = np.interp(np.arange(1, replica.batch + 1), list(times_ms), list(times_ms.values()))
    return replica.model_copy(update={"batch_latency_ms": tuple(batch_ms.tolist())})


def _serve_beside_neighbours(
    deployment: DeploymentMap, demands: Sequence[Demand], estimator: Estimator, traffic: Traffic
) -> SimulationOutcome:
    """Simulate with times for all neighbours; a batch waits for half of the SLO, loading overlaps (equation 2)."""
    legs: dict[str, tuple[float, float]] = {}

    def slow_down(gpu: Gpu, partition: Partition, replica: Replica) -> Replica:
        share = share_of(partition, replica)
        neighbours = [
            Workload(neighbour.model, neighbour.batch, share_of(partition, neighbour))
            for neighbour in partition.replicas
            if neighbour is not replica
        ]
        sizes = [
            estimator.estimate(replica.model, device(gpu.device), size, share, neighbours)
            for size in range(1, replica.batch + 1)
        ]
        legs[replica.model] = (sizes[-1].overlapped_ms, 0.0)
        times = tuple(size.latency_ms.value - size.overlapped_ms for size in sizes)
        wait_ms = _IGNITER_BUDGET * deployment.models[replica.model].slo_ms
        return replica.model_copy(update={"batch_latency_ms": times, "max_wait_ms": wait_ms})

    slowed_map = deployment.change_replicas(slow_down)
    return simulate(slowed_map, _space_evenly(slowed_map), _options(traffic, refuse_hopeless=False, legs_ms=legs))


def _serve_in_cluster(
    deployment: DeploymentMap, demands: Sequence[Demand], estimator: Estimator, traffic: Traffic
) -> SimulationOutcome:
    """Simulate the thesis's cluster; each replica is a model of its own, ``model@0``, ``model@1`` …

    Each replica gets exactly the requests that the thesis's router sends to it.
    """
    models: dict[str, DeployedModel] = {}
    batches: defaultdict[str, list[int]] = defaultdict(list)

    def rename(gpu: Gpu, partition: Partition, replica: Replica) -> Replica:
        name = f"{replica.model}@{len(batches[replica.model])}"
        batches[replica.model].append(replica.batch)
        models[name] = deployment.models[replica.model]
        return _stretch(replica).model_copy(update={"model": name})

    plan = deployment.change_replicas(rename).model_copy(update={"models": models})
    arrivals: dict[str, ArrivalProcess] = {}
    for number, demand in enumerate(demands):
        parts = split_over_replicas(draw_arrivals(demand, number, traffic), batches[demand.model])
        for replica, part in enumerate(parts):
            arrivals[f"{demand.model}@{replica}"] = RecordedArrivals(part, traffic.seconds)
    legs = {replica.model: (leg_ms(replica.model.split("@")[0], replica.batch), 0.0) for *_, replica in plan.places()}
    options = _options(traffic, refuse_hopeless=False, legs_ms=legs, batch_timeout_ms=_ROUTER_WAIT_MS)
    return simulate(plan, arrivals, options)


_MANNERS: dict[Manner, Callable[[DeploymentMap, Sequence[Demand], Estimator, Traffic], SimulationOutcome]] = {
    "server": _serve,
    "stretched": _serve_stretched,
    "batches": _serve_batches,
    "neighbours": _serve_beside_neighbours,
    "cluster": _serve_in_cluster,
}


def _options(traffic: Traffic, **settings: object) -> SimulationOptions:
    return SimulationOptions(traffic.seconds, warmup_s=traffic.warmup_s, seed=traffic.seed, **settings)  # type: ignore[arg-type]


def _record(deployment: DeploymentMap, demands: Sequence[Demand], traffic: Traffic) -> dict[str, ArrivalProcess]:
    placed_models = {replica.model for *_, replica in deployment.places()}
    return {
        demand.model: RecordedArrivals(draw_arrivals(demand, number, traffic), traffic.seconds)
        for number, demand in enumerate(demands)
        if demand.model in placed_models
    }


def _space_evenly(deployment: DeploymentMap) -> dict[str, ArrivalProcess]:
    return {name: DeterministicArrivals(model.rate_rps) for name, model in deployment.models.items()}


def _stretch(replica: Replica) -> Replica:
    sizes = range(1, replica.batch + 1)
    times = tuple(stretch_time_ms(replica.model, size, replica.sm_share_pct) for size in sizes)
    return replica.model_copy(update={"batch_latency_ms": times})


def split_over_replicas(times: Times, batches: Sequence[int]) -> list[Times]:
    """Split a model's requests over its replicas by the rule of the thesis's router (§4.3.3, listing 4.3).

    The router builds one batch at a time: a full batch, or a batch whose first request has waited 100 ms, is sent, and
    the next batch is built for the next replica. ``times``: ascending, in nanoseconds; ``batches``: batch size of each
    replica.
    """
    parts: list[list[int]] = [[] for _ in batches]
    replica, size, begin_ns = 0, 0, 0
    for time in times.tolist() if batches else ():
        if size and time - begin_ns >= _ROUTER_WAIT_MS * 1e6:
            replica, size = (replica + 1) % len(batches), 0
        if not size:
            begin_ns = time
        parts[replica].append(time)
        size += 1
        if size == batches[replica]:
            replica, size = (replica + 1) % len(batches), 0
    return [np.array(part, np.int64) for part in parts]
