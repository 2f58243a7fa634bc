"""Scaling of a linear program, and verification of its solutions without the solver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

#: Tolerance of a row, as a part of its largest term: the rounding of sums, and for rows with real columns the solver's
#: own tolerance.
_ROUNDING = 1e-9
_REAL_ROUNDING = 1e-7
#: Number of passes over the rows to find limits of columns without limits of their own.
_PASSES = 4


@dataclass(frozen=True, slots=True)
class Columns:
    """A program: minimise ``costs · x`` with ``row_lows <= A x <= row_highs`` and ``0 <= x <= highs``."""

    #: ``costs``, ``highs``: Shape (n_columns,).
    costs: Vector
    highs: Vector
    integer: NDArray[np.bool_]  #: Shape (n_columns,).
    #: Shape (n_columns + 1,). Start of each column's entries in ``rows`` and ``values``.
    starts: NDArray[np.int64]
    #: ``rows``, ``values``: Shape (n_entries,).
    rows: NDArray[np.int32]
    values: Vector
    #: ``row_lows``, ``row_highs``: Shape (n_rows,).
    row_lows: Vector
    row_highs: Vector

    @property
    def owners(self) -> NDArray[np.int64]:
        """The column of each entry."""
        return np.repeat(np.arange(len(self.costs)), np.diff(self.starts))


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of rows, columns and the objective: powers of two, so that scaling rounds nothing."""

    rows: Vector  #: Shape (n_rows,).
    columns: Vector  #: Shape (n_columns,). A column is its scaled value times this; 1.0 for integers.
    objective: float


def fit_scales(program: Columns) -> Scales:
    """Return scales under which real columns end at about one, and the largest entry of every row is about one."""
    real = ~program.integer & np.isfinite(program.highs) & (program.highs > 0.0)
    columns = np.where(real, _power_of_two(np.where(real, program.highs, 1.0)), 1.0)
    largest = np.zeros(len(program.row_lows))
    np.maximum.at(largest, program.rows, np.abs(program.values) * columns[program.owners])
    rows = 1.0 / _power_of_two(np.where(largest > 0.0, largest, 1.0))
    largest_cost = float(np.max(np.abs(program.costs) * columns, initial=0.0))
    return Scales(rows, columns, 1.0 / float(_power_of_two(np.array(largest_cost or 1.0))))


def find_violated_row(program: Columns, values: Vector) -> int | None:
    """Return a row the values break by more than rounding, None where they keep all."""
    terms = program.values * values[program.owners]
    count = len(program.row_lows)
    activity = np.bincount(program.rows, terms, count)
    size, real = np.zeros(count), np.zeros(count, dtype=bool)
    np.maximum.at(size, program.rows, np.abs(terms))
    np.logical_or.at(real, program.rows, ~program.integer[program.owners])
    slack = np.where(real, _REAL_ROUNDING, _ROUNDING) * np.maximum(size, _largest_entry(program))
    broken = (activity < program.row_lows - slack) | (activity > program.row_highs + slack)
    return int(np.argmax(broken)) if broken.any() else None


def dual_bound(program: Columns, duals: Vector, objective: float) -> float:
    """Return a lower bound on the cost of every solution, integer or not, by duals (Neumaier, Shcherbina 2004).

    Duals of a wrong sign are treated as zero; a negative reduced cost of a column is multiplied by the column's limit.
    Columns without a limit get one from the rows, and from ``objective``: solutions that cost more than the known
    solution are irrelevant.

    Parameters
    ----------
    duals : ndarray of shape (n_rows,)
    objective : float
        Of some solution of the relaxed program.

    Returns
    -------
    float
        Minus infinity where the duals give no bound.
    """
    prices = np.where(np.isneginf(program.row_lows), np.minimum(duals, 0.0), duals)
    prices = np.where(np.isposinf(program.row_highs), np.maximum(prices, 0.0), prices)
    ends = np.where(prices > 0.0, program.row_lows, np.where(prices < 0.0, program.row_highs, 0.0))
    row_value = np.bincount(program.owners, program.values * prices[program.rows], len(program.costs))
    reduced_costs = np.minimum(program.costs - row_value, 0.0)
    is_negative = reduced_costs < 0.0
    bound = float(prices @ ends)
    if is_negative.any():
        bound += float(reduced_costs[is_negative] @ _implied_limits(program, objective)[is_negative])
    return min(objective, bound)


def _implied_limits(program: Columns, objective: float) -> Vector:
    """Return the maximum of each column over all solutions that cost at most ``objective``."""
    limits = program.highs.copy()
    if (program.costs >= 0.0).all():
        costly = program.costs > 0.0
        # Rounded outwards here and below: a limit that is slightly too large only weakens the bound.
        limits[costly] = np.minimum(limits[costly], max(0.0, objective) / program.costs[costly] * (1.0 + 1e-9) + 1e-9)
    for _ in range(_PASSES):
        before = limits.copy()
        for sign, ends in ((1.0, program.row_highs), (-1.0, -program.row_lows)):
            _tighten(program, limits, sign * program.values, ends)
        if np.array_equal(before, limits):
            break
    return limits


def _tighten(program: Columns, limits: Vector, values: Vector, ends: Vector) -> None:
    """Lower the limits by the rows ``values x <= ends``: the others' minimum leaves the rest to a column."""
    negative = values < 0.0
    least = np.zeros(len(values))
    least[negative] = values[negative] * limits[program.owners[negative]]
    slack = ends - np.bincount(program.rows, least, len(ends))
    is_positive = (values > 0.0) & np.isfinite(slack[program.rows])
    most = np.maximum(0.0, slack[program.rows][is_positive]) / values[is_positive]
    np.minimum.at(limits, program.owners[is_positive], most * (1.0 + 1e-9) + 1e-9)


def _largest_entry(program: Columns) -> Vector:
    largest = np.zeros(len(program.row_lows))
    np.maximum.at(largest, program.rows, np.abs(program.values))
    return largest


def _power_of_two(values: Vector) -> Vector:
    return np.asarray(np.exp2(np.round(np.log2(values))))
