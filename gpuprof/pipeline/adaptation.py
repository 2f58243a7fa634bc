"""Replans the map of a running server for its present load: ``serve`` with ``adapt``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap, Gpu, Node
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Figure, Workload
from gpuprof.domain.fleet import Fleet
from gpuprof.domain.share import Share
from gpuprof.errors import InfeasibleError, InputError
from gpuprof.pipeline.arguments import locate_files
from gpuprof.pipeline.problem import plan_map
from gpuprof.pipeline.recorded_problem import restore_policy, restore_problem
from gpuprof.pipeline.result import NoteCallback, say_nothing
from gpuprof.serving.change.adapt import Load


@dataclass(frozen=True, slots=True)
class MapReplanner:
    """Planner of maps for a measured load, with the policy and the settings of the present map."""

    base: Path  #: Directory of the first map, in which the files of its models are looked for.
    db: Path | None  #: Kernel database.
    #: Whether a fleet without a count may grow; otherwise the devices of the first map are the limit.
    more_devices: bool
    first: DeploymentMap  #: Its machines are the available ones: a shrunk map grows onto them again, by their names.
    estimator: str | None = None  #: Name of another estimator than the map was planned with.

    def __call__(self, deployment: DeploymentMap, load: Load) -> DeploymentMap | None:
        """Return a map for the load, or for the part of it that the devices can serve.

        None when this part does not exceed the rates of the present map. Raises `GpuprofError` when the database lacks
        a model or a device.
        """
        problem = restore_problem(locate_files(deployment, self.base), self.db, estimator=self.estimator)
        settings = deployment.planned_with
        if self.estimator is not None:
            settings = settings.model_copy(update={"estimator": self.estimator})
        fleet = problem.fleet if self.more_devices else _fix_counts(problem.fleet, self.first)
        estimator = CorrectedEstimator(problem.estimator, load.slowdowns, load.beside)
        problem = replace(
            problem,
            fleet=fleet,
            estimator=estimator,
            planned_with=settings,
            previous=deployment,
        )
        policy = restore_policy(deployment)
        fraction = 1.0
        for _ in ("the whole load", "the part that was served of it"):
            rates = {name: fraction * rate for name, rate in load.rates_rps.items()}
            # A part of the load within the present map's planned rates is not worth a change.
            if fraction < 1.0 and not load.slowdowns and not load.beside and not _exceeds_plan(deployment, rates, load):
                return None
            demands = tuple(replace(demand, rate_rps=rates[demand.model]) for demand in problem.demands)
            try:
                plan = plan_map(replace(problem, demands=demands), policy)
            except InfeasibleError:
                return None
            if not plan.unplaced:
                return _move_to_known_gpus(plan, deployment, self.first)
            fraction = min(1.0 - demand.rate_rps / rates[demand.model] for demand in plan.unplaced)
            if fraction <= 0.0:
                return None
        return None


def check_adaptable(
    deployment: DeploymentMap,
    db: Path | None,
    node: str | None,
    note: NoteCallback = say_nothing,
    estimator: str | None = None,
) -> None:
    """Check at the start, rather than when the load changes, that a map can be replanned.

    Raises `InputError` when this process serves a single node of several, or the database lacks a model or a device of
    the map.
    """
    if node is not None and len(deployment.nodes) > 1:
        raise InputError("--adapt and --node exclude each other: a plan is for all nodes")
    problem = restore_problem(deployment, db, note, estimator)
    for demand in problem.demands:
        for entry in problem.fleet.entries:
            problem.estimator.shares(demand.model, entry.device)


def _fix_counts(fleet: Fleet, deployment: DeploymentMap) -> Fleet:
    """Return the fleet with its own device counts, or the map's counts where the fleet gives none."""
    names = [gpu.device for node in deployment.nodes for gpu in node.gpus]
    entries = tuple(
        entry if entry.count is not None else replace(entry, count=max(1, names.count(entry.device.name)))
        for entry in fleet.entries
    )
    return replace(fleet, entries=entries)


def _move_to_known_gpus(plan: DeploymentMap, now: DeploymentMap, first: DeploymentMap) -> DeploymentMap:
    """Move replicas from GPUs that neither map has to free GPUs of the first map: no other GPUs exist."""
    kinds = {(name, gpu.index): gpu.device for name, gpu in (*_list_gpus(first), *_list_gpus(now))}
    stays = {(name, gpu.index) for name, gpu in _list_gpus(plan) if kinds.get((name, gpu.index)) == gpu.device}
    free = [place for place in kinds if place not in stays]
    nodes: dict[str, list[Gpu]] = {}
    for name, gpu in _list_gpus(plan):
        place = None if (name, gpu.index) in stays else next((slot for slot in free if kinds[slot] == gpu.device), None)
        if place is not None:
            free.remove(place)
            name, gpu = place[0], gpu.model_copy(update={"index": place[1]})
        nodes.setdefault(name, []).append(gpu)
    ordered = {name: tuple(sorted(gpus, key=lambda gpu: gpu.index)) for name, gpus in nodes.items()}
    return plan.model_copy(update={"nodes": tuple(Node(name=name, gpus=gpus) for name, gpus in ordered.items())})


def _list_gpus(deployment: DeploymentMap) -> Iterator[tuple[str, Gpu]]:
    return ((node.name, gpu) for node in deployment.nodes for gpu in node.gpus)


def _exceeds_plan(deployment: DeploymentMap, rates: Mapping[str, float], load: Load) -> bool:
    """Return whether a part of a load is still more than the map was planned for, where more is wanted."""
    return any(
        rates[name] > model.rate_rps and load.rates_rps[name] > model.rate_rps
        for name, model in deployment.models.items()
    )


@dataclass(frozen=True, slots=True)
class CorrectedEstimator:
    """An estimator that multiplies another estimator's latencies of some models by a factor."""

    estimator: Estimator
    factors: Mapping[str, float]  #: Measured over estimated time of a batch, by model.
    #: Measured over estimated time of a batch, by model and neighbour: a factor for each such neighbour.
    beside: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the underlying estimate, its latency multiplied by the factors of the model and of its neighbours.

        The interval is widened to hold the served latency: the error of the estimate is now measured.
        """
        estimate = self.estimator.estimate(model, device, batch, share, beside, processes)
        neighbours = [self.beside[model, w.model] for w in beside if (model, w.model) in self.beside]
        if model not in self.factors and not neighbours:
            return estimate
        factor = self.factors.get(model, 1.0) * math.prod(neighbours)
        served, figure = factor * estimate.latency_ms.value, estimate.latency_ms
        latency = Figure(
            served,
            f"{figure.source}, corrected by serving",
            None if figure.low is None else min(figure.low, served),
            None if figure.high is None else max(figure.high, served),
        )
        return replace(estimate, latency_ms=latency, overlapped_ms=factor * estimate.overlapped_ms)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes of the underlying estimator."""
        return self.estimator.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares of the underlying estimator."""
        return self.estimator.shares(model, device)
