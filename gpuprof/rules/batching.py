"""The batch formation rule: pure functions called by the router and the simulator, assumed by the queueing model."""

from __future__ import annotations

from collections.abc import Sequence


def batch_size_now(waiting: int, batch: int, oldest_wait_ms: float, max_wait_ms: float) -> int:
    """Return the number of oldest requests that an idle process takes now; 0: the process waits for more.

    ``waiting``: requests in the queue; ``batch``: largest batch; ``oldest_wait_ms`` and ``max_wait_ms``: current and
    longest allowed wait of the oldest request.
    """
    if waiting >= batch:
        return batch
    return waiting if waiting and oldest_wait_ms >= max_wait_ms else 0


def wait_limit_ms(max_wait_ms: float, deadline_ms: float, latency_ms: Sequence[float]) -> float:
    """Return the longest wait for a full batch at which the oldest request still meets its deadline.

    ``max_wait_ms``: longest wait at the replica; ``deadline_ms``: the request's deadline, from its arrival on;
    ``latency_ms``: expected time of a batch of 1, 2, …; the longest is used, because requests may join until the start.
    """
    if max_wait_ms <= 0.0:  # the common case; called three times per request
        return 0.0
    # Negative slack: even an immediate batch is late, so the request does not wait.
    slack = deadline_ms - max(latency_ms, default=0.0)
    return max(0.0, min(max_wait_ms, slack))
