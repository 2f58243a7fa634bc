"""Reroutes the requests of failed replicas, like the server (`gpuprof.serving.router.served_model`).

Running and queued requests of a failed replica go to live replicas of its model, chosen by the routing rule, ahead of
the requests already queued there and in order of acceptance. Without a live replica they wait until a replica starts;
new requests are turned away meanwhile. A request lost too often runs in a batch of its own, and is finally given up
(`gpuprof.rules.routing`).
"""

from __future__ import annotations

from gpuprof.rules.routing import is_retry_limit_reached, must_be_alone
from gpuprof.simulator.choice import choose_replica
from gpuprof.simulator.departure import FAILED, give_up
from gpuprof.simulator.state import ClusterArrays, Ints, State, Tally


def take_all_requests(cluster: ClusterArrays, state: State, tally: Tally, replica: int, displaced: Ints) -> int:
    """Move the requests of a failed replica into ``displaced`` and return their number.

    Running requests come first, process by process, then queued requests.
    """
    moved, model = 0, cluster.replica_model[replica]
    for process in range(cluster.first_process[replica], cluster.first_process[replica + 1]):
        place = state.flight[process]
        while place >= 0:
            following = state.next[place]
            state.losses[place] += 1
            if is_retry_limit_reached(state.losses[place]):
                give_up(state, tally, model, place, FAILED)
            else:
                displaced[moved] = place
                moved += 1
            place = following
        state.flight[process], state.done_at[process], state.expected_at[process] = -1, -1, 0
    place = state.queue_head[replica] if state.waiting[replica] > 0 else -1
    while place >= 0:
        displaced[moved] = place
        moved += 1
        place = state.next[place]
    state.queue_head[replica] = -1
    state.waiting[replica] = state.solo_requests[replica] = 0
    count = cluster.first_process[replica + 1] - cluster.first_process[replica]
    if state.free_processes[replica] < count:
        state.slowdown.running[state.slowdown.partition[replica]] -= state.slowdown.weight[replica]
    state.free_processes[replica] = count
    return moved


def reroute_requests(cluster: ClusterArrays, state: State, model: int, displaced: Ints, now: int) -> None:
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


def take_orphans(state: State, model: int, displaced: Ints) -> int:
    """Move the orphans of a model into ``displaced``, and return their number."""
    count, place = 0, state.orphans[model]
    while place >= 0:
        displaced[count] = place
        count += 1
        place = state.next[place]
    state.orphans[model] = -1
    return count


def fail_orphans(state: State, tally: Tally, model: int, displaced: Ints) -> None:
    """Count the remaining orphans of a model as failed."""
    for i in range(take_orphans(state, model, displaced)):
        give_up(state, tally, model, displaced[i], FAILED)
