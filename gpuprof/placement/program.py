"""An integer program, solved by HiGHS over scaled rows, and verified independently of the solver.

Rows mix memory in bytes with counts: with coefficients of 1e10 in a row and an absolute solver tolerance of 1e-6, the
solver accepts wrong optima. Therefore every row, every real column and the objective are scaled to about one
(`fit_scales`), and the result is verified: a solution must keep every original row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import highspy
import numpy as np
from numpy.typing import NDArray

from gpuprof.placement.placement import TOLERANCE

#: Branch-and-bound nodes, times the entries of the program, after which the incumbent is returned without a time limit.
#: A count, not a time, so that the same problem has the same result on every machine.
_MOST_WORK = 1_000_000
#: HiGHS (1.15) counts whole numbers in 32 bits: for larger columns its fixing by reduced costs never ends, whatever the
#: time limit. No plan needs such counts; only segments of negligible capacity could reach them.
_MOST_COUNTED = float(np.iinfo(np.int32).max // 2)
#: Relative gap that is treated as zero.
EXACT = 1e-7
Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Solution:
    """A result of the solver."""

    values: tuple[float, ...]  #: Values by column; integers are whole.
    objective: float
    bound: float  #: Lower bound on the objective of every solution.
    is_proven: bool  #: True if the objective is the minimum, up to the allowed gaps.
    #: Change of the objective per unit of each row's bound, for a relaxed program.
    duals: tuple[float, ...] = ()


@dataclass(slots=True)
class Program:
    """Minimises a linear cost over integer and real columns; rows bound weighted sums of columns."""

    _costs: list[float] = field(default_factory=list)
    _limits: list[tuple[float, float]] = field(default_factory=list)
    _integer: list[bool] = field(default_factory=list)
    _entries: list[dict[int, float]] = field(default_factory=list)
    _rows: list[tuple[float, float]] = field(default_factory=list)

    def row(self, low: float = -math.inf, high: float = math.inf) -> int:
        """Add a row ``low <= sum of its entries <= high`` and return its index."""
        self._rows.append((low, high))
        return len(self._rows) - 1

    def column(self, cost: float, entries: Mapping[int, float], high: float = math.inf, *, integer: bool = True) -> int:
        """Add a column between 0 and ``high`` with its entries by row, and return its index."""
        self._costs.append(cost)
        self._limits.append((0.0, high))
        self._integer.append(integer)
        self._entries.append(dict(entries))
        return len(self._costs) - 1

    def add(self, column: int, row: int, value: float) -> None:
        """Set the entry of a column in a row that was added after it."""
        self._entries[column][row] = value

    def bound_row(self, row: int, low: float = -math.inf, high: float = math.inf) -> None:
        """Replace the bounds of a row."""
        self._rows[row] = (low, high)

    def recost(self, costs: Mapping[int, float]) -> None:
        """Replace the whole objective."""
        self._costs = [costs.get(column, 0.0) for column in range(len(self._costs))]

    def solve(
        self,
        *,
        time_limit_s: float | None = None,
        seed: int = 0,
        relaxed: bool = False,
        gap: float = EXACT,
        least_step: float = 0.0,
    ) -> Solution | None:
        """Return the best solution found, None when there is none or none was found in time.

        ``relaxed``: allow fractions for integers, for a quick bound; ``gap``: relative distance of objective and bound
        at which the search may stop; ``least_step``: minimum difference of the objectives of different solutions, so
        that a nearer bound proves optimality.
        """
        columns = self._columns()
        scales = fit_scales(columns)
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("random_seed", seed)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("mip_rel_gap", gap)
        # The gap is in units of HiGHS's scaled objective, just below a step: a nearer bound leaves no better solution.
        solver.setOptionValue("mip_abs_gap", max(1e-6, least_step * scales.objective * (1.0 - 1e-6)))
        for name in ("primal_feasibility_tolerance", "dual_feasibility_tolerance", "mip_feasibility_tolerance"):
            solver.setOptionValue(name, TOLERANCE)
        if time_limit_s is None:
            solver.setOptionValue("mip_max_nodes", max(1, _MOST_WORK // max(1, len(columns.values))))
        else:
            solver.setOptionValue("time_limit", time_limit_s)
        solver.passModel(_scaled_model(columns, scales, relaxed=relaxed))
        solver.run()
        return _read_solution(solver, columns, scales, relaxed=relaxed)

    def _columns(self) -> Columns:
        entries = self._entries
        return Columns(
            costs=np.array(self._costs),
            highs=np.array([high for _, high in self._limits], dtype=float),
            integer=np.array(self._integer, dtype=bool),
            starts=np.cumsum([0, *map(len, entries)]),
            rows=np.array([row for row_entries in entries for row in row_entries], dtype=np.int32),
            values=np.array([value for row_entries in entries for value in row_entries.values()], dtype=float),
            row_lows=np.array([low for low, _ in self._rows]),
            row_highs=np.array([high for _, high in self._rows]),
        )


def _scaled_model(columns: Columns, scales: Scales, *, relaxed: bool) -> highspy.HighsLp:
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(columns.costs), len(columns.row_lows)
    lp.col_cost_ = columns.costs * scales.columns * scales.objective
    lp.col_lower_ = np.zeros(len(columns.costs))
    highs = columns.highs / scales.columns
    lp.col_upper_ = _bounds(np.where(columns.integer & np.isfinite(highs), np.minimum(highs, _MOST_COUNTED), highs))
    lp.row_lower_ = _bounds(columns.row_lows * scales.rows)
    lp.row_upper_ = _bounds(columns.row_highs * scales.rows)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = columns.starts
    lp.a_matrix_.index_ = columns.rows
    lp.a_matrix_.value_ = columns.values * scales.rows[columns.rows] * scales.columns[columns.owners]
    if not relaxed:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[int(flag)] for flag in columns.integer]
    return lp


def _read_solution(solver: highspy.Highs, columns: Columns, scales: Scales, *, relaxed: bool) -> Solution | None:
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    highs_solution = solver.getSolution()
    # Within its tolerances the solver leaves columns slightly outside their limits.
    values = np.clip(np.array(highs_solution.col_value) * scales.columns, 0.0, columns.highs)
    if not relaxed:
        values = np.where(columns.integer, np.round(values), values)
        if find_violated_row(columns, values) is not None:
            return None
    objective = math.fsum(columns.costs * values)
    is_proven = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    solution = Solution(tuple(values.tolist()), objective, objective, is_proven)
    if not relaxed:
        # Within its tolerances the solver's bound may lie above its own solution.
        return replace(solution, bound=min(objective, float(info.mip_dual_bound) / scales.objective))
    duals = np.array(highs_solution.row_dual) * scales.rows / scales.objective
    return replace(solution, duals=tuple(duals.tolist()))


def _bounds(values: Vector) -> Vector:
    return np.clip(values, -highspy.kHighsInf, highspy.kHighsInf)


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
        """Index of the column of each stored coefficient."""
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
    """Return a row that the values violate by more than rounding; None if all hold."""
    terms = program.values * values[program.owners]
    count = len(program.row_lows)
    activity = np.bincount(program.rows, terms, count)
    size, real = np.zeros(count), np.zeros(count, dtype=bool)
    np.maximum.at(size, program.rows, np.abs(terms))
    np.logical_or.at(real, program.rows, ~program.integer[program.owners])
    # A part of the largest term: the rounding of sums, and for rows with real columns the solver's own tolerance.
    slack = np.where(real, EXACT, TOLERANCE) * np.maximum(size, _largest_entry(program))
    broken = (activity < program.row_lows - slack) | (activity > program.row_highs + slack)
    return int(np.argmax(broken)) if broken.any() else None


def _largest_entry(program: Columns) -> Vector:
    largest = np.zeros(len(program.row_lows))
    np.maximum.at(largest, program.rows, np.abs(program.values))
    return largest


def _power_of_two(values: Vector) -> Vector:
    return np.asarray(np.exp2(np.round(np.log2(values))))
