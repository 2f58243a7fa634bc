"""Rescheduling: the map follows the load, and changes cost time (USHER, OSDI'24, section 5.4).

At the end of each period a scheduler, passed as a function, receives the period's rates and may return another map.
Arrivals do not depend on the map, so all maps are computed before the simulation. A single simulation of all replicas,
each alive in its lifetime, is then exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpuprof.domain.arrival_process import NS_PER_S, ArrivalProcess
from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.simulator.cluster import SimulationOptions, Switch
from gpuprof.simulator.outcome import EpochOutcome, SimulationOutcome
from gpuprof.simulator.trace import PIECE, arrival_streams

#: Rates by model → map for these rates; None: keep the current map.
Scheduler = Callable[[Mapping[str, float]], DeploymentMap | None]


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """Duration in seconds of loading a model into a new process, and of changing a GPU's MIG layout."""

    load_s: float = 5.0
    mig_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Timetable:
    """All replicas of all maps as a single map; ``absent`` replicas are not alive at first."""

    deployment: DeploymentMap
    epochs: tuple[EpochOutcome, ...]
    switches: tuple[Switch, ...]
    absent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Cost and benefit of a policy that follows the load (USHER, section 5.4)."""

    policy: str
    #: ``maps``, ``started``: Number of successive maps, and of replicas started for them.
    maps: int
    started: int
    mean_gpus: float  #: Devices of the maps, averaged over time.
    most_gpus: int
    gpu_hours: float  #: Device hours of the maps.
    cost: float | None  #: Cost of the maps in $; None if a device has no price.
    goodput_rps: float
    in_time_pct: float | None  #: Percentage of requests; None without requests.
    #: Mean time of an answered request before its batch starts, waiting for the batch to fill and for a process.
    wait_ms: float | None
    worst_p99_ms: float | None  #: p99 of the model with the largest ratio of p99 to SLO.


def summarize_autoscaling(policy: str, table: Timetable, outcome: SimulationOutcome) -> Autoscaling:
    """Return the figures of a simulation of ``table``."""
    epochs, models = table.epochs, outcome.models
    hours = [(epoch.end_s - epoch.begin_s) / 3600.0 for epoch in epochs]
    gpu_hours = sum(epoch.gpus * length for epoch, length in zip(epochs, hours, strict=True))
    costs = [None if e.cost_per_hour is None else e.cost_per_hour * h for e, h in zip(epochs, hours, strict=True)]
    requests, answered = (sum(getattr(model, name) for model in models) for name in ("requests", "answered"))
    waits_ms = (
        model.answered * ((model.stage_mean_ms["batching"] or 0.0) + (model.stage_mean_ms["queue"] or 0.0))
        for model in models
    )
    tails = [(model.p99_ms / model.slo_ms, model.p99_ms) for model in models if model.p99_ms is not None]
    return Autoscaling(
        policy=policy,
        maps=len(epochs),
        started=sum(epoch.started for epoch in epochs),
        mean_gpus=gpu_hours / sum(hours),
        most_gpus=max(epoch.gpus for epoch in epochs),
        gpu_hours=gpu_hours,
        cost=None if None in costs else sum(cost for cost in costs if cost is not None),
        goodput_rps=outcome.goodput_rps,
        in_time_pct=100.0 * sum(model.in_time for model in models) / requests if requests else None,
        wait_ms=sum(waits_ms) / answered if answered else None,
        worst_p99_ms=max(tails)[1] if tails else None,
    )


def observed_rates(
    deployment: DeploymentMap, arrivals: Mapping[str, ArrivalProcess], options: SimulationOptions, period_s: float
) -> list[dict[str, float]]:
    """Return the rates of each whole period, with the arrivals of the simulation with these options."""
    periods = int(options.duration_s / period_s)
    end = round(periods * period_s * NS_PER_S)
    counts = np.zeros((periods, len(deployment.models)), np.int64)
    for i, stream in enumerate(arrival_streams(deployment, arrivals, options.seed)):
        while stream is not None and len(times := stream.take(PIECE)):
            window = times[times < end]
            counts[:, i] += np.bincount((window / (period_s * NS_PER_S)).astype(np.int64), minlength=periods)[:periods]
            if len(window) < len(times):
                break
    return [dict(zip(deployment.models, (row / period_s).tolist(), strict=True)) for row in counts]


def make_timetable(
    deployment: DeploymentMap,
    rates: Sequence[Mapping[str, float]],
    period_s: float,
    scheduler: Scheduler,
    costs: MoveCosts,
    duration_s: float,
) -> Timetable:
    """Call the scheduler after each period except the last, and return the timetable of all replicas.

    Replicas in both maps continue. A new replica starts when its model is loaded, and until then the replaced replicas
    continue. If the MIG layout of a GPU changes, its old replicas end at once, and new replicas start later by the time
    of the change. An unused GPU is partitioned before its first replica loads.
    """
    table = _TimetableBuilder(deployment)
    for period, observed in enumerate(rates[:-1], start=1):
        target = scheduler(observed)
        if target is not None:
            table.change(period * period_s, target, costs)
    return table.close(duration_s)


#: Node, GPU and MIG instance of a replica, followed by all that determines its behaviour in the simulator.
_Identity = tuple[str, int, str, Hashable]
_Place = tuple[Node, Gpu, Partition, Replica]


class _TimetableBuilder:
    """Builder of a timetable: all replicas so far, and the positions of live replicas."""

    def __init__(self, deployment: DeploymentMap) -> None:
        self.deployment = deployment
        self.maps = [(0.0, deployment, 0)]
        self.switches: list[Switch] = []
        self.places: list[_Place] = []
        self.alive = {key: self._add(place) for key, place in _index_by_identity(deployment).items()}
        self.first = len(self.places)

    def _add(self, place: _Place) -> int:
        self.places.append(place)
        return len(self.places) - 1

    def change(self, at_s: float, target: DeploymentMap, costs: MoveCosts) -> None:
        """Start the replicas added by a new map, and stop the replicas absent from it."""
        after = _index_by_identity(target)
        new = [key for key in after if key not in self.alive]
        removed = [key for key in self.alive if key not in after]
        if not new and not removed:
            return
        before_layout, after_layout = _layouts(self.maps[-1][1]), _layouts(target)
        relaid_gpus = {gpu for gpu in after_layout if gpu in before_layout and after_layout[gpu] != before_layout[gpu]}
        new_gpus = {key[:2] for key in new if key[2]} - set(before_layout)
        for key in removed:
            end_s = at_s if key[:2] in relaid_gpus else at_s + costs.load_s
            self.switches.append(Switch(end_s, end=(self.alive.pop(key),)))
        for key in new:
            ready_s = at_s + costs.load_s + (costs.mig_s if key[:2] in relaid_gpus | new_gpus else 0.0)
            self.alive[key] = self._add(after[key])
            self.switches.append(Switch(ready_s, begin=(self.alive[key],)))
        self.maps.append((at_s, target, len(new)))

    def close(self, duration_s: float) -> Timetable:
        """Return the timetable of all changes."""
        # A node for each replica keeps their order, to which the positions in the switches refer.
        nodes = tuple(
            Node(
                name=node.name,
                gpus=(gpu.model_copy(update={"partitions": (part.model_copy(update={"replicas": (r,)}),)}),),
            )
            for node, gpu, part, r in self.places
        )
        ends_s = [*(begin_s for begin_s, *_ in self.maps[1:]), duration_s]
        return Timetable(
            self.deployment.model_copy(update={"nodes": nodes}),
            tuple(
                EpochOutcome(begin_s, end_s, plan.predicted.gpus, plan.predicted.cost_per_hour, started)
                for (begin_s, plan, started), end_s in zip(self.maps, ends_s, strict=True)
            ),
            tuple(sorted(self.switches, key=lambda switch: switch.at_s)),
            tuple(range(self.first, len(self.places))),
        )


def _index_by_identity(deployment: DeploymentMap) -> dict[_Identity, _Place]:
    numbers: Counter[_Identity] = Counter()
    places: dict[_Identity, _Place] = {}
    for node, gpu, partition, replica in deployment.places():
        mig = "" if partition.mig is None else f"{partition.mig.profile}@{partition.mig.start}"
        times = replica.batch_latency_ms or (replica.predicted.latency_ms,)
        size = (replica.batch, replica.processes, replica.sm_share_pct, replica.max_wait_ms, *times)
        behaviour = (gpu.device, replica.model, size, replica.turns, replica.time_slice_ms)
        identity = (node.name, gpu.index, mig, behaviour)
        numbers[identity] += 1
        places[node.name, gpu.index, mig, (behaviour, numbers[identity])] = (node, gpu, partition, replica)
    return places


def _layouts(deployment: DeploymentMap) -> dict[tuple[str, int], tuple[object, ...]]:
    return {
        (node.name, gpu.index): tuple(sorted(str(part.mig) for part in gpu.partitions))
        for node in deployment.nodes
        for gpu in node.gpus
    }
