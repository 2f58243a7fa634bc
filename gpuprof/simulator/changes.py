"""Changes of the simulated cluster: replicas fail, recover, start and stop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpuprof.domain.arrival_process import NS_PER_S
from gpuprof.simulator import failover
from gpuprof.simulator.choice import set_alive
from gpuprof.simulator.cluster import PlacedInstance, SimulationOptions
from gpuprof.simulator.heap import COMPLETION, Calendar, ident_of, priority_of, push
from gpuprof.simulator.state import ClusterArrays, State, Tally


@dataclass(frozen=True, slots=True)
class Change:
    """Replicas that begin or cease to take requests at ``time``; failing replicas do not finish their requests."""

    time: int
    alive: int
    replicas: tuple[int, ...]
    fails: bool = False


def changes_of(options: SimulationOptions, places: tuple[PlacedInstance, ...]) -> list[Change]:
    """Return the changes in the options by time; failures come before recoveries and starts of the same instant."""
    changes = []
    for failure in options.failures:
        hit = tuple(
            position
            for position, place in enumerate(places)
            if place.node.name == failure.node and failure.gpu in (None, place.gpu.index)
        )
        changes.append(Change(round(failure.at_s * NS_PER_S), 0, hit, fails=True))
        if failure.lasts_s is not None:
            changes.append(Change(round((failure.at_s + failure.lasts_s) * NS_PER_S), 1, hit))
    for switch in options.switches:
        time = round(switch.at_s * NS_PER_S)
        changes += [Change(time, 1, switch.begin), Change(time, 0, switch.end)]
    return sorted(changes, key=lambda change: (change.time, not change.fails))


def apply_change(change: Change, cluster: ClusterArrays, state: State, tally: Tally) -> list[int]:
    """Apply the change, and return the replicas that have taken over requests and must be dispatched.

    All failing replicas are down before any of their requests is rerouted.
    """
    for replica in change.replicas:
        set_alive(cluster, state, replica, change.alive)
        if change.alive:
            state.idle_since[replica] = max(change.time, int(state.idle_since[replica]))
    displaced = np.empty(len(state.next), np.int64)
    if change.fails:
        _forget_completions(state.calendar, cluster, frozenset(change.replicas))
        for replica in change.replicas:
            count = failover.take_all_requests(cluster, state, tally, replica, displaced)
            model = int(cluster.replica_model[replica])
            failover.reroute_requests(cluster, state, model, displaced[:count], change.time)
    elif change.alive:
        for model in sorted({int(cluster.replica_model[replica]) for replica in change.replicas}):
            count = failover.take_orphans(state, model, displaced)
            failover.reroute_requests(cluster, state, model, displaced[:count], change.time)
    took = [int(replica) for replica in np.flatnonzero(state.behind >= 0)]
    state.behind[took] = -1
    return took


def fail_all_orphans(state: State, tally: Tally) -> None:
    """Count requests still waiting for a live replica at the end as failed."""
    displaced = np.empty(len(state.next), np.int64)
    for model in range(len(state.orphans)):
        failover.fail_orphans(state, tally, model, displaced)


def _forget_completions(calendar: Calendar, cluster: ClusterArrays, replicas: frozenset[int]) -> None:
    size = int(calendar.size[0])
    events = list(zip(calendar.times[:size].tolist(), calendar.codes[:size].tolist(), strict=True))
    calendar.size[0] = 0
    for time, code in events:
        ends = priority_of(code) == COMPLETION and int(cluster.process_replica[ident_of(code)]) in replicas
        if not ends:
            push(calendar, time, code)
