"""Work found by requests when calm and bursts alternate and one server processes one request after another.

The exact law is the workload of the MMPP/G/1 queue, known by its Laplace transform (V. Ramaswami, "The N/G/1 queue and
its detailed analysis", 1980; W. Fischer and K. Meier-Hellstern, "The Markov-modulated Poisson process cookbook", 1992)
and inverted numerically (J. Abate and W. Whitt, "Numerical inversion of Laplace transforms of probability
distributions", 1995). For many small requests it tends to a Brownian motion whose drift and variance change with the
phase, reflected at 0, whose law is a sum of two exponentials (S. Asmussen, "Stationary distributions for fluid flow
models with or without Brownian noise", 1995).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Halvings of the bracket around the transform's root: more than the 53 bits of a double.
_HALVINGS = 80
#: Squared variation below which a service time counts as constant: the gamma's transform, a power of 1 / scv, loses its
#: digits there.
_SMALL = 1e-8
#: A of Abate and Whitt's algorithm Euler, with an error of exp(-A) = 1e-8, and its numbers of plain and averaged terms.
_DAMPING = 18.4
_TERMS, _AVERAGED = 15, 11


@dataclass(frozen=True, slots=True)
class BurstBacklog:
    """Law of the work, in time, found by requests in the calm (phase 0) and in a burst (phase 1)."""

    #: ``stays``, ``rates``: Mean time in each phase and requests per unit of time; below capacity on average.
    stays: tuple[float, float]
    rates: tuple[float, float]
    #: ``service``, ``service_scv``: Mean time of a request and its squared coefficient of variation (gamma).
    service: float
    service_scv: float
    parts: Array = field(init=False)  #: Shape (2,). Part of the requests in each phase.
    decays: Array = field(init=False)  #: Shape (2,). Decay rates of the Brownian motion's law.
    _weights: Array = field(init=False)

    def __post_init__(self) -> None:
        leave_calm, leave_burst = (1.0 / stay for stay in self.stays)
        d0, d1 = (rate * self.service - 1.0 for rate in self.rates)
        a0, a1 = (0.5 * (1.0 + self.service_scv) * rate * self.service**2 for rate in self.rates)
        cubic = (
            a0 * a1,
            a0 * d1 + d0 * a1,
            d0 * d1 - a0 * leave_burst - a1 * leave_calm,
            -(d0 * leave_burst + d1 * leave_calm),
        )
        decays = np.sort(np.roots(cubic).real)[1:]  # a root is negative, since the load is below capacity
        shapes = np.array([np.full(2, leave_burst), leave_calm - (a0 * decays + d0) * decays])
        phases = self._phases()
        parts = phases * self.rates
        object.__setattr__(self, "decays", decays)
        object.__setattr__(self, "parts", parts / parts.sum())
        object.__setattr__(self, "_weights", shapes * np.linalg.solve(shapes, phases) / phases[:, None])

    def beyond(self, backlog: Array) -> Array:
        """Return the probabilities of a larger backlog in each phase by the Brownian motion, of shape (2, backlogs)."""
        return np.asarray(np.clip(self._weights @ np.exp(-np.outer(self.decays, backlog)), 0.0, 1.0))

    def beyond_exactly(self, backlog: Array) -> Array:
        """Return the probabilities of a larger backlog by the transform, to some 1e-7; each backlog above 0."""
        points = (0.5 * _DAMPING + 1j * math.pi * np.arange(_TERMS + _AVERAGED + 1)) / backlog[:, None]
        terms = self._tail_transform(points).real * (-1.0) ** np.arange(points.shape[1])
        terms[:, :, 0] *= 0.5
        sums = np.cumsum(terms, axis=2)[:, :, _TERMS:]
        weights = np.array([math.comb(_AVERAGED, k) for k in range(_AVERAGED + 1)]) / 2.0**_AVERAGED
        beyond = math.exp(0.5 * _DAMPING) / backlog * (sums @ weights) / self._phases()[:, None]
        # In the far tail the error of the inversion exceeds the probability, and the result could rise or be negative.
        return np.asarray(np.minimum.accumulate(np.clip(beyond, 0.0, 1.0), axis=1))

    def _phases(self) -> Array:
        """Return the part of the time in each phase."""
        return np.array(self.stays) / sum(self.stays)

    def _tail_transform(self, points: Array) -> Array:
        """Return the joint transforms of exceeding a backlog and being in each phase, of shape (2, *points)."""
        calm, burst = self._diagonal(points)
        leave_calm, leave_burst = (1.0 / stay for stay in self.stays)
        idle = self._idle()
        determinant = calm * burst - leave_calm * leave_burst
        transform = (
            points
            / determinant
            * np.array([idle[0] * burst - idle[1] * leave_burst, idle[1] * calm - idle[0] * leave_calm])
        )
        return np.asarray((self._phases().reshape(2, *[1] * points.ndim) - transform) / points)

    def _diagonal(self, points: Array) -> tuple[Array, Array]:
        """Return ``s - rate (1 - E[exp(-s S)]) - 1 / stay`` of both phases."""
        scaled = points * self.service
        some = (
            -np.expm1(-scaled)
            if self.service_scv < _SMALL
            else 1.0 - (1.0 + scaled * self.service_scv) ** (-1.0 / self.service_scv)
        )
        calm, burst = (points - rate * some - 1.0 / stay for rate, stay in zip(self.rates, self.stays, strict=True))
        return calm, burst

    def _idle(self) -> tuple[float, float]:
        """Return the probabilities of an empty system, in the calm and in a burst.

        Their ratio keeps the transform finite where the determinant is 0, at its one positive root.
        """
        leave_calm, leave_burst = (1.0 / stay for stay in self.stays)

        def determinant(point: float) -> float:
            calm, burst = self._diagonal(np.array(point))
            return float(calm * burst - leave_calm * leave_burst)

        high = leave_calm + leave_burst + sum(self.rates)
        low = high
        while determinant(low) > 0.0 and low > 1e-300:
            low, high = 0.5 * low, low
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if determinant(middle) > 0.0 else (middle, high)
        ratio = float(self._diagonal(np.array(low))[0]) * self.stays[0]
        load = float(self._phases() @ self.rates) * self.service
        in_burst = (1.0 - load) / (1.0 + ratio)
        return ratio * in_burst, in_burst
