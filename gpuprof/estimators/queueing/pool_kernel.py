"""The replicas of one model behind one router, request by request, compiled by numba.

The server's own rules, `gpuprof.rules.routing` and `gpuprof.rules.batching`, decide the replica of a request and the
size of a batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuprof.machine.machine_code import compile_untimed
from gpuprof.rules.batching import batch_size_now
from gpuprof.rules.routing import decay_count, expect_rows, finish_ms, forecast_joining

Array = NDArray[Any]
#: A row of an array, which the rules take for a sequence of numbers.
Row = Any

#: Range of the standard normal scores at which the quantiles of a law are tabulated, and number of entries per score.
SCORE_REACH = 5.5
ENTRIES_PER_SCORE = 40
ENTRIES = int(2 * SCORE_REACH * ENTRIES_PER_SCORE) + 1

_NEVER = np.inf


class Replicas(NamedTuple):
    """Constants of the pool: K replicas of batches up to B, P processes in all, Q laws of service times."""

    means: Array  #: Shape (K, B). Mean time of a batch of 1, 2, … requests.
    #: ``batch``, ``max_wait``, ``kind``: Shape (K,). ``kind``: replicas of the same kind are reported together.
    batch: Array
    max_wait: Array
    kind: Array
    first: Array  #: Shape (K + 1,). First process of each replica.
    owner: Array  #: Shape (P,).
    #: ``running``, ``rested``: Shape (K,). Rows of ``laws``: for a batch directly after another, and for a batch on an
    #: idle process.
    running: Array
    rested: Array
    laws: Array  #: Shape (Q, ENTRIES). Quantiles of a service time over its mean, by standard normal score.


class PoolState(NamedTuple):
    """Mutable state; times are absolute, and infinite without a pending event."""

    #: ``waiting``, ``head``, ``tail``, ``free``: Shape (K,). Number of queued requests, the first and the last of them,
    #: and idle processes.
    waiting: Array
    head: Array
    tail: Array
    free: Array
    #: ``timer``, ``finish``, ``delay``: Shape (K,). End of the oldest request's batching delay; the expected answer of
    #: a request that joins now is at the later of ``finish`` and now + ``delay``.
    timer: Array
    finish: Array
    delay: Array
    #: ``done``, ``expected``, ``freed``: Shape (P,). Actual and expected end of a process's batch; start of its idle
    #: time.
    done: Array
    expected: Array
    freed: Array
    next: Array  #: Shape (N,). Successor of each request in its queue.
    used: Array  #: Shape (groups,). Whether the service time drawn for a group of requests was used.
    counts: Array  #: Shape (2,). Number of further service times drawn, and the router's rotation counter.
    #: ``busy``, ``batches``: Shape (K,). Total time and number of batches.
    busy: Array
    batches: Array
    spare: Array  #: Shape (P,). Working memory: compiled code allocates no arrays.
    #: ``recent``, ``counted``: Shape (K,). Arrivals as `gpuprof.rules.routing.decay_count` leaves them, and the time of
    #: the last.
    recent: Array
    counted: Array
    joining: Array  #: Shape (K,). Expected number of requests in the next batch.


class Draws(NamedTuple):
    """Random numbers."""

    groups: Array  #: Standard normal scores for each group of requests; from the end on for further batches of a group.
    even: Array  #: Evenly spread scores for the reported times.
    group: int  #: Number of requests per group.


def new_state(replicas: Replicas, requests: int, group: int) -> PoolState:
    """Return idle replicas with space for ``requests`` requests."""
    count, processes = len(replicas.batch), len(replicas.owner)
    return PoolState(
        waiting=np.zeros(count, np.int64),
        head=np.zeros(count, np.int64),
        tail=np.zeros(count, np.int64),
        free=np.diff(replicas.first),
        timer=np.full(count, _NEVER),
        finish=np.zeros(count),
        delay=replicas.means[:, 0].copy(),
        done=np.full(processes, _NEVER),
        expected=np.zeros(processes),
        freed=np.zeros(processes),
        next=np.zeros(requests, np.int64),
        used=np.zeros(requests // group + 1, np.bool_),
        counts=np.zeros(2, np.int64),
        busy=np.zeros(count),
        batches=np.zeros(count, np.int64),
        spare=np.zeros(processes),
        recent=np.zeros(count),
        counted=np.zeros(count),
        joining=np.zeros(count, np.int64),
    )


def value_at(law: Array, score: float) -> Any:
    """Return the quantile of a law at a standard normal score."""
    place = (score + SCORE_REACH) * ENTRIES_PER_SCORE
    cell = min(max(int(place), 0), ENTRIES - 2)
    return law[cell] + (law[cell + 1] - law[cell]) * min(max(place - cell, 0.0), 1.0)


def _rank(replicas: Replicas, state: PoolState, arrived: Array, replica: int, now: float) -> None:
    """Record the expected answer of a request that joins a replica, by the router's rule."""
    if len(state.finish) == 1:
        return  # a single replica leaves no choice
    begin, end = replicas.first[replica], replicas.first[replica + 1]
    busy: Row = state.spare[: end - begin]
    latency: Row = replicas.means[replica, : replicas.batch[replica]]
    limit, waiting, waited = replicas.max_wait[replica], state.waiting[replica], 0.0
    for i in range(end - begin):
        busy[i] = max(0.0, state.expected[begin + i] - now)
    if waiting > 0:
        waited = now - arrived[state.head[replica]]
    rows = expect_rows(waiting, 0 if state.free[replica] > 0 else state.joining[replica], len(latency))
    state.finish[replica] = now + finish_ms(waiting, waited, busy, rows, latency, limit)
    for i in range(end - begin):
        busy[i] = 0.0
    # Limit of the expected time, relative to now, once batches are overdue and the oldest request has waited.
    state.delay[replica] = finish_ms(waiting, limit, busy, rows, latency, limit)


