"""The cluster of Elvinger's thesis (ETH, 2024, chapters 4 to 6), simulated on the V100 profiles that it prints."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.published_measurements import thesis_estimator, v100
from bench.reproduce.place_lines import PlaceLines, make_named_policy
from bench.reproduce.served_map import rewritten
from bench.reproduce.stand_in_db import MPS_STEP_PCT, estimate_shared_v100, stretch_time_ms
from gpuprof.domain.arrival_process import ArrivalProcess, GammaArrivals, RecordedArrivals, Times
from gpuprof.domain.catalogue import datasets
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeployedModel, DeploymentMap, Gpu, Partition, Replica
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import evidence
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Options as PlanOptions
from gpuprof.placement.problem import Problem
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.network import THESIS
from gpuprof.simulator.outcome import SimulationOutcome

#: MAX_WAIT_TIME of the router (§4.3.3).
TIMEOUT_MS = 100.0
#: 4000 requests at 500/s (§6.2.1), 2400 at 300/s (§6.2.2).
SECONDS = 8.0
#: Runs with other arrivals, of which the mean is taken; the thesis made one.
SEEDS = 5
#: As `gpuprof place` is told them. The MILPs hold their workers to no share by MPS (§6.1.3).
POLICIES: Mapping[str, str] = {
    "usher": "usher",
    "wao-usher": "usher -O creq=wao",
    "ao-milp": "milp -O unshared=true",
    "wsm-milp": "milp -O creq=wsm -O unshared=true",
    "igniter": "igniter",
    "optimal": "optimal",
}
#: The same where no policy of the thesis sets shares (Figure A.1).
UNSHARED: Mapping[str, str] = {"usher": "usher -O unshared=true", "wao-usher": "usher -O creq=wao -O unshared=true"}
#: gpuprof's own, planned with queues, its replicas under their shares, and served by its own rules.
OWN = "optimal"
#: Bytes of a request: 3 × 224 × 224 float32, and 512 token numbers of 64 bits (§6.1.2).
_IMAGE_BYTES, _TEXT_BYTES = 602_112.0, 4_096.0
_LANGUAGE = ("bert", "bloom_560", "gpt2", "t5", "xlnet")
_SOLVER_S = 20.0
#: Longest search of `optimal`, and the batch whose way to its node it plans with.
_OWN_LIMIT_S, _OWN_BATCH = 5.0, 16


@dataclass(frozen=True, slots=True)
class Experiment:
    """A workload: each model at the same rate and SLO.

    Attributes
    ----------
    models : tuple of str
    rate_rps : float
        Target rate of each model, which the policies plan for.
    slo_ms : float
    arrived : float
        Part of the target that the clients reached: they sleep between requests, and sending takes time too.
    weights : tuple of float
        Of each model's rate, in parts of ``rate_rps``; empty: all alike.
    """

    models: tuple[str, ...]
    rate_rps: float
    slo_ms: float
    arrived: float = 1.0
    weights: tuple[float, ...] = ()

    def rate_of(self, model: str) -> float:
        """Return the target rate of a model."""
        return self.rate_rps * (self.weights[self.models.index(model)] if self.weights else 1.0)

    def problem(self, estimator: Estimator, gpus: int | None, budget: float) -> Problem:
        """Return it on so many V100; None: as many as needed."""
        demands = tuple(Demand(model, self.rate_of(model), Slo(self.slo_ms)) for model in self.models)
        options = PlanOptions(latency_budget=budget, time_limit_s=_SOLVER_S)
        return Problem(demands, Fleet((FleetEntry(v100(), gpus),)), estimator, BatchQueue(), options)


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy's map, whether it passed the independent check, and the lines that write it."""

    policy: str
    deployment: DeploymentMap
    sound: bool
    lines: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs that hold something."""
        return sum(len(node.gpus) for node in self.deployment.nodes)

    def replicas(self, model: str) -> list[Replica]:
        """Return the replicas of a model."""
        return [replica for _, _, _, replica in self.deployment.places() if replica.model == model]

    def batch(self, model: str) -> int | None:
        """Return the batch size of a model's replicas, None where it has none or several."""
        sizes = {replica.batch for replica in self.replicas(model)}
        return sizes.pop() if len(sizes) == 1 else None


def plan(policy: str, experiment: Experiment, gpus: int | None, shares: bool = True) -> Plan:
    """Return what a policy decides: by batch latency below the SLO, iGniter below half of it.

    iGniter plans for as many GPUs as needed, and the first ``gpus`` of them are used (§5.1.5). Without ``shares``
    USHER's replicas are held to none, as they are in Figure A.1.
    """
    if policy == OWN:
        return _plan_own(experiment, gpus)
    igniter = policy == "igniter"
    estimator = estimate_shared_v100() if igniter else thesis_estimator()
    named = (POLICIES if shares else {**POLICIES, **UNSHARED})[policy]
    given = experiment.problem(estimator, None if igniter else gpus, 0.5 if igniter else 1.0)
    deployment = to_map(given, make_named_policy(named).place(given))
    sound = _is_sound(given, deployment)
    lines = _list_lines(given, named, whole=not igniter)
    return Plan(policy, deployment if gpus is None else first_gpus(deployment, gpus), sound, lines)


