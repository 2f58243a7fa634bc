"""The reserved part of a deadline, adapted by the same rules as in the simulator."""

from __future__ import annotations

from gpuprof.rules.routing import RESERVE, adapt_reserve, relax_reserve


class Reserve:
    """Holds a model's reserve between answers; see `gpuprof.rules.routing.adapt_reserve`.

    ``percentile``: the percentile of the SLO; ``now``: seconds on any monotonic clock.
    """

    def __init__(self, percentile: float, now: float = 0.0) -> None:
        self.percentile = percentile  # may change with the next map
        self._part = RESERVE
        self._changed = now

    def at(self, now: float) -> float:
        """Return the part of a deadline to keep in hand; ``now`` is in seconds."""
        return relax_reserve(self._part, 1000.0 * (now - self._changed))

    def observe(self, expected_ms: float, latency_ms: float, deadline_ms: float, now: float, requests: int = 1) -> None:
        """Record the expected and the actual time of a request whose batch held ``requests`` requests."""
        before = self.at(now)
        late_part = 1.0 - self.percentile / 100.0
        after = adapt_reserve(before, expected_ms, latency_ms, deadline_ms, late_part, requests)
        if after != before:
            self._part, self._changed = after, now