def _choose(state: PoolState, now: float) -> int:
    """Return the replica with the earliest expected answer; ties in rotation."""
    count = len(state.finish)
    if count == 1:
        return 0
    state.counts[1] += 1
    best, equal = _NEVER, 0
    for j in range(count):
        value = max(state.finish[j], now + state.delay[j])
        if value < best:
            best, equal = value, 0
        if value == best:
            equal += 1
    remaining = state.counts[1] % equal
    for j in range(count):
        if max(state.finish[j], now + state.delay[j]) == best:
            if remaining == 0:
                return j
            remaining -= 1
    return 0


def _start(
    replicas: Replicas,
    state: PoolState,
    draws: Draws,
    arrived: Array,
    spent: Array,
    replica: int,
    size: int,
    now: float,
) -> None:
    """Give the oldest ``size`` requests of a replica to its first idle process."""
    process = replicas.first[replica]
    while state.done[process] < _NEVER:
        process += 1
    request = state.head[replica]
    group = request // draws.group
    if state.used[group]:  # each group's number is drawn once at most
        state.counts[0] += 1
        score = draws.groups[-state.counts[0] & (len(draws.groups) - 1)]
    else:
        score = draws.groups[group & (len(draws.groups) - 1)]
        state.used[group] = True
    law = replicas.laws[replicas.rested[replica] if now > state.freed[process] else replicas.running[replica]]
    mean = replicas.means[replica, size - 1]
    service = mean * value_at(law, score)
    if len(state.finish) > 1:  # the forecast is for the router's choice
        batch, processes = replicas.batch[replica], replicas.first[replica + 1] - replicas.first[replica]
        latency: Row = replicas.means[replica, :batch]
        recent = decay_count(state.recent[replica], now - state.counted[replica], latency[batch - 1])
        state.joining[replica] = forecast_joining(recent, mean, latency, processes, 0.0, np.inf)
    for _ in range(size):
        # Service and wait are independent: for the reported times each request has a service time of its own, evenly
        # spread over the law, since batches alone would sample the tail too rarely.
        spent[request] = now - arrived[request] + mean * value_at(law, draws.even[request & (len(draws.even) - 1)])
        request = state.next[request]
    state.head[replica] = request
    state.waiting[replica] -= size
    state.free[replica] -= 1
    state.done[process], state.expected[process] = now + service, now + mean
    state.busy[replica] += service
    state.batches[replica] += 1


