"""The batch formation rule: pure functions that the router and the simulator call and the queueing model assumes."""

from __future__ import annotations

from collections.abc import Sequence


def batch_size_now(waiting: int, batch: int, oldest_wait_ms: float, max_wait_ms: float) -> int:
    """Return how many of the oldest requests an idle process takes now; 0: it waits for more.

    ``waiting``: requests in the queue; ``batch``: largest batch; ``oldest_wait_ms`` and ``max_wait_ms``: how long the
    oldest request has waited, and how long it may.
    """
    if waiting >= batch:
        return batch
    return waiting if waiting and oldest_wait_ms >= max_wait_ms else 0


def wait_limit_ms(max_wait_ms: float, deadline_ms: float, latency_ms: Sequence[float]) -> float:
    """Return how long the oldest request may wait for its batch to fill and still meet its deadline.

    ``max_wait_ms``: of the replica; ``deadline_ms``: of the request, from its arrival on; ``latency_ms``: expected time
    of a batch of 1, 2, …; the longest counts, because others may join until the end.
    """
    # Negative where even a batch that starts at once is late: waiting could only make it later, so it does not wait.
    if max_wait_ms <= 0.0:  # as mostly, and this is asked three times for a request
        return 0.0
    slack = deadline_ms - max(latency_ms, default=0.0)
    return max(0.0, min(max_wait_ms, slack))
