"""The calendar of the simulator: a binary heap of events in the order (time, priority, id).

Priority and id form a number, the *code*: of two events at the same time the smaller code comes first. The order is
total, so every run has the same outcome.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Bits of the id in a code; the priority has the higher bits and is compared first.
_ID_BITS = 40

#: Priorities. At the same instant processes become free before requests need them, and requests join before the
#: batching delay ends. Changes of the cluster (see `engine`) come before all events.
COMPLETION, ARRIVAL, JOIN, TIMER = range(1, 5)


class Calendar(NamedTuple):
    """Future events: ``times`` and ``codes`` of shape (capacity,); the first ``size[0]`` are in use."""

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
    """Replace the first event by another: a single sift-down instead of two sifts."""
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
    """Remove the first event."""
    last = calendar.size[0] - 1
    calendar.size[0] = last
    if last > 0:
        replace_first(calendar, calendar.times[last], calendar.codes[last])
