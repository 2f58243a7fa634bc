"""Upper bound of a replica's rate within an SLO, by its times alone."""

from __future__ import annotations

from gpuprof.domain.sojourn import BatchServer

#: Tolerance of probabilities: a bound must also hold for maps that keep a percentile up to rounding.
SLACK = 1e-5


def most_within_rps(server: BatchServer, limit_ms: float, percent: float) -> float:
    """Return an upper bound of a replica's rate, with any neighbours, when ``percent`` of the requests are in time.

    All replicas together answer ``percent`` of the requests in time, so each stands for at most its rate in time
    divided by that part; and none serves more than its full batches.
    """
    throughput = max(1000.0 * n * server.processes / ms for n, ms in enumerate(server.latency_ms, 1))
    return min(throughput, most_in_time_rps(server, limit_ms) / (percent / 100.0 - SLACK))


def most_in_time_rps(server: BatchServer, limit_ms: float) -> float:
    """Return an upper bound of the requests a second that a replica answers in time.

    A batch of n whose time S is at most the limit answers n requests in time; by the renewal-reward theorem a process
    answers at most n P(S <= limit) / E[S] of them.
    """
    throughputs = (1000.0 * n * server.processes / ms for n, ms in enumerate(server.latency_ms, 1))
    return max(rate * part for rate, part in zip(throughputs, parts_in_time(server, limit_ms), strict=True))


def parts_in_time(server: BatchServer, limit_ms: float) -> list[float]:
    """Return the parts of the batches of 1, 2, … requests within the limit."""
    left_ms, cv = limit_ms - server.overhead_ms, server.latency_cv
    if cv < 1e-3:
        return [float(ms <= left_ms) for ms in server.latency_ms]
    from scipy.special import gammainc  # the import takes a third of a second, and most times do not vary

    return [float(gammainc(cv**-2, max(0.0, left_ms / ms) * cv**-2)) for ms in server.latency_ms]
