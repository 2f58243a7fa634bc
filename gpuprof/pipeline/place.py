"""``place``: the cheapest deployment map that keeps the SLOs."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

from gpuprof.domain.arrival_process import BatchPoissonArrivals
from gpuprof.domain.catalogue import datasets
from gpuprof.domain.deployment import DeploymentMap, PlanAtEnds, ReplicaPrediction, write_map
from gpuprof.domain.estimate import Figure
from gpuprof.domain.plural import count_of
from gpuprof.domain.sojourn import ModelQueues, ShapedQueue, queue_of
from gpuprof.errors import InfeasibleError, InputError
from gpuprof.estimators.builtin import IntervalEndEstimator
from gpuprof.export.triton import TritonRepository, describe_limits, name_files, read_repository, write_configurations
from gpuprof.pipeline.arguments import (
    DemandsArgument,
    FleetArgument,
    MapArgument,
    PathArgument,
    optional_path,
    relate_files,
    resolve_demands,
    resolve_map,
)
from gpuprof.pipeline.estimate import describe_full_occupancy
from gpuprof.pipeline.map_merging import MapMerger
from gpuprof.pipeline.problem import PlanningOptions, build_problem, default_limit_s, plan_map
from gpuprof.pipeline.result import NoteCallback, NoteList, Progress, ProgressCallback, Result, say_nothing
from gpuprof.pipeline.settings import Settings, option
from gpuprof.pipeline.simulate import ServiceSettings, SimulatedTraffic
from gpuprof.placement.chains import divide_by_time, divide_slos
from gpuprof.placement.feasibility import find_excess_time
from gpuprof.placement.limit import Limit, early_stop, interruptible
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import DEFAULT, Policy, make_policy
from gpuprof.placement.problem import MEANS, Problem, collect_evidence
from gpuprof.simulator.engine import simulate

#: Time slice of models in Triton: the default of NVIDIA's GPUs. On two cores under Linux 6.18 it fits the 99th
#: percentiles of ten models (1.4 and 2.8 ms are worse).
_TIME_SLICE_MS = 2.0
#: Requests in the simulation of a planned map: enough for the 99th percentile of each of some chains, in a second.
_SIMULATED_REQUESTS = 50_000


class MapOutput(Settings):
    """The output of a plan: the file, and conditions for writing the map."""

    title: ClassVar[str] = "Output"

    path: Path = option(
        Path("map.json"),
        "File to write the map to; merged models are written beside it.",
        "-o",
        "--output",
        output="file",
    )
    merge: bool = option(False, "Merge models that share a device and weights into one graph where this saves time.")
    best_effort: bool = option(False, "Write the map even when some demands cannot be met.")
    triton_repository: Path | None = option(
        None,
        "Triton model repository with the models of the SLO file; their planned configurations, for undivided GPUs, "
        "are written to MODEL/configs/NODE.pbtxt.",
    )


@dataclass(frozen=True, kw_only=True)
class PlaceResult(Result):
    """A map and its problem.

    Attributes
    ----------
    deployment : DeploymentMap
        Its ``unplaced`` lists the demands that it does not serve.
    """

    deployment: DeploymentMap
    problem: Problem
    output: MapOutput
    repository: TritonRepository | None = None  #: Triton model repository whose configurations `write` adds to.

    @property
    def is_complete(self) -> bool:
        """Whether every demand is met."""
        return not self.deployment.unplaced

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each replica: its place, share and batch, and its predicted figures."""
        rows = []
        for node, gpu, partition, replica in self.deployment.places():
            predicted = replica.predicted
            row: dict[str, object] = {
                "node": node.name,
                "gpu": gpu.index,
                "device": gpu.device,
                "mig": None if partition.mig is None else f"{partition.mig.profile}@{partition.mig.start}",
                "model": replica.model,
                "share_pct": replica.sm_share_pct,
                "turns": replica.turns or None,
                "processes": replica.processes,
                "batch": replica.batch,
                "rate_rps": replica.rate_rps,
                "latency_ms": predicted.latency_ms,
                "p99_ms": predicted.p99_ms,
                "slo_ms": self.deployment.models[replica.model].slo_ms,
                "utilization_pct": None if predicted.utilization is None else 100.0 * predicted.utilization,
                "goodput_rps": predicted.goodput_rps,
                "source": predicted.source,
            }
            if (creq := predicted.creq) is not None:
                low, high = creq.interval_pct or (None, None)
                row |= {"creq_metric": creq.metric, "creq_pct": creq.pct, "creq_low_pct": low, "creq_high_pct": high}
                row["creq_source"] = creq.source
            if (mreq := predicted.mreq) is not None:
                low, high = mreq.interval_bytes or (None, None)
                row |= {"mreq_bytes": mreq.bytes, "mreq_low_bytes": low, "mreq_high_bytes": high}
                row["mreq_source"] = mreq.source
            members = self.deployment.models[replica.model].members
            rows.append(row | ({"merged": list(members)} if members else {}))
        return rows

    def configurations(self) -> Mapping[str, str]:
        """Return the planned configurations of a Triton repository by their path below it; empty without one."""
        return {} if self.repository is None else write_configurations(self.deployment, self.repository)

    def write(self, path: PathArgument | None = None) -> Path:
        """Write the map to ``path``, by default to ``output.path``, and configurations into the repository.

        Returns the path. Raises `InfeasibleError` when a demand is not met; the map is written only with
        ``best_effort``; `InputError` when the map cannot be written.
        """
        target = optional_path(path) or self.output.path
        if self.is_complete or self.output.best_effort:
            write_map(relate_files(self.deployment, target.absolute().parent), target)
            if self.repository is not None:
                self.repository.write(self.configurations())
        if not self.is_complete:
            names = ", ".join(dict.fromkeys(demand.model for demand in self.deployment.unplaced))
            fix = f"{target} holds the rest" if self.output.best_effort else "--best-effort places the rest"
            raise InfeasibleError(f"not every demand can be met: {names}", fix)
        return target


