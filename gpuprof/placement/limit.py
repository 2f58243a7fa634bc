"""The time that a search may take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace


class TimeUpError(Exception):
    """The time is up. Whoever set the limit catches it and takes what was found before; no user sees it."""


def _now() -> float:
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class Limit:
    """A time limit that runs from when it is made.

    Attributes
    ----------
    seconds : float or None
        None: no limit; searches then stop by counts, so that the same problem has the same answer everywhere.
    """

    seconds: float | None = None
    _started: float = field(default_factory=_now, compare=False)

    @property
    def left_s(self) -> float | None:
        """Seconds left, at least a thousandth; None without a limit."""
        return None if self.seconds is None else max(1e-3, self._started + self.seconds - _now())

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.seconds is not None and _now() - self._started >= self.seconds

    @property
    def spent_s(self) -> float:
        """Seconds since the limit was made."""
        return _now() - self._started

    def keeping(self, seconds: float) -> Limit:
        """Return the limit that ends so much earlier, for what is still to be done then."""
        return self if self.seconds is None else replace(self, seconds=self.seconds - seconds)
