"""How long batches take: what the map predicted, corrected by what is seen."""

from __future__ import annotations

from collections.abc import Sequence

_WEIGHT = 0.05  # of one batch in the running mean


class LatencyTable:
    """Running mean of the time of a batch of 1, 2, … rows.

    Parameters
    ----------
    batch : int
        Largest batch.
    predicted_ms : sequence of float or None
        By number of rows; None: unknown until seen.

    Attributes
    ----------
    ms : list of float, length ``batch``
        0 where nothing is known.
    """

    def __init__(self, batch: int, predicted_ms: Sequence[float] | None = None) -> None:
        self.ms = list(predicted_ms or ())[:batch]
        self.ms += [self.ms[-1] if self.ms else 0.0] * (batch - len(self.ms))

    def observe(self, rows: int, ms: float) -> None:
        """Take in that a batch of ``rows`` took ``ms``; unknown sizes are filled in proportion."""
        known = self.ms[rows - 1]
        self.ms[rows - 1] = known + _WEIGHT * (ms - known) if known else ms
        if not known:
            for size in range(1, len(self.ms) + 1):
                if not self.ms[size - 1]:
                    self.ms[size - 1] = ms * max(1.0, size / rows)
