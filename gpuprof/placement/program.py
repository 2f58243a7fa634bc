"""An integer program, solved by HiGHS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import highspy
import numpy as np

_INFINITY = highspy.kHighsInf
#: Branch-and-bound nodes, times the entries of the program, after which the best solution so far is taken when no
#: time limit says otherwise. A count, not a time, so that the same problem has the same answer on every machine.
_MOST_WORK = 400_000
_MOST_NODES = 500
_FEWEST_NODES = 20
#: A relative gap that is none.
EXACT = 1e-7


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found.

    Attributes
    ----------
    values : tuple of float
        By column; integers are whole.
    objective : float
    bound : float
        No solution has a smaller objective.
    proven : bool
        Whether the objective is the smallest there is, up to the gaps that were allowed.
    duals : tuple of float
        By row, of a relaxed program: what the objective grows by when the row's bound does.
    """

    values: tuple[float, ...]
    objective: float
    bound: float
    proven: bool
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

        Parameters
        ----------
        time_limit_s : float, optional
        seed : int
        relaxed : bool
            Let integers be fractions: a bound in no time.
        gap : float
            Distance of objective and bound, relative, at which the search may stop.
        least_step : float
            Objectives of different solutions are so far apart, so that a bound nearer than that proves the better.
        """
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("random_seed", seed)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("mip_abs_gap", max(1e-6, least_step * (1.0 - 1e-6)))
        if time_limit_s is None:
            entries = max(1, sum(map(len, self._entries)))
            solver.setOptionValue("mip_max_nodes", min(_MOST_NODES, max(_FEWEST_NODES, _MOST_WORK // entries)))
        else:
            solver.setOptionValue("time_limit", time_limit_s)
        solver.passModel(self._model(relaxed))
        solver.run()
        return self._read(solver, relaxed)

    def _model(self, relaxed: bool) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._costs), len(self._rows)
        lp.col_cost_ = np.array(self._costs)
        lp.col_lower_ = np.array([_bound(low) for low, _ in self._limits])
        lp.col_upper_ = np.array([_bound(high) for _, high in self._limits])
        lp.row_lower_ = np.array([_bound(low) for low, _ in self._rows])
        lp.row_upper_ = np.array([_bound(high) for _, high in self._rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        starts = np.cumsum([0, *(len(entries) for entries in self._entries)])
        lp.a_matrix_.start_ = starts
        lp.a_matrix_.index_ = np.array([row for entries in self._entries for row in entries], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([value for entries in self._entries for value in entries.values()])
        if not relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[whole] for whole in self._integer]
        return lp

    def _read(self, solver: highspy.Highs, relaxed: bool) -> Solution | None:
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        raw = solver.getSolution().col_value
        values = tuple(
            float(round(value)) if whole and not relaxed else max(0.0, float(value))
            for value, whole in zip(raw, self._integer, strict=True)
        )
        objective = float(info.objective_function_value)
        proven = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        bound = objective if relaxed else min(objective, float(info.mip_dual_bound))
        duals = tuple(float(dual) for dual in solver.getSolution().row_dual) if relaxed else ()
        return Solution(values, objective, bound, proven, duals)


def _bound(value: float) -> float:
    return math.copysign(_INFINITY, value) if math.isinf(value) else value
