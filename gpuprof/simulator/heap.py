"""The calendar of the simulator: a binary heap of events in the order (time, priority, id).

Priority and id are one number, the *code*: of two events at the same time the smaller code comes first. There is no
third way for events to be ordered, and so a run has only one outcome.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Bits of the id in a code; the priority stands above them, so that it is compared first.
_ID_BITS = 40

#: Priorities. A process is free before a request of the same instant looks for one, a request that arrives as the
#: longest wait ends still joins that batch, and what changes the cluster (see `engine`) comes before all of them.
COMPLETION = 1
ARRIVAL = 2
JOIN = 3
TIMER = 4


class Calendar(NamedTuple):
    """Events to come: ``times`` and ``codes`` of shape (capacity,), of which ``size[0]`` are in use."""

    times: NDArray[np.int64]
    codes: NDArray[np.int64]
    size: NDArray[np.int64]


def code_of(priority: int, ident: int) -> int:
    """Return the code of an event."""
    return (priority << _ID_BITS) + ident


def priority_of(code: int) -> int:
    """Return the priority in a code."""
    return code >> _ID_BITS


def ident_of(code: int) -> int:
    """Return the id in a code."""
    return code & ((1 << _ID_BITS) - 1)


def push(calendar: Calendar, time: int, code: int) -> None:
    """Add an event."""
    times, codes = calendar.times, calendar.codes
    position = calendar.size[0]
    calendar.size[0] = position + 1
    while position > 0:
        parent = (position - 1) >> 1
        if times[parent] < time or (times[parent] == time and codes[parent] < code):
            break
        times[position], codes[position] = times[parent], codes[parent]
        position = parent
    times[position], codes[position] = time, code


def replace_first(calendar: Calendar, time: int, code: int) -> None:
    """Take the first event out and add another: one sift-down instead of two sifts."""
    times, codes = calendar.times, calendar.codes
    size = calendar.size[0]
    position = 0
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child] or (times[right] == times[child] and codes[right] < codes[child])
        ):
            child = right
        if time < times[child] or (time == times[child] and code < codes[child]):
            break
        times[position], codes[position] = times[child], codes[child]
        position = child
    times[position], codes[position] = time, code


def drop_first(calendar: Calendar) -> None:
    """Take the first event out."""
    last = calendar.size[0] - 1
    calendar.size[0] = last
    if last > 0:
        replace_first(calendar, calendar.times[last], calendar.codes[last])
