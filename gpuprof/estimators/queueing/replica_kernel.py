"""One replica without batching delay, compiled by numba: `pool_kernel` without the router.

Requests begin in the order of their arrival, so that the waiting requests are a contiguous part of the arrivals: there
is no ranking, linking or counting for a choice among replicas. The times equal those of `pool_kernel.serve` to the last
bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.estimators.queueing.pool_kernel import Draws, PoolState, Replicas, value_at
from gpuprof.machine.machine_code import compile_function

Array = NDArray[Any]

_NEVER = np.inf


def _start(
    replicas: Replicas, state: PoolState, draws: Draws, arrived: Array, spent: Array, head: int, size: int, now: float
) -> None:
    """Give the oldest ``size`` requests, from ``head`` on, to the first idle process."""
    process = 0
    while state.done[process] < _NEVER:
        process += 1
    law = replicas.laws[replicas.rested[0] if now > state.freed[process] else replicas.running[0]]
    mean = replicas.means[0, size - 1]
    group = head // draws.group
    if state.used[group]:  # each group's number is drawn once at most
        score = draws.others[state.counts[0] % len(draws.others)]
        state.counts[0] += 1
    else:
        score = draws.groups[group & (len(draws.groups) - 1)]
        state.used[group] = True
    service = mean * value_at(law, score)
    if law[0] == law[-1]:  # quantiles rise: all are equal
        for request in range(head, head + size):
            spent[request] = now - arrived[request] + service
    else:
        mask = len(draws.even) - 1
        for request in range(head, head + size):
            spent[request] = now - arrived[request] + mean * value_at(law, draws.even[request & mask])
    state.done[process] = now + service
    state.busy[0] += service
    state.batches[0] += 1


def _find_soonest(done: Array) -> int:
    """Return the process whose batch ends first, with the lowest number in case of a tie."""
    soonest = 0
    for process in range(1, len(done)):
        if done[process] < done[soonest]:
            soonest = process
    return soonest


def _serve_alone(replicas: Replicas, state: PoolState, draws: Draws, arrived: Array, spent: Array) -> None:
    """Serve the arrivals by a replica without ``max_wait``, and fill ``spent`` with the requests' times."""
    requests, batch, idle = len(arrived), replicas.batch[0], len(state.done)
    head = come = 0  # first waiting request, and first request yet to arrive
    while head < requests:
        if idle > 0 and head == come:
            soonest = _find_soonest(state.done)
            now, come = arrived[come], come + 1
            # Batches that end at the time of an arrival have ended.
            while state.done[soonest] <= now:
                state.freed[soonest], state.done[soonest] = state.done[soonest], _NEVER
                idle += 1
                soonest = _find_soonest(state.done)
        else:
            soonest = _find_soonest(state.done)
            now = state.done[soonest]
            while come < requests and arrived[come] < now:
                come += 1
            state.freed[soonest], state.done[soonest] = now, _NEVER
            idle += 1
        while idle > 0 and head < come:
            size = min(come - head, batch)
            _start(replicas, state, draws, arrived, spent, head, size, now)
            head += size
            idle -= 1


_start = compile_function(_start, _nrt=False, error_model="numpy")
_find_soonest = compile_function(_find_soonest, _nrt=False, error_model="numpy")
serve_alone = compile_function(_serve_alone, _nrt=False, nogil=True, error_model="numpy")
