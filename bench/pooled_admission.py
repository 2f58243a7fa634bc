"""The most that several replicas of one model can answer in time when nobody knows what comes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

_TICKS = 15
_LEAST_CHANCE, _NEVER = 1e-7, -1e18
#: Between these parts of the capacity the most is found.
_PRECISION, _MOST_SWEEPS = 1e-3, 5000

Ticks = NDArray[np.int64]
Values = NDArray[np.float64]


def most_pooled(times_ms: Sequence[float], rate_rps: float, slo_ms: float, replicas: int, ticks: int = _TICKS) -> float:
    """Return the requests/s in time of the best rule that knows the rate of the arrivals, but not when they come.

    The rule decides on each request as it comes, and at any time sends those that wait together as a batch, which the
    replica that is free first runs after what it has been given. What is sent cannot grow any more; waiting with that
    costs nothing, so that no rule is left out. By dynamic programming over when each replica is free, how many wait
    and how long the first of them has: exact but for time being cut into ticks, at whose end arrivals are counted.

    Parameters
    ----------
    times_ms : sequence of float
        Time of a batch of 1, 2, … requests.
    rate_rps, slo_ms : float
    replicas : int
    ticks : int
        In a full batch.
    """
    tick_ms = times_ms[-1] / ticks
    times = np.array([0, *(max(1, round(time / tick_ms)) for time in times_ms)], np.int64)
    slo, mean = math.floor(slo_ms / tick_ms + 1e-9), rate_rps * tick_ms / 1000.0
    chances = [math.exp(-mean)]
    while 1.0 - sum(chances) > _LEAST_CHANCE:
        chances.append(chances[-1] * mean / len(chances))
    free = list(itertools.combinations_with_replacement(range(slo + 1), replicas))
    place = {one: number for number, one in enumerate(free)}
    later = np.array([place[tuple(max(0, left - 1) for left in one)] for one in free], np.int64)
    sent = np.full((len(free), len(times)), -1, np.int64)
    for number, (first, *others) in enumerate(free):
        for rows in range(1, len(times)):
            if first + times[rows] <= slo:
                sent[number, rows] = place[tuple(sorted((*others, first + int(times[rows]))))]
    first_free = np.array([one[0] for one in free], np.int64)
    value = np.zeros((len(free), len(times) - 1, max(1, slo - int(times[1]) + 1)))
    reachable = replicas * (len(times) - 1) / ticks
    for _ in range(_MOST_SWEEPS):
        after = _look_ahead(value, np.array(chances) / sum(chances), times, slo, later, sent, first_free)
        grown = (after - value)[:, 0, 0]
        if grown.max() - grown.min() <= _PRECISION * reachable:
            break
        value = after - after[0, 0, 0]
    return 1000.0 * float(grown.max() + grown.min()) / 2.0 / tick_ms


@numba.njit(cache=False)
def _look_ahead(
    value: Values, chances: Values, times: Ticks, slo: int, later: Ticks, sent: Ticks, first_free: Ticks
) -> Values:
    """Return the most requests in time from each state on, of one tick more than ``value`` counts."""
    states, batch, ages = value.shape
    after = np.zeros_like(value)
    ahead, joined = value.copy(), np.empty_like(value)
    for count in range(len(chances)):
        for state in range(states):
            for rows in range(batch):
                for age in range(ages if rows > 0 else 1):
                    best = ahead[state, rows, age]
                    if count > 0:  # one more has come: refused, or let in
                        if rows + 1 < batch:
                            best = max(best, ahead[state, rows + 1, age if rows > 0 else 0])
                        elif age + first_free[state] + times[batch] <= slo:
                            best = max(best, batch + ahead[sent[state, batch], 0, 0])
                    joined[state, rows, age] = best
        for state in range(states):
            for rows in range(1, batch):
                for age in range(ages):
                    if age + first_free[state] + times[rows] <= slo:
                        best = rows + joined[sent[state, rows], 0, 0]
                        joined[state, rows, age] = max(joined[state, rows, age], best)
        for state in range(states):
            for rows in range(batch):
                for age in range(ages if rows > 0 else 1):
                    older = age + 1 if rows > 0 else 0
                    here = joined[later[state], rows, older] if older < ages else _NEVER
                    after[state, rows, age] += chances[count] * here
        ahead, joined = joined, ahead
    return after
