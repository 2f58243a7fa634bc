"""The linear program of the bound with interference, kept in the solver between rounds.

Columns come and their entries change as boxes are split; each solution begins with the basis of the one before. What is
read off are duals alone: whatever they are, what is bounded with them holds, so that nothing has to be verified here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from gpuprof.domain.interference_table import Floats
from gpuprof.placement.optimal.neighbour_box import PIECES, DualPrices


@dataclass(frozen=True, slots=True)
class BoundDuals:
    """The optimum of the program."""

    worths: DualPrices  #: Of rates and pieces.
    of_demands: Floats  #: By class: of one demand more.
    taken: Floats  #: By column, in the order in which they came: how many devices of it.


@dataclass(slots=True)
class BoundProgram:
    """Minimises the cost of devices whose replicas serve all rates, and whose pieces make all demands."""

    needed: Floats  #: Requests per second, by class.
    demands: Floats  #: How many there are, by class.
    seed: int = 0
    _solver: highspy.Highs = field(init=False)
    _columns: list[int] = field(default_factory=list)  #: Of devices, in the solver's numbers.
    _entries: list[dict[int, float]] = field(default_factory=list)  #: Theirs, by row.
    _width: int = 0

    def __post_init__(self) -> None:
        self._solver = solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (("output_flag", False), ("random_seed", self.seed), ("threads", 1)):
            solver.setOptionValue(option, value)
        for needed in self.needed:
            self._add_row(float(needed))
        # By how many replicas pieces are served, and how many demands are split: both count once they are asked for.
        for _ in range(len(self.needed) * (PIECES + 2)):
            self._add_row(0.0)

    def require_whole_demands(self) -> None:
        """Require that pieces make up all demands; until then rates suffice."""
        for group, count in enumerate(self.demands):
            self._solver.changeRowBounds(self._demand_row(group), float(count), highspy.kHighsInf)

    def add_devices(self, price: float, entries: Mapping[int, float]) -> None:
        """Add a column for devices of one content, with its entries by row."""
        self._columns.append(self._add_column(price, entries))
        self._entries.append(dict(entries))

    def change_devices(self, number: int, entries: Mapping[int, float]) -> None:
        """Replace the entries of a column of devices."""
        before = self._entries[number]
        for row in before.keys() | entries.keys():
            value = entries.get(row, 0.0)
            if value != before.get(row, 0.0):
                self._solver.changeCoeff(row, self._columns[number], value)
        self._entries[number] = dict(entries)

    def add_split(self, group: int, split: Mapping[int, int]) -> None:
        """Add a way to split a demand: how often so many pieces of it are served."""
        takes = {self.piece_row(group, pieces): -float(count) for pieces, count in split.items()}
        self._add_column(0.0, {self._demand_row(group): 1.0, **takes})

    def let_larger_replace_smaller(self, group: int, most: int) -> None:
        """Let a replica that serves more pieces serve one less, up to the most that a replica serves."""
        for pieces in range(2, most + 1):
            rows = self.piece_row(group, pieces), self.piece_row(group, pieces - 1)
            self._add_column(0.0, {rows[0]: -1.0, rows[1]: 1.0})

    def make_entries(self, groups: Sequence[int], rates: Sequence[float], pieces: Sequence[int]) -> dict[int, float]:
        """Return the entries of devices on which replicas of these classes serve so much."""
        entries: dict[int, float] = {}
        for group, rate, number in zip(groups, rates, pieces, strict=True):
            if rate > 0.0:
                row = self.piece_row(group, number)
                entries[group] = entries.get(group, 0.0) + rate
                entries[row] = entries.get(row, 0.0) + 1.0
        return entries

    def solve(self, limit_s: float | None) -> BoundDuals | None:
        """Return the optimum; None where it is not found in time."""
        if limit_s is not None:
            self._solver.setOptionValue("time_limit", self._solver.getRunTime() + limit_s)
        self._solver.run()
        if self._solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution, classes = self._solver.getSolution(), len(self.needed)
        duals = np.maximum(0.0, np.array(solution.row_dual))
        # Whatever is worth more pieces is worth as much.
        of_pieces = np.maximum.accumulate(duals[classes : -classes or None].reshape(classes, PIECES + 1), axis=1)
        of_pieces[:, 0] = 0.0
        taken = np.array(solution.col_value)[self._columns]
        return BoundDuals(DualPrices(duals[:classes], of_pieces), duals[-classes:], taken)

    def piece_row(self, group: int, pieces: int) -> int:
        """Return the row of replicas of a class that serve so many pieces."""
        return len(self.needed) + group * (PIECES + 1) + pieces

    def _demand_row(self, group: int) -> int:
        return len(self.needed) * (PIECES + 2) + group

    def _add_row(self, low: float) -> None:
        self._solver.addRow(low, highspy.kHighsInf, 0, np.array([], dtype=np.int32), np.array([], dtype=float))

    def _add_column(self, cost: float, entries: Mapping[int, float]) -> int:
        rows, values = np.array(list(entries), dtype=np.int32), np.array(list(entries.values()), dtype=float)
        self._solver.addCol(cost, 0.0, highspy.kHighsInf, len(rows), rows, values)
        self._width += 1
        return self._width - 1
