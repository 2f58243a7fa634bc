"""Changes of the simulated cluster: replicas fail, recover, start and stop.

Requests of failed replicas are rerouted like in the server (`gpuprof.serving.router.served_model`). Running and queued
requests go to live replicas of the model, chosen by the routing rule, ahead of the requests already queued there and in
order of acceptance. Without a live replica they wait until a replica starts; new requests are turned away meanwhile. A
request lost too often runs in a batch of its own, and is finally given up (`gpuprof.rules.routing`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpuprof.domain.arrival_process import NS_PER_S
from gpuprof.rules.routing import is_retry_limit_reached, must_be_alone
from gpuprof.simulator.choice import choose_replica, set_alive
from gpuprof.simulator.cluster import PlacedInstance, SimulationOptions
from gpuprof.simulator.departure import FAILED, give_up
from gpuprof.simulator.heap import COMPLETION, Calendar, ident_of, priority_of, push
from gpuprof.simulator.state import ClusterArrays, Ints, State, Tally


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
            count = _take_all_requests(cluster, state, tally, replica, displaced)
            model = int(cluster.replica_model[replica])
            _reroute_requests(cluster, state, model, displaced[:count], change.time)
    elif change.alive:
        for model in sorted({int(cluster.replica_model[replica]) for replica in change.replicas}):
            count = _take_orphans(state, model, displaced)
            _reroute_requests(cluster, state, model, displaced[:count], change.time)
    replicas = [int(replica) for replica in np.flatnonzero(state.behind >= 0)]
    state.behind[replicas] = -1
    return replicas


def fail_all_orphans(cluster: ClusterArrays, state: State, tally: Tally) -> None:
    """Count requests still waiting for a live replica at the end as failed."""
    displaced = np.empty(len(state.next), np.int64)
    for model in range(len(state.orphans)):
        for place in displaced[: _take_orphans(state, model, displaced)]:
            give_up(cluster, state, tally, model, place, FAILED)


def _forget_completions(calendar: Calendar, cluster: ClusterArrays, replicas: frozenset[int]) -> None:
    size = int(calendar.size[0])
    events = list(zip(calendar.times[:size].tolist(), calendar.codes[:size].tolist(), strict=True))
    calendar.size[0] = 0
    for time, code in events:
        ends = priority_of(code) == COMPLETION and int(cluster.process_replica[ident_of(code)]) in replicas
        if not ends:
            push(calendar, time, code)


def _take_all_requests(cluster: ClusterArrays, state: State, tally: Tally, replica: int, displaced: Ints) -> int:
    """Move the requests of a failed replica into ``displaced`` and return their number.

    Running requests come first, process by process, then queued requests.
    """
    taken_count, model = 0, cluster.replica_model[replica]
    for process in range(cluster.first_process[replica], cluster.first_process[replica + 1]):
        place = state.flight[process]
        while place >= 0:
            following = state.next[place]
            state.losses[place] += 1
            if is_retry_limit_reached(state.losses[place]):
                give_up(cluster, state, tally, model, place, FAILED)
            else:
                displaced[taken_count] = place
                taken_count += 1
            place = following
        state.flight[process], state.done_at[process], state.expected_at[process] = -1, -1, 0
    place = state.queue_head[replica] if state.waiting[replica] > 0 else -1
    while place >= 0:
        displaced[taken_count] = place
        taken_count += 1
        place = state.next[place]
    state.queue_head[replica] = -1
    state.waiting[replica] = state.solo_requests[replica] = 0
    count = cluster.first_process[replica + 1] - cluster.first_process[replica]
    if state.free_processes[replica] < count:
        state.slowdown.running[state.slowdown.partition[replica]] -= state.slowdown.weight[replica]
    state.free_processes[replica] = count
    return taken_count


def _reroute_requests(cluster: ClusterArrays, state: State, model: int, displaced: Ints, now: int) -> None:
    """Queue requests of a model at its live replicas, or as orphans without a live replica; start no batch."""
    last = -1
    for place in displaced:
        replica, _ = choose_replica(cluster, state, model, now)
        if replica >= 0:
            _take_over(state, replica, place)
            continue
        state.next[place] = -1
        if last >= 0:
            state.next[last] = place
        else:
            _append_orphan(state, model, place)
        last = place


def _take_over(state: State, replica: int, place: int) -> None:
    """Put a request at the head of a replica's queue, behind requests taken over at the same instant."""
    before = state.behind[replica]
    following = state.queue_head[replica] if before < 0 else state.next[before]
    if state.waiting[replica] == 0:
        following = -1
    state.next[place] = following
    if before < 0:
        state.queue_head[replica] = place
    else:
        state.next[before] = place
    if following < 0:
        state.queue_tail[replica] = place
    state.behind[replica] = place
    state.waiting[replica] += 1
    if must_be_alone(state.losses[place]):
        state.solo_requests[replica] += 1


def _append_orphan(state: State, model: int, place: int) -> None:
    last = state.orphans[model]
    if last < 0:
        state.orphans[model] = place
        return
    while state.next[last] >= 0:
        last = state.next[last]
    state.next[last] = place


def _take_orphans(state: State, model: int, displaced: Ints) -> int:
    """Move the orphans of a model into ``displaced``, and return their number."""
    count, place = 0, state.orphans[model]
    while place >= 0:
        displaced[count] = place
        count += 1
        place = state.next[place]
    state.orphans[model] = -1
    return count
