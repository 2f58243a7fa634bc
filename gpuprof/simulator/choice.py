"""The choice of a replica for a request: the rules of `gpuprof.rules.routing`, compiled."""

from __future__ import annotations

from gpuprof.rules.routing import argmin_in_turn, expect_rows, finish_ms, makes_oldest_late, next_live_replica
from gpuprof.simulator.state import MS, ClusterArrays, State


def choose_replica(cluster: ClusterArrays, state: State, model: int, now: int) -> tuple[int, float]:
    """Return the replica for the next request of a model and the ms until its answer; -1 if no replica is alive."""
    first, last = cluster.choice_start[model], cluster.choice_start[model + 1]
    live_processes = state.living[model]
    if live_processes == 0:
        return -1, 0.0
    if last - first == 1:
        only = cluster.choice[first]
        return only, finish_of(cluster, state, only, now) if cluster.refuse_hopeless else 0.0
    if cluster.round_robin:
        position = next_live_replica(state.takes[first:last], state.turn[model])
        state.turn[model] = position
        replica = cluster.choice[first + position]
        return replica, finish_of(cluster, state, replica, now)
    # Like `FastestFirst`, the turn moves only if there is a choice.
    if live_processes > 1:
        state.turn[model] += 1
    return find_fastest(cluster, state, model, now)


def find_fastest(cluster: ClusterArrays, state: State, model: int, now: int) -> tuple[int, float]:
    """Return the fastest replica of a model and the ms until its answer, by the rule."""
    first, last = cluster.choice_start[model], cluster.choice_start[model + 1]
    for position in range(first, last):
        state.finish_ms[position - first] = finish_of(cluster, state, cluster.choice[position], now)
    index = argmin_in_turn(state.finish_ms[: last - first], state.turn[model])
    return cluster.choice[first + index], state.finish_ms[index]


def finish_of(cluster: ClusterArrays, state: State, replica: int, now: int) -> float:
    """Return the ms until the answer to a request that joins this replica now."""
    first = cluster.first_process[replica]
    count = (cluster.first_process[replica + 1] - first) * state.alive[replica]  # a dead replica never answers
    for i in range(count):
        state.busy_ms[i] = max(0, state.expected_at[first + i] - now) * MS
    waiting = state.waiting[replica]
    waited_ms = (now - state.joined[state.queue_head[replica]]) * MS if waiting > 0 else 0.0
    latency = cluster.latency_ms[replica][: cluster.batch[replica]]
    rows = expected_batch_of(cluster, state, replica)
    return finish_ms(waiting, waited_ms, state.busy_ms[:count], rows, latency, state.wait_ms[replica])


def expected_batch_of(cluster: ClusterArrays, state: State, replica: int) -> int:
    """Return the expected batch size for a request joining this replica now."""
    joining = 0 if state.free_processes[replica] > 0 else state.joining[replica]
    return expect_rows(state.waiting[replica], joining, cluster.batch[replica])


def makes_oldest_late_at(cluster: ClusterArrays, state: State, replica: int, now: int, allowed_ms: float) -> bool:
    """Return whether another request in its batch would make the oldest request miss ``allowed_ms``."""
    waiting = state.waiting[replica]
    if waiting == 0:
        return False
    first = cluster.first_process[replica]
    count = (cluster.first_process[replica + 1] - first) * state.alive[replica]
    for i in range(count):
        state.busy_ms[i] = max(0, state.expected_at[first + i] - now) * MS
    # The SLO counts from sending; the batching delay in `finish_of` counts from joining the queue.
    waited_ms = (now - state.arrived[state.queue_head[replica]]) * MS
    latency = cluster.latency_ms[replica][: cluster.batch[replica]]
    wait_ms = state.wait_ms[replica]
    return makes_oldest_late(waiting, waited_ms, state.busy_ms[:count], latency, wait_ms, allowed_ms)


def choose_harmless(
    cluster: ClusterArrays, state: State, model: int, now: int, allowed_ms: float, waited_ms: float
) -> tuple[int, float]:
    """Return the replica that answers first and its time in ms, among those that answer in time and delay no other.

    A replica delays another request if it makes the oldest request of the batch late. The replica is -1 if there is
    none.
    """
    best, best_finish = -1, allowed_ms - waited_ms
    for position in range(cluster.choice_start[model], cluster.choice_start[model + 1]):
        replica = cluster.choice[position]
        if state.alive[replica] == 0:
            continue
        finish = finish_of(cluster, state, replica, now)
        if finish > best_finish or (best >= 0 and finish == best_finish):
            continue
        if not makes_oldest_late_at(cluster, state, replica, now, allowed_ms):
            best, best_finish = replica, finish
    return best, best_finish


def set_alive(cluster: ClusterArrays, state: State, replica: int, alive: int) -> None:
    """Set whether a replica takes requests from now on."""
    model = cluster.replica_model[replica]
    state.living[model] += alive - state.alive[replica]
    state.alive[replica] = alive
    for position in range(cluster.choice_start[model], cluster.choice_start[model + 1]):
        if cluster.choice[position] == replica:
            state.takes[position] = alive