def place(
    demands: DemandsArgument = Path("slo.csv"),
    *,
    fleet: FleetArgument | None = None,
    db: PathArgument | None = None,
    policy: str | Policy = DEFAULT,
    options: PlanningOptions = PlanningOptions(),  # noqa: B008 - frozen
    previous: MapArgument | None = None,
    output: MapOutput = MapOutput(),  # noqa: B008 - frozen
    progress: ProgressCallback = say_nothing,
    note: NoteCallback = say_nothing,
) -> PlaceResult:
    """Place replicas on devices so that every SLO is kept at the least cost.

    Raises `InputError` for a file, device, model or policy that is wrong or unknown; `UnstableError` when the policy
    makes a map that breaks a rule.

    Parameters
    ----------
    demands : path or sequence of Demand
        An slo.csv with ``model,rate_rps,slo_ms``, or its demands.
    fleet : Fleet, path or str, optional
        Devices: a fleet, a fleet.toml, or ``"a100-80:8,v100"``; a kind without a count: as many as needed. Default: the
        database's device, GPUs as many as needed, a CPU once.
    db : path, optional
        Kernel database; ``GPUPROF_DB`` or ``./gpuprof-db`` unless given.
    policy : str or Policy
        A name from `gpuprof.placement.policies`, ``"package.module:Class"``, or a policy.
    previous : path or DeploymentMap, optional
        The present map: among equally good maps, the map with the fewest moved replicas is chosen.
    output : MapOutput
        Whether models are merged, and where `PlaceResult.write` writes the map.

    Returns
    -------
    PlaceResult
        Returned for unmet demands, too: the map's ``unplaced`` lists them, and `PlaceResult.write` refuses the map.

    Examples
    --------
    An unprofiled file on GPUs of the catalogue; no GPU is needed:

    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(20.0))
    >>> plan = gpuprof.place([demand], fleet="a100-40")
    >>> plan.is_complete, plan.deployment.predicted.gpus
    (True, 1)
    >>> plan.to_frame()[["model", "device", "rate_rps"]].round(6).to_dict("records")
    [{'model': 'mlp', 'device': 'a100-40', 'rate_rps': 200.0}]
    >>> plan.write("map.json").name
    'map.json'
    """
    notes = NoteList(note)
    chosen = make_policy(policy)
    running = None if previous is None else resolve_map(previous)
    demands = resolve_demands(demands)
    steps = 3 if output.merge else 2
    progress(Progress("reading demands, devices and profiles", 0, steps))
    repository = None if output.triton_repository is None else read_repository(output.triton_repository)
    if repository is not None:
        notes.add(*(f"{name} of the repository is not planned: {why}" for name, why in repository.left_out.items()))
        demands = name_files(demands, repository)
        # A server is one process for each node: it has its GPUs whole, neither instances nor shares of them, and its
        # models run at once.
        options = options.replace(no_mig=True, no_mps=True, time_slice_ms=options.time_slice_ms or _TIME_SLICE_MS)
    problem = build_problem(demands, fleet, optional_path(db), options, notes.add)
    if problem.chains and output.merge:
        raise InputError("--merge joins models that are served alone, and the demands have chains", "leave it out")
    progress(Progress(f"planning {len(problem.demands)} demands", 1, steps))
    limit = Limit(problem.options.time_limit_s)

    def report_best(best: Placement) -> None:
        progress(Progress(f"planning {len(problem.demands)} demands: {_describe_best(best)}", 1, steps))

    # The planning time counts from here: the ends of the intervals get a part of it.
    with interruptible():
        planned = replace(problem, previous=running, on_progress=report_best)
        if problem.chains:
            planned, deployment = plan_chains(planned, chosen, notes.add)
            problem = replace(planned, previous=None, on_progress=None)
        else:
            deployment = plan_map(planned, chosen)
            if options.time_slice_ms and not deployment.unplaced:
                notes.add(*_simulate_misses(deployment))
    if output.merge and (output.best_effort or not deployment.unplaced):
        progress(Progress("merging models", 2, steps))
        merger = MapMerger(problem, chosen, deployment, output.path)
        notes.add(*(list(merger.run()) or ["nothing to merge: no two models share a device"]))
        problem, deployment = merger.problem, merger.deployment
    deployment = add_interval_ends(problem, chosen, deployment, limit)
    notes.add(
        *(f"{item.model}: {item.rate_rps:g} requests/s cannot be served: {item.reason}" for item in deployment.unplaced)
    )
    progress(Progress("the map is planned and checked", steps, steps))
    notes.add(*filter(None, (early_stop(deployment, problem.options.time_limit_s), describe_routers(deployment))))
    required = [creq for *_, replica in deployment.places() if (creq := replica.predicted.creq) is not None]
    figures = [Figure(creq.pct, creq.source) for creq in required if creq.metric == "max_occupancy"]
    notes.add(*describe_full_occupancy(figures))
    for fault in find_excess_time(deployment, collect_evidence(problem))[:1]:
        notes.add(
            f"the estimator {deployment.planned_with.estimator!r} promises more than a device gives: "
            f"check refuses this map: {fault}"
        )
    if repository is not None:
        notes.add(*describe_limits(deployment))
    return PlaceResult(notes=notes.all(), deployment=deployment, problem=problem, output=output, repository=repository)


