"""The batching rule: one pure function that the router and the simulator obey and the queueing model assumes."""

from __future__ import annotations


def batch_size_now(waiting: int, batch: int, oldest_wait_ms: float, max_wait_ms: float) -> int:
    """Return how many of the oldest requests a free process takes now; 0: it waits for more.

    Parameters
    ----------
    waiting : int
        Requests in the queue.
    batch : int
        Largest batch.
    oldest_wait_ms, max_wait_ms : float
        How long the oldest request has waited, and how long it may.
    """
    if waiting >= batch:
        return batch
    return waiting if waiting and oldest_wait_ms >= max_wait_ms else 0
