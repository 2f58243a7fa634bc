"""Rescheduling: the map follows the load, and changes cost time (USHER, OSDI'24, section 5.4).

At the end of each period a scheduler, passed as a function, receives the period's rates and may return another map.
Arrivals do not depend on the map, so all maps are computed before the simulation. A single simulation of all replicas,
each alive in its lifetime, is then exact.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuprof.domain.arrival_process import NS_PER_S, ArrivalProcess
from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.simulator.cluster import SimulationOptions, Switch
from gpuprof.simulator.load import arrival_streams
from gpuprof.simulator.outcome import EpochOutcome
from gpuprof.simulator.trace import PIECE

#: Rates by model → map for these rates; None: keep the current map.
Scheduler = Callable[[Mapping[str, float]], DeploymentMap | None]


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """Times of a change in seconds: loading a model into a new process, and changing a GPU's MIG layout."""

    load_s: float = 5.0
    mig_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Epoch:
    """A map, the begin of its time in force, and the number of replicas started for it."""

    begin_s: float
    deployment: DeploymentMap
    started: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLifetime:
    """The time in which a replica holds its device, from loading to its end; infinite ``end_s``: no end."""

    node: str
    gpu: int
    begin_s: float
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Timetable:
    """All replicas of all maps as a single map, with their lifetimes; ``absent`` replicas are not alive at first."""

    deployment: DeploymentMap
    epochs: tuple[Epoch, ...]
    switches: tuple[Switch, ...]
    absent: tuple[int, ...]
    lifetimes: tuple[ReplicaLifetime, ...] = ()

    def epoch_outcomes(self, duration_s: float) -> tuple[EpochOutcome, ...]:
        """Return each map's time in force, devices, cost and number of started replicas."""
        ends = [*(epoch.begin_s for epoch in self.epochs[1:]), duration_s]
        return tuple(
            EpochOutcome(
                begin_s=epoch.begin_s,
                end_s=end,
                gpus=epoch.deployment.predicted.gpus,
                cost_per_hour=epoch.deployment.predicted.cost_per_hour,
                started=epoch.started,
            )
            for epoch, end in zip(self.epochs, ends, strict=True)
        )

    def gpu_hours(self, duration_s: float) -> float:
        """Return the device hours of the maps."""
        return (
            sum(
                epoch_outcome.gpus * (epoch_outcome.end_s - epoch_outcome.begin_s)
                for epoch_outcome in self.epoch_outcomes(duration_s)
            )
            / 3600.0
        )

    def held_gpu_hours(self, duration_s: float) -> float:
        """Return the hours for which devices are held by replicas, of the old and the new map during changes."""
        spans_by_gpu: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for lifetime in self.lifetimes:
            spans_by_gpu[lifetime.node, lifetime.gpu].append((lifetime.begin_s, min(lifetime.end_s, duration_s)))
        return sum(_union_length(spans) for spans in spans_by_gpu.values()) / 3600.0


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
    return table.close()


@dataclass(frozen=True, slots=True)
class _ReplicaIdentity:
    """A replica's position and all parameters of its behaviour in the simulator."""

    node: str
    gpu: int
    device: str
    mig: str
    model: str
    shape: tuple[float, ...]
    ordinal: int = 0


class _TimetableBuilder:
    """Builder of a timetable: all replicas so far, and the positions of live replicas."""

    def __init__(self, deployment: DeploymentMap) -> None:
        self.deployment = deployment
        self.epochs = [Epoch(0.0, deployment)]
        self.switches: list[Switch] = []
        self.places: list[tuple[Node, Gpu, Partition, Replica]] = []
        self.lifetimes: list[ReplicaLifetime] = []
        self.alive = {key: self._add(key, place, 0.0) for key, place in _index_by_key(deployment).items()}
        self.first = len(self.places)

    def _add(self, key: _ReplicaIdentity, place: tuple[Node, Gpu, Partition, Replica], at_s: float) -> int:
        self.places.append(place)
        self.lifetimes.append(ReplicaLifetime(key.node, key.gpu, at_s))
        return len(self.places) - 1

    def _end(self, key: _ReplicaIdentity, at_s: float) -> int:
        position = self.alive.pop(key)
        self.lifetimes[position] = replace(self.lifetimes[position], end_s=at_s)
        return position

    def change(self, at_s: float, target: DeploymentMap, costs: MoveCosts) -> None:
        """Start the replicas added by a new map, and stop the replicas absent from it."""
        after = _index_by_key(target)
        new = [key for key in after if key not in self.alive]
        removed = [key for key in self.alive if key not in after]
        if not new and not removed:
            return
        before_layout, after_layout = _layouts(self.epochs[-1].deployment), _layouts(target)
        relaid_gpus = {gpu for gpu in after_layout if gpu in before_layout and after_layout[gpu] != before_layout[gpu]}
        new_gpus = {(key.node, key.gpu) for key in new if key.mig} - set(before_layout)
        for key in removed:
            end_s = at_s if (key.node, key.gpu) in relaid_gpus else at_s + costs.load_s
            self.switches.append(Switch(end_s, end=(self._end(key, end_s),)))
        for key in new:
            ready_s = at_s + costs.load_s + (costs.mig_s if (key.node, key.gpu) in relaid_gpus | new_gpus else 0.0)
            self.alive[key] = self._add(key, after[key], at_s)
            self.switches.append(Switch(ready_s, begin=(self.alive[key],)))
        self.epochs.append(Epoch(at_s, target, len(new)))

    def close(self) -> Timetable:
        """Return the timetable of all changes."""
        # A node for each replica keeps their order, to which the positions in the switches refer.
        nodes = tuple(
            Node(
                name=node.name,
                gpus=(gpu.model_copy(update={"partitions": (part.model_copy(update={"replicas": (r,)}),)}),),
            )
            for node, gpu, part, r in self.places
        )
        union = self.deployment.model_copy(update={"nodes": nodes})
        switches = tuple(sorted(self.switches, key=lambda switch: switch.at_s))
        absent = tuple(range(self.first, len(self.places)))
        return Timetable(union, tuple(self.epochs), switches, absent, tuple(self.lifetimes))


def _union_length(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _index_by_key(deployment: DeploymentMap) -> dict[_ReplicaIdentity, tuple[Node, Gpu, Partition, Replica]]:
    ordinals: Counter[_ReplicaIdentity] = Counter()
    keyed = {}
    for node, gpu, partition, replica in deployment.places():
        mig = "" if partition.mig is None else f"{partition.mig.profile}@{partition.mig.start}"
        times = replica.batch_latency_ms or (replica.predicted.latency_ms,)
        shape = (replica.batch, replica.processes, replica.sm_share_pct, replica.turns, replica.max_wait_ms, *times)
        key = _ReplicaIdentity(node.name, gpu.index, gpu.device, mig, replica.model, shape)
        ordinals[key] += 1
        keyed[replace(key, ordinal=ordinals[key])] = (node, gpu, partition, replica)
    return keyed


def _layouts(deployment: DeploymentMap) -> dict[tuple[str, int], tuple[object, ...]]:
    return {
        (node.name, gpu.index): tuple(sorted(str(part.mig) for part in gpu.partitions))
        for node in deployment.nodes
        for gpu in node.gpus
    }