def _is_sound(given: Problem, deployment: DeploymentMap) -> bool:
    """Return whether a map keeps every rule but that of the devices' time, which USHER's premise does not regard."""
    return all(fault.rule == "time" for fault in check(deployment, evidence(given)))


def _plan_own(experiment: Experiment, gpus: int | None) -> Plan:
    """Return what `optimal` decides with queues and shares, told how long a request is on its way."""
    given = experiment.problem(estimate_shared_v100(), gpus, 1.0)
    longest = max(_leg_ms(model, _OWN_BATCH) for model in experiment.models)
    options = replace(given.options, latency_budget=None, time_limit_s=_OWN_LIMIT_S, overhead_ms=longest)
    given = replace(given, options=options)
    deployment = to_map(given, make_named_policy(POLICIES[OWN]).place(given))
    return Plan(OWN, deployment, _is_sound(given, deployment), _list_lines(given, POLICIES[OWN], whole=False))


def _list_lines(given: Problem, policy: str, *, whole: bool) -> tuple[str, ...]:
    """Write the demands and return the lines that plan them, ``whole``: on whole GPUs, as the thesis measured them."""
    lines, options = PlaceLines(), given.options
    if whole:
        database = lines.add_import(Path(str(datasets() / "v100_profiles.csv")), "thesis-db")
    else:
        step = f"{MPS_STEP_PCT:g}"
        database = lines.add_stand_in("thesis-shares-db", "--gpus", v100().name, "--step-pct", step)
    count = given.fleet.entries[0].count
    rules = ["--estimator", "usher", "--gpus", v100().name if count is None else f"{v100().name}:{count}"]
    rules += ["--time-limit", f"{options.time_limit_s:g}"]
    if options.latency_budget is not None:
        rules += ["--latency-budget", f"{options.latency_budget:g}"]
    if options.overhead_ms:
        rules += ["--overhead-ms", repr(options.overhead_ms)]
    demands = given.demands
    asked = "-".join(f"{one.model}-{one.rate_rps:g}" for one in demands)
    lines.add_place(f"{asked}-{demands[0].slo.latency_ms:g}ms", demands, database, rules, policy)
    return lines.lines()


def list_lines(plans: Iterable[Plan]) -> tuple[str, ...]:
    """Return the lines of all plans, each once, those that make databases first."""
    lines = dict.fromkeys(line for made in plans for line in made.lines)
    return tuple(sorted(lines, key=lambda line: line.startswith("gpuprof place")))


def first_gpus(deployment: DeploymentMap, count: int) -> DeploymentMap:
    """Return the map without all GPUs after the first ``count``."""
    nodes = []
    for node in deployment.nodes:
        kept = node.gpus[: max(0, count)]
        count -= len(kept)
        if kept:
            nodes.append(node.model_copy(update={"gpus": kept}))
    return deployment.model_copy(update={"nodes": tuple(nodes)})


def goodput(made: Plan, experiment: Experiment) -> dict[str, float]:
    """Return the simulated goodput of each model in requests/s, the mean over `SEEDS` runs."""
    runs = [_run(made, experiment, seed) for seed in range(SEEDS)]
    return {model: sum(run[model] for run in runs) / SEEDS for model in experiment.models}


def arrived_rps(experiment: Experiment) -> dict[str, float]:
    """Return the requests/s of each model that arrive, the mean over the same runs: what an ideal cluster answers."""
    counts = {m: sum(len(_arrivals(experiment, m, seed)) for seed in range(SEEDS)) for m in experiment.models}
    return {model: count / SECONDS / SEEDS for model, count in counts.items()}


def _arrivals(experiment: Experiment, model: str, seed: int) -> Times:
    """Draw a model's requests: exponential gaps (§4.3.1, listing 4.4)."""
    mean = experiment.rate_of(model) * experiment.arrived
    random = np.random.default_rng([seed, experiment.models.index(model)])
    times = GammaArrivals(mean).stream(random).take(int(mean * SECONDS + 10.0 * (mean * SECONDS) ** 0.5 + 10.0))
    return times[times < SECONDS * 1e9]


def _run(made: Plan, experiment: Experiment, seed: int) -> dict[str, float]:
    if made.policy == OWN:
        return _run_own(made, experiment, seed)
    in_time = dict.fromkeys(experiment.models, 0.0)
    outcome = simulate_cluster(made, experiment, seed)
    for one in () if outcome is None else outcome.models:
        in_time[one.model.split("@")[0]] += one.goodput_rps
    return in_time


