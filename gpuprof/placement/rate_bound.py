"""A rate that no replica exceeds within an SLO, by its times alone."""

from __future__ import annotations

from gpuprof.domain.sojourn import BatchServer

#: Of probabilities: a bound must also hold for maps that keep a percentile but for rounding.
SLACK = 1e-5


def most_within_rps(server: BatchServer, limit_ms: float, percent: float) -> float:
    """Return a rate that no replica exceeds, whatever stands beside it, when ``percent`` of the requests are in time.

    A batch of n whose time S is at most the limit answers n requests in time; by the renewal-reward theorem a process
    answers at most n P(S <= limit) / E[S] of them. All replicas together answer ``percent`` of the requests in time,
    so that each stands for no more than its part over that; and none serves more than its full batches.
    """
    throughputs = [1000.0 * n * server.processes / ms for n, ms in enumerate(server.latency_ms, 1)]
    in_time = max(all_ * part for all_, part in zip(throughputs, parts_in_time(server, limit_ms), strict=True))
    return min(max(throughputs), in_time / (percent / 100.0 - SLACK))


def parts_in_time(server: BatchServer, limit_ms: float) -> list[float]:
    """Return what part of the batches of 1, 2, … takes no longer than the limit."""
    left_ms, cv = limit_ms - server.overhead_ms, server.latency_cv
    if cv < 1e-3:
        return [float(ms <= left_ms) for ms in server.latency_ms]
    from scipy.special import gammainc  # a third of a second to import, and most times do not vary

    return [float(gammainc(cv**-2, max(0.0, left_ms / ms) * cv**-2)) for ms in server.latency_ms]
