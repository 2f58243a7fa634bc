"""A replica with its times in units that a whole pool has in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScaledServer:
    """A `gpuprof.domain.sojourn.BatchServer` with times in units that the whole pool has in common.

    Attributes
    ----------
    latency : tuple of float
        Mean time of a batch of 1, 2, … requests.
    max_wait : float
    processes : int
    cv, pause, pause_cv : float
        Variation of a service time (gamma); time of a batch that finds its process at rest over that of one that
        follows another, and its variation.
    """

    latency: tuple[float, ...]
    max_wait: float
    processes: int
    cv: float
    pause: float
    pause_cv: float

    @property
    def capacity(self) -> float:
        """Requests per unit of time when every batch is full."""
        return self.processes * len(self.latency) / self.latency[-1]
