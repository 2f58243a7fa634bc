"""Intervals by conformal prediction for groups, from errors of predictions for held-out models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

#: Level of all intervals.
LEVEL = 0.9
#: Least number of models whose errors generalise to the next model.
ENOUGH_MODELS = 4


def interval_factor(residuals: Mapping[str, Sequence[float]]) -> float | None:
    """Return the least factor f so that [value / f, value · f] holds nine of ten figures of a new architecture.

    Residuals of an architecture are similar, so each architecture counts once, by the part of its residuals inside; the
    new architecture counts as outside (conformal prediction for groups). With few architectures this level is out of
    reach, and the largest residual is taken. ``residuals``: architecture → log(measured / predicted) of its figures,
    predicted without the architecture.

    Examples
    --------
    >>> from math import log
    >>> round(interval_factor({"resnet": [log(1.1)], "bert": [log(0.8)]}), 3)
    1.25
    """
    sizes = sorted((abs(value), 1.0 / len(values)) for values in residuals.values() for value in values)
    if not sizes:
        return None
    inside, target = 0.0, LEVEL * (1 + sum(1 for values in residuals.values() if values))
    for size, weight in sizes:
        inside += weight
        if inside >= target - 1e-9:
            return math.exp(size)
    return math.exp(sizes[-1][0])


def common_factor(ratios: Mapping[str, Sequence[float]]) -> float:
    """Return the median over architectures of their median ratios.

    Examples
    --------
    >>> common_factor({"resnet": [1.0, 1.2, 5.0], "bert": [2.0], "gpt": [1.5]})
    1.5
    """
    return median(median(values) for values in ratios.values())


def left_out_residuals(ratios: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return log(ratio / common factor of the others) of each architecture's ratios; at least two architectures."""
    residuals = {}
    for name, values in ratios.items():
        factor = common_factor({key: series for key, series in ratios.items() if key != name})
        residuals[name] = [math.log(value / factor) for value in values]
    return residuals


def quantile(values: Iterable[float], level: float) -> float | None:
    """Return the conformal quantile: of n values the ceil(level (n + 1))-th smallest, the largest if n is too small.

    Examples
    --------
    >>> quantile(range(1, 20), 0.9), quantile([0.1, 0.3], 0.9)
    (18, 0.3)
    """
    ordered = sorted(values)
    if not ordered:
        return None
    rank = math.ceil(level * (len(ordered) + 1))
    return ordered[min(rank, len(ordered)) - 1]