def plan_chains(problem: Problem, policy: Policy, note: NoteCallback) -> tuple[Problem, DeploymentMap]:
    """Return the policy's map of chains that keeps their SLOs in a simulation, and its problem.

    The steps after the first get requests in groups, as the batches before them end, and not one by one as policies
    assume: where the simulation of the map misses an SLO, it is planned again for groups of full batches.
    """
    deployment = plan_map(problem, policy)
    if deployment.unplaced:
        by_time = divide_by_time(problem)
        if not (planned := plan_map(by_time, policy)).unplaced:
            problem, deployment = by_time, planned
    if deployment.unplaced or not (misses := _simulate_misses(deployment)):
        return problem, deployment
    grouped = divide_slos(replace(problem, queueing=_group_requests(problem, deployment)))
    planned = plan_map(grouped, policy)
    if not planned.unplaced:
        problem, deployment, misses = grouped, planned, _simulate_misses(planned)
    for remark in misses:
        note(remark)
    return problem, deployment


def _simulate_misses(deployment: DeploymentMap) -> list[str]:
    """Return remarks on the chains, or without chains the models, that miss their SLO in a simulation of the map."""
    total_rps = math.fsum(model.rate_rps for model in deployment.models.values())
    arrivals, seconds = SimulatedTraffic(duration_s=_SIMULATED_REQUESTS / total_rps).read_arrivals(deployment)
    options = ServiceSettings().simulation_options(deployment, arrivals, seconds, seed=0)
    outcome = simulate(deployment, arrivals, options)
    missed = [client for client in outcome.chains or outcome.models if client.slo_met is False]
    end = "% of the requests are within the SLO"
    return [f"{client.model}: in a simulation of the map {client.in_time_pct or 0.0:.3g}{end}" for client in missed]


def _group_requests(problem: Problem, deployment: DeploymentMap) -> ModelQueues:
    """Return the queueing model in which later steps get requests in groups: the largest batches of the step before."""
    queues = {demand.model: queue_of(problem.queueing, demand.model) for demand in problem.demands}
    for chain in problem.chains.values():
        for before, step in pairwise(chain.steps):
            size = max(replica.batch for *_, replica in deployment.places() if replica.model == before)
            queues[step] = ShapedQueue(queues[step], BatchPoissonArrivals(problem.demand(step).rate_rps, size))
    return ModelQueues(queues, problem.queueing)


