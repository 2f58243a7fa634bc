"""Times batches as in an idle server: after a pause, with uncached inputs.

The longer the pause, the colder the caches: on one core a batch of SqueezeNet (6.7 ms) took 4% longer after 6 ms and up
to 17% after 50 ms in one run, not reproduced by two runs on a noisy machine. So pauses vary like those between randomly
arriving requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

_POOL_BYTES = 64 * 2**20  # well beyond the caches of a core
_MAX_COPIES = 64
_MAX_PAUSE_S = 0.25  # by then the caches are as cold as they get
#: Mean pause, in batch times: the pause of a process busy a third of its time. At higher loads fewer batches find an
#: idle process.
_MEAN_PAUSE = 3.0
#: At least three batches; eight if within six seconds; 150 if within three.
_BATCHES_WITHIN_S = ((3, float("inf")), (8, 6.0), (150, 3.0))


def time_after_pauses(run: Callable[[Mapping[str, Any]], object], feeds: Mapping[str, Any], usual_ns: int) -> list[int]:
    """Return the durations in nanoseconds of batches that each follow a pause.

    Pauses follow an exponential distribution, capped at a quarter of a second. ``run``: runs the model on given inputs;
    ``usual_ns``: time of a batch without a pause before it.
    """
    pool = _copies(feeds)
    durations: list[int] = []
    begin = time.monotonic()
    while any(len(durations) < count and time.monotonic() - begin < limit_s for count, limit_s in _BATCHES_WITHIN_S):
        time.sleep(min(_MAX_PAUSE_S, _pause_in_batches(len(durations)) * usual_ns / 1e9))
        start = time.perf_counter_ns()
        # Other inputs each time: the previous inputs may still be cached after the pause.
        run(pool[len(durations) % len(pool)])
        durations.append(time.perf_counter_ns() - start)
    return durations


def _pause_in_batches(number: int) -> float:
    """Return a pause in times of a batch: the first ones, however many, are spread as all of them are.

    The quantiles of the exponential distribution, in the order of van der Corput's sequence.

    >>> [round(_pause_in_batches(number), 2) for number in range(4)]
    [2.08, 0.86, 4.16, 0.4]
    """
    digits = f"{number + 1:b}"
    part = int(digits[::-1], 2) / 2 ** len(digits)
    return -_MEAN_PAUSE * math.log1p(-part)


def _copies(feeds: Mapping[str, Any]) -> list[dict[str, Any]]:
    size = max(1, sum(array.nbytes for array in feeds.values()))
    count = max(2, min(_MAX_COPIES, _POOL_BYTES // size))
    return [{name: array.copy() for name, array in feeds.items()} for _ in range(count)]
