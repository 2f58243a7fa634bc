"""The time that a search may take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limit:
    """A time limit that runs from when it is made.

    Attributes
    ----------
    seconds : float or None
        None: no limit; searches then stop by counts, so that the same problem has the same answer everywhere.
    """

    seconds: float | None = None
    _started: float = field(default_factory=time.monotonic, compare=False)

    @property
    def left_s(self) -> float | None:
        """Seconds left, at least a thousandth; None without a limit."""
        return None if self.seconds is None else max(1e-3, self._started + self.seconds - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.seconds is not None and time.monotonic() - self._started >= self.seconds