def _describe_best(best: Placement) -> str:
    """Return the incumbent and the bound of a search in a few words."""
    text = count_of(len(best.gpus), "device")
    if best.unplaced:
        return f"{text}, {count_of(len(best.unplaced), 'demand')} short"
    return text if best.lower_bound_gpus is None else f"{text}, at least {best.lower_bound_gpus}"


def add_interval_ends(problem: Problem, policy: Policy, deployment: DeploymentMap, spent: Limit) -> DeploymentMap:
    """Return the map with the policy's plans at both ends of the estimates' intervals.

    A map with measured or interpolated times only is returned unchanged, so that it does not depend on the machine's
    speed. A map that was planned with the upper ends of all its times serves as the plan at that end, with its bound:
    no other placement is faster there. An end without enough time is left out. ``spent``: the time limit of the plan,
    still running.
    """
    predictions = [replica.predicted for *_, replica in deployment.places()]
    if all(prediction.latency_ms_interval is None or _is_observed(prediction) for prediction in predictions):
        return deployment
    upper = None
    if _is_planned_at_upper_ends(problem, deployment):
        upper = PlanAtEnds(
            gpus=deployment.predicted.gpus,
            served_rps=math.fsum(replica.rate_rps for *_, replica in deployment.places()),
            lower_bound_gpus=deployment.predicted.lower_bound_gpus,
        )
    if spent.is_over:
        return _with_ends(deployment, None, upper)
    left_s = spent.left_s or default_limit_s(len(problem.demands))
    seconds = left_s if upper is not None else left_s / 2.0  # two ends share the time
    lower = plan_at_end(problem, policy, "lower", seconds)
    upper = upper or plan_at_end(problem, policy, "upper", seconds)
    planned = deployment.predicted.gpus
    if lower is not None and lower.gpus is None and lower.lower_bound_gpus == planned and not deployment.unplaced:
        # Its search was not over, but the plan itself keeps every SLO where batches take no longer.
        lower = lower.model_copy(update={"gpus": planned})
    return _with_ends(deployment, lower, upper)


def _with_ends(deployment: DeploymentMap, lower: PlanAtEnds | None, upper: PlanAtEnds | None) -> DeploymentMap:
    predicted = deployment.predicted.model_copy(update={"at_lower_ends": lower, "at_upper_ends": upper})
    return deployment.model_copy(update={"predicted": predicted})


def _is_observed(predicted: ReplicaPrediction) -> bool:
    return Figure(predicted.latency_ms, predicted.source).is_observed


def _is_planned_at_upper_ends(problem: Problem, deployment: DeploymentMap) -> bool:
    """Return whether the plan uses the upper end of every interval: no set confidence, and no measured time."""
    return problem.options.confidence is None and not any(
        replica.predicted.latency_ms_interval is not None and _is_observed(replica.predicted)
        for *_, replica in deployment.places()
    )


def plan_at_end(problem: Problem, policy: Policy, end: Literal["lower", "upper"], seconds: float) -> PlanAtEnds | None:
    """Return the policy's plan at an end of the intervals within ``seconds``; None without a plan."""
    options = replace(problem.options, confidence=MEANS, time_limit_s=seconds)
    at_end = replace(problem, estimator=IntervalEndEstimator(problem.estimator, end), options=options, previous=None)
    try:
        placement = policy.place(at_end)
    except InfeasibleError:
        return None
    if placement.stopped and placement.lower_bound_gpus is None:
        return None
    return PlanAtEnds(
        gpus=None if placement.stopped else len(placement.gpus),
        served_rps=math.fsum(placement.rates_rps().values()),
        lower_bound_gpus=placement.lower_bound_gpus,
    )


def describe_routers(deployment: DeploymentMap) -> str | None:
    """Return a note on the number of routers that the planned requests need; None where a single router suffices."""
    rate_rps = math.fsum(replica.rate_rps for *_, replica in deployment.places())
    host = deployment.planned_with.host
    # The CPU time of router, machine process and client for a request: the router's alone is less.
    if measured_ms := host.host_ms_busy or host.host_ms:
        capacity_rps, basis = 1000.0 / measured_ms, "as profile measured"
    else:
        content = tomllib.loads((datasets() / "router.toml").read_text(encoding="utf-8"))
        capacity_rps, basis = float(content["requests_per_s"]), "assumed from datasets/router.toml"
    count = math.ceil(rate_rps / capacity_rps - 1e-9)
    if count <= 1:
        return None
    return (
        f"{rate_rps:,.0f} requests/s need {count:,} routers: one carries about {capacity_rps:,.0f} ({basis}); serve "
        f"parts of the demands from {count:,} maps, each with a router of its own"
    )
