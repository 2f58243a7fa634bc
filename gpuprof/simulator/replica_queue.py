"""Moves the oldest requests of a replica's queue to a process."""

from __future__ import annotations

from gpuprof.rules.routing import must_be_alone
from gpuprof.simulator.state import State


def take_batch(state: State, replica: int, process: int, size: int) -> int:
    """Move a batch from the queue to its process, and return its size: smaller if some requests must run alone."""
    place = state.queue_head[replica]
    state.flight[process] = place
    if state.solo_requests[replica] > 0:
        return _take_shareable(state, replica, size)
    for _ in range(size - 1):
        place = state.next[place]
    state.queue_head[replica] = state.next[place]
    state.next[place] = -1
    state.waiting[replica] -= size
    return size


def _take_shareable(state: State, replica: int, size: int) -> int:
    """Take the head of the queue and, unless it must run alone, other shareable requests; return their number."""
    last = state.queue_head[replica]
    place, kept, taken = state.next[last], -1, 1
    if must_be_alone(state.losses[last]):
        state.solo_requests[replica] -= 1
        size = 1
    while taken < size and place >= 0:
        following = state.next[place]
        if must_be_alone(state.losses[place]):
            kept = _link_in_queue(state, replica, kept, place)
        else:
            state.next[last] = place
            last = place
            taken += 1
        place = following
    state.next[last] = -1
    _link_in_queue(state, replica, kept, place)
    if place < 0:
        state.queue_tail[replica] = kept
    state.waiting[replica] -= taken
    return taken


def _link_in_queue(state: State, replica: int, before: int, place: int) -> int:
    """Link a request behind ``before`` in the queue, or as the head; return the request."""
    if before < 0:
        state.queue_head[replica] = place
    else:
        state.next[before] = place
    return place
