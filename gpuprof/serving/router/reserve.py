"""How much of a deadline early refusal keeps in hand, learned from how far expectations were wrong."""

from __future__ import annotations

from gpuprof.rules.routing import RESERVE

#: However wrong expectations are, so much of a deadline is used.
_LARGEST = 0.3
_STEP = 0.01
#: Only what was expected to take so much of its deadline says something of those that just meet theirs.
_NEAR_LIMIT = 0.5


class Reserve:
    """Tracks the part of a deadline that has to be kept in hand so that few of those that are let in are late.

    Each answer moves it by a step, up where the request would have been late at the limit, down where not; the steps
    are as large as the percentile of the SLO and what is left of it, so that it rests where just that part is in time.

    Parameters
    ----------
    percentile : float
        Of the latencies, that the SLO is for.

    Attributes
    ----------
    part : float
        From `RESERVE` on.
    """

    def __init__(self, percentile: float) -> None:
        self._late_part = 1.0 - percentile / 100.0
        self.part = RESERVE

    def observe(self, expected_ms: float, took_ms: float, deadline_ms: float) -> None:
        """Take in when a request was answered that was let in expecting its answer after ``expected_ms``."""
        if expected_ms < _NEAR_LIMIT * deadline_ms:
            return
        would_be_late = took_ms * (1.0 - self.part) > expected_ms
        moved = self.part + _STEP * ((1.0 if would_be_late else 0.0) - self._late_part)
        self.part = min(_LARGEST, max(RESERVE, moved))
