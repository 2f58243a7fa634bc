"""Times batches as a server at rest meets them: after a pause, with inputs that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

_POOL_BYTES = 64 * 2**20  # beyond the caches of one core, with room to spare
_MAX_COPIES = 64
_MAX_PAUSE_S = 0.25  # by then the caches are as cold as they get
#: At least three batches, eight if that takes no longer than six seconds, 150 in a second and a half.
_BATCHES_WITHIN_S = ((3, float("inf")), (8, 6.0), (150, 1.5))


def time_after_pauses(run: Callable[[Mapping[str, Any]], object], feeds: Mapping[str, Any], usual_ns: int) -> list[int]:
    """Return the durations in nanoseconds of batches that each follow a pause as long as a batch, or a quarter second.

    ``run``: runs the model on the inputs that it is given; ``usual_ns``: time of a batch that follows another at once.
    """
    pool = _copies(feeds)
    durations: list[int] = []
    begin = time.monotonic()
    while any(len(durations) < count and time.monotonic() - begin < limit_s for count, limit_s in _BATCHES_WITHIN_S):
        time.sleep(min(_MAX_PAUSE_S, usual_ns / 1e9))
        start = time.perf_counter_ns()
        # Other inputs each time: the last ones may still be in a cache after the pause.
        run(pool[len(durations) % len(pool)])
        durations.append(time.perf_counter_ns() - start)
    return durations


def _copies(feeds: Mapping[str, Any]) -> list[dict[str, Any]]:
    size = max(1, sum(array.nbytes for array in feeds.values()))
    count = max(2, min(_MAX_COPIES, _POOL_BYTES // size))
    return [{name: array.copy() for name, array in feeds.items()} for _ in range(count)]