def simulate_cluster(made: Plan, experiment: Experiment, seed: int) -> SimulationOutcome | None:
    """Return what a map's clients see by the rules of the thesis's cluster; None where nothing is placed.

    Each replica is a model of its own, ``model@0``, ``model@1`` …
    """
    served = as_served(made)
    arrivals: dict[str, ArrivalProcess] = {}
    for model in experiment.models:
        streams = [name for name in served.models if name.split("@")[0] == model]
        batches = [replica.batch for replica in made.replicas(model)]
        parts = in_turn(_arrivals(experiment, model, seed), batches)
        arrivals |= {name: RecordedArrivals(part, SECONDS) for name, part in zip(streams, parts, strict=True)}
    if not arrivals:
        return None
    legs = {replica.model: (_leg_ms(replica.model, replica.batch), 0.0) for _, _, _, replica in served.places()}
    options = SimulationOptions(SECONDS, seed=seed, refuse_hopeless=False, legs_ms=legs, batch_timeout_ms=TIMEOUT_MS)
    return simulate(served, arrivals, options)


def _run_own(made: Plan, experiment: Experiment, seed: int) -> dict[str, float]:
    """Return the goodput of a map by the rules of gpuprof's own server, requests as long on their way as batches."""
    served, legs = made.deployment, dict[str, tuple[float, float]]()
    for _, _, _, replica in served.places():
        on_its_way = _leg_ms(replica.model, replica.batch)
        legs[replica.model] = (max(on_its_way, legs.get(replica.model, (0.0, 0.0))[0]), 0.0)
    arrivals: dict[str, ArrivalProcess] = {
        model: RecordedArrivals(_arrivals(experiment, model, seed), SECONDS) for model in legs
    }
    in_time = dict.fromkeys(experiment.models, 0.0)
    if arrivals:
        for outcome in simulate(served, arrivals, SimulationOptions(SECONDS, seed=seed, legs_ms=legs)).models:
            in_time[outcome.model] += outcome.goodput_rps
    return in_time


def _leg_ms(model: str, batch: int) -> float:
    """Return how long a full batch is on its way from the router to its node (§4.6.2)."""
    language = model.split("@")[0] in _LANGUAGE
    return THESIS.ms(batch * (_TEXT_BYTES if language else _IMAGE_BYTES))


def in_turn(times: Times, batches: Sequence[int]) -> list[Times]:
    """Split a model's requests over its replicas as the thesis's router does (§4.3.3, listing 4.3).

    It builds one batch at a time, for one replica: when that is full or its first request has waited `TIMEOUT_MS`, it
    goes, and the next batch is the next replica's.

    Parameters
    ----------
    times : ndarray of int64, ascending
        Nanoseconds.
    batches : sequence of int
        Batch size of each replica.

    Returns
    -------
    list of ndarray, one for each replica
    """
    parts: list[list[int]] = [[] for _ in batches]
    replica, held, since = 0, 0, 0
    for time in times.tolist() if batches else ():
        if held and time - since >= TIMEOUT_MS * 1e6:
            replica, held = (replica + 1) % len(batches), 0
        if not held:
            since = time
        parts[replica].append(time)
        held += 1
        if held == batches[replica]:
            replica, held = (replica + 1) % len(batches), 0
    return [np.array(part, np.int64) for part in parts]


def as_served(made: Plan) -> DeploymentMap:
    """Return the map with the times that its replicas take under their shares, each as a model of its own.

    As a model of its own a replica gets just the requests that the thesis's router sends it.
    """
    counts: defaultdict[str, int] = defaultdict(int)
    models: dict[str, DeployedModel] = {}

    def own(gpu: Gpu, partition: Partition, replica: Replica) -> Replica:
        name = f"{replica.model}@{counts[replica.model]}"
        counts[replica.model] += 1
        models[name] = made.deployment.models[replica.model]
        times = tuple(
            stretch_time_ms(replica.model, size, replica.sm_share_pct) for size in range(1, replica.batch + 1)
        )
        return replica.model_copy(update={"model": name, "batch_latency_ms": times})

    return rewritten(made.deployment, own).model_copy(update={"models": models})


def rebuild_map(experiment: Experiment, gpus: Sequence[Mapping[str, int]]) -> Plan:
    """Return a map that the thesis prints: model → batch size on each GPU, without shares by MPS."""
    given = experiment.problem(thesis_estimator(), len(gpus), 1.0)
    counts = Counter(model for gpu in gpus for model in gpu)
    drawn = tuple(
        PlacedGpu(
            v100().name,
            (
                PlacedPartition(
                    tuple(_replica(model, batch, counts[model], experiment) for model, batch in gpu.items()),
                    unshared=True,
                ),
            ),
        )
        for gpu in gpus
    )
    return Plan("printed", to_map(given, Placement("printed", drawn)), sound=True)


def _replica(model: str, batch: int, count: int, experiment: Experiment) -> PlacedReplica:
    return PlacedReplica(model, batch, 1, Share(), experiment.rate_rps / count)
