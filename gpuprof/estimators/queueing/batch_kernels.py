"""The loops of `batch_simulation`, compiled by numba and kept on disk where there is a place for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Standard normal scores at which `QUANTILES` of a law are tabulated, and how many entries there are in one.
SCORE_REACH = 5.5
ENTRIES_PER_SCORE = 40
ENTRIES = int(2 * SCORE_REACH * ENTRIES_PER_SCORE) + 1


def _compiled(function: Callable[..., Any]) -> Any:
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # nowhere to keep it: compile anew in each process
        return numba.njit(nogil=True, error_model="numpy")(function)


def _value(law: Array, score: float) -> Any:
    place = (score + SCORE_REACH) * ENTRIES_PER_SCORE
    cell = min(max(int(place), 0), ENTRIES - 2)
    return law[cell] + (law[cell + 1] - law[cell]) * min(max(place - cell, 0.0), 1.0)


def _arrivals(gap: float, law: Array, scores: Array, arrived: Array) -> None:
    now = 0.0
    mask = len(scores) - 1
    for i in range(len(arrived)):
        now += _value_at(law, scores[i & mask])
        arrived[i] = now
    scale = gap * len(arrived) / now  # exactly the mean asked for: near capacity, waiting is very sensitive to it
    for i in range(len(arrived)):
        arrived[i] *= scale


def _strata(
    batch: int, mean: float, law: Array, scores: Array, arrived: Array, step: float, labels: Array, strata: Array
) -> None:
    backlog = last = 0.0
    for group in range(len(strata)):
        now = arrived[(group + 1) * batch - 1]
        if group:
            backlog = max(0.0, backlog + _value_at(law, scores[group - 1]) * mean - (now - last))
        last = now
        strata[group] = labels[min(int(backlog / step + 0.5), len(labels) - 1)]


def _queue(
    arrived: Array,
    means: Array,
    max_wait: float,
    free: Array,
    laws: tuple[Array, Array],
    scores: Array,
    others: Array,
    even: Array,
    spent: Array,
) -> tuple[int, int, float]:
    batch, requests = len(means), len(arrived)
    first, group_before, drawn, batches, busy = 0, -1, 0, 0, 0.0
    mask = len(even) - 1
    while first + batch <= requests:
        process = 0
        for j in range(1, len(free)):
            if free[j] < free[process]:
                process = j
        released = free[process]
        dispatch = max(released, min(arrived[first] + max_wait, arrived[first + batch - 1]))
        size = 1
        while size < batch and arrived[first + size] <= dispatch:
            size += 1
        group = first // batch
        if group == group_before:  # the group's own number is used: each is drawn once at most
            score = others[drawn % len(others)]
            drawn += 1
        else:
            score = scores[group]
        group_before = group
        law = laws[1] if dispatch > released else laws[0]
        service = means[size - 1] * _value_at(law, score)
        free[process] = dispatch + service
        for i in range(first, first + size):
            # The service is independent of the wait: for what is reported each request has one of its own, evenly
            # spread over the law, where its batch's would leave the tail to few.
            spent[i] = dispatch - arrived[i] + means[size - 1] * _value_at(law, even[i & mask])
        first += size
        batches += 1
        busy += service
    return first, batches, busy


def _histogram(
    spent: Array, batch: int, strata: Array, weights: Array, low: float, scale: float, counts: Array, sums: Array
) -> None:
    for group in range(len(strata)):
        stratum = strata[group]
        weight, total = weights[stratum], 0.0
        for i in range(group * batch, (group + 1) * batch):
            total += spent[i]
            counts[min(int((spent[i] - low) * scale), len(counts) - 1)] += weight
        sums[stratum] += total


def empty(size: int) -> Array:
    """Return an array that the loops fill."""
    return np.empty(size, dtype=np.float64)


_value_at: Any = _compiled(_value)
#: Fill ``arrived`` with the arrivals of gaps of mean ``gap``.
arrivals: Any = _compiled(_arrivals)
#: Fill ``strata`` with the stratum of the backlog that each group of requests finds (`batch_backlog`).
strata: Any = _compiled(_strata)
#: Serve the arrivals by the rule of `gpuprof.rules.batching`; fill ``spent``, return requests, batches and busy time.
queue: Any = _compiled(_queue)
#: Add the weights of the requests' groups to ``counts`` by time, and their times to ``sums`` by stratum.
histogram: Any = _compiled(_histogram)
