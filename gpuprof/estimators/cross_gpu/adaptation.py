"""What a few measurements of a new GPU say of all its ops of the same family: how much slower or faster it is.

Launches weigh in short ops and the GPU's rate in long ones, so that two factors are learned, one at either end, and
mixed by where an op's predicted time lies. Each is drawn to one as long as few rows speak for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: So many rows weigh as much as what was learned on other GPUs.
_PRIOR_ROWS = 2.0


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Factors of families on one GPU.

    Attributes
    ----------
    short_s, long_s : float
        Predicted times that the two factors are of.
    factors : mapping of str to (float, float)
        Family → logarithms of the factor of short and of long ops.
    """

    short_s: float
    long_s: float
    factors: Mapping[str, tuple[float, float]]

    def apply(self, family: NDArray[np.str_], predicted_s: Array) -> Array:
        """Return predictions moved to what the GPU's measurements say.

        Parameters
        ----------
        family, predicted_s : ndarray of shape (N,)

        Returns
        -------
        ndarray of shape (N,)
        """
        known = np.array([self.factors.get(str(name), (0.0, 0.0)) for name in family]).reshape(-1, 2)
        part = _position(predicted_s, self.short_s, self.long_s)
        return np.asarray(predicted_s * np.exp((1 - part) * known[:, 0] + part * known[:, 1]))


def adapt_families(
    family: NDArray[np.str_], predicted_s: Array, measured_s: Array, all_predicted_s: Array | None = None
) -> Adaptation:
    """Return the factors that measurements of a GPU show.

    Parameters
    ----------
    family, predicted_s, measured_s : ndarray of shape (N,)
        Of the ops that were measured.
    all_predicted_s : ndarray, optional
        Predicted times of all ops that there are to estimate, which say what is short and long; by default of those
        measured.
    """
    everything = predicted_s if all_predicted_s is None else all_predicted_s
    short, long = (float(np.quantile(everything, q)) for q in (0.1, 0.9)) if len(everything) else (1e-5, 1e-3)
    found = {}
    for name in sorted(set(family.tolist())):
        rows = family == name
        residual = np.log(measured_s[rows] / predicted_s[rows])
        middle = float(np.median(residual)) * rows.sum() / (rows.sum() + _PRIOR_ROWS)
        part = _position(predicted_s[rows], short, long)
        found[str(name)] = tuple(middle + _end(residual - middle, weight) for weight in (1 - part, part))
    return Adaptation(short, long, {name: (ends[0], ends[1]) for name, ends in found.items()})


def _end(residual: Array, weight: Array) -> float:
    """Return the weighted median at one end, drawn to zero where few rows lie there."""
    order = np.argsort(residual)
    total = float(weight.sum())
    if total < 1.0:
        return 0.0
    middle = int(np.searchsorted(np.cumsum(weight[order]), total / 2))
    return float(residual[order][min(middle, len(order) - 1)]) * total / (total + 2 * _PRIOR_ROWS)


def _position(seconds: Array, short: float, long: float) -> Array:
    span = np.log(max(long, short * 1.001) / short)
    return np.asarray(np.clip(np.log(np.maximum(seconds, 1e-12) / short) / span, 0.0, 1.0))