def _dispatch(
    replicas: Replicas, state: PoolState, draws: Draws, arrived: Array, spent: Array, replica: int, now: float
) -> None:
    """Start the batches that the rule allows, and set the timer for the next."""
    state.timer[replica] = _NEVER
    limit = replicas.max_wait[replica]
    while state.free[replica] > 0 and state.waiting[replica] > 0:
        oldest = arrived[state.head[replica]]
        waited = limit if now >= oldest + limit else now - oldest
        size = batch_size_now(state.waiting[replica], replicas.batch[replica], waited, limit)
        if size == 0:
            state.timer[replica] = oldest + limit
            break
        _start(replicas, state, draws, arrived, spent, replica, size, now)
    _rank(replicas, state, arrived, replica, now)


def _soonest(state: PoolState) -> tuple[int, float]:
    """Return the process that ends first, or -1 - j for the replica j whose timer ends first, with the time."""
    event, when = 0, _NEVER
    for p in range(len(state.done)):
        if state.done[p] < when:
            event, when = p, state.done[p]
    for j in range(len(state.timer)):
        if state.timer[j] < when:
            event, when = -1 - j, state.timer[j]
    return event, when


def _serve(replicas: Replicas, state: PoolState, draws: Draws, arrived: Array, spent: Array, kinds: Array) -> None:
    """Serve the arrivals; fill ``spent`` with the requests' times and ``kinds`` with their replicas' kinds."""
    event, when = 0, _NEVER
    for i in range(len(arrived) + 1):
        # The additional iteration after the last arrival serves the remaining queue.
        until = arrived[i] if i < len(arrived) else 1e300
        while when <= until:
            replica = -1 - event
            if event >= 0:
                replica = replicas.owner[event]
                state.done[event] = _NEVER
                state.freed[event] = state.expected[event] = when
                state.free[replica] += 1
            _dispatch(replicas, state, draws, arrived, spent, replica, when)
            event, when = _soonest(state)
        if i == len(arrived):
            break
        chosen = _choose(state, until)
        kinds[i] = replicas.kind[chosen]
        if state.waiting[chosen] == 0:
            state.head[chosen] = i
        else:
            state.next[state.tail[chosen]] = i
        state.tail[chosen] = i
        state.waiting[chosen] += 1
        if len(state.finish) > 1:
            full = replicas.means[chosen, replicas.batch[chosen] - 1]
            state.recent[chosen] = 1.0 + decay_count(state.recent[chosen], until - state.counted[chosen], full)
            state.counted[chosen] = until
        if state.free[chosen] > 0:
            _dispatch(replicas, state, draws, arrived, spent, chosen, until)
            event, when = _soonest(state)
        else:
            _rank(replicas, state, arrived, chosen, until)


def serve(replicas: Replicas, state: PoolState, draws: Draws, arrived: Array, spent: Array, kinds: Array) -> None:
    """Serve the arrivals by machine code, as `_serve` does; the first call on a machine compiles it for seconds."""
    _compile_serve()(replicas, state, draws, arrived, spent, kinds)


@cache
def _compile_serve() -> Any:
    return compile_untimed(_run)


def _run(replicas: Replicas, state: PoolState, draws: Draws, arrived: Array, spent: Array, kinds: Array) -> None:
    _serve(replicas, state, draws, arrived, spent, kinds)
