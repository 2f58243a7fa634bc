"""Devices by what their replicas can serve beside one another, and the replicas that serve a demand together.

The bound with interference (`neighbour_bound`) rests on devices that it generates: good ones, as it knows what all
rates and parts of demands are worth. But it says a little too much of each, and counts demands in 36 parts. Here these
devices stand for what they are: a replica serves a part of a demand, rounded down to 1/720, and a demand is split in
whatever parts of such replicas make it up. Splits are found as the duals ask for them (a knapsack by dynamic
programming), so that there is no list of them. What the relaxation rests on is chosen from in whole numbers
(`gpuprof.placement.optimal.capacity_map`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import highspy
import numpy as np

from gpuprof.domain.interference_table import Floats, Integers
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.neighbour_box import Items, KindTable

#: Parts of a demand that replicas serve are counted in so many, rounded down.
WHOLE = 720
#: Relative tolerance by which a replica must serve more than its part.
_SLACK = 1e-7
#: Devices that the program may take, those that were worth most, and of these, and of splits, what is chosen from.
_MOST_PATTERNS, _CHOSEN_PATTERNS, _CHOSEN_SPLITS = 400, 120, 300
_MOST_ROUNDS = 150
_TOLERANCE = 1e-6
#: A split is added that is worth less than a demand by this part.
_WORTHWHILE = 1e-3


@dataclass(frozen=True, slots=True)
class CapacityPattern:
    """What stands on a device, and how much of a demand each replica can serve there."""

    kind: int
    items: Items
    classes: tuple[int, ...]  #: By replica.
    parts: tuple[int, ...]  #: By replica, in 1/`WHOLE` of a demand.


@dataclass(frozen=True, slots=True)
class CapacitySplit:
    """Parts of replicas that serve a whole demand."""

    number: int  #: Of the class.
    parts: tuple[int, ...]  #: Largest first.


@dataclass(frozen=True, slots=True)
class CapacityColumns:
    """What a map may be made of, what the relaxation takes first, then by falling worth."""

    patterns: tuple[CapacityPattern, ...]
    splits: tuple[CapacitySplit, ...]
    taken: tuple[int, int] = (0, 0)  #: How many of the patterns, and of the splits, it takes.
    cost: float = 0.0  #: Of the relaxation.


class CapacityRows:
    """Numbers the rows of the program: of replicas by class and part, then of the demands of each class."""

    def __init__(self, columns: CapacityColumns, classes: int) -> None:
        own: list[set[int]] = [set() for _ in range(classes)]
        for one in columns.patterns:
            for number, part in zip(one.classes, one.parts, strict=True):
                own[number].add(part)
        for split in columns.splits:  # for whose parts replicas of larger ones may stand
            own[split.number].update(split.parts)
        self.parts = [sorted(one - {0}) for one in own]
        listed = [(number, part) for number, parts in enumerate(self.parts) for part in parts]
        self.of_parts = {pair: row for row, pair in enumerate(listed)}
        self.of_demands = range(len(listed), len(listed) + classes)

    def enter_pattern(self, pattern: CapacityPattern) -> dict[int, float]:
        """Return the entries of a device: so many more replicas of each part."""
        rows = (self.of_parts.get(pair) for pair in zip(pattern.classes, pattern.parts, strict=True))
        return {row: float(count) for row, count in Counter(row for row in rows if row is not None).items()}

    def enter_split(self, split: CapacitySplit) -> dict[int, float]:
        """Return the entries of a demand that is served so."""
        takes = {self.of_parts[split.number, part]: -float(count) for part, count in Counter(split.parts).items()}
        return {self.of_demands[split.number]: 1.0, **takes}

    def enter_replacements(self) -> Iterator[dict[int, float]]:
        """Yield the entries of a replica that stands for one of the next smaller part."""
        for number, parts in enumerate(self.parts):
            for smaller, larger in pairwise(parts):
                yield {self.of_parts[number, larger]: -1.0, self.of_parts[number, smaller]: 1.0}


def make_pattern(number: int, kind: KindTable, items: Items) -> CapacityPattern:
    """Return a device of the kind with this number by what its replicas can serve."""
    rows = np.array(items, dtype=np.int64)
    rates, asked = kind.most_rps(len(items), kind.sum_pressures(items), rows), kind.rates_rps[rows]
    parts = np.where(rates >= asked, WHOLE, np.floor(WHOLE * rates / asked * (1.0 - _SLACK)))
    return CapacityPattern(number, items, tuple(kind.classes[rows].tolist()), tuple(parts.astype(int).tolist()))


def compile_kernel() -> None:
    """Compile the machine code of `choose_columns`, or load it."""
    from gpuprof.placement.optimal.cover_kernel import find_cover  # numba takes long to import

    find_cover(np.ones(1, dtype=np.int64), np.ones(1), 1, np.zeros(2, dtype=np.int64))


def choose_columns(
    kinds: Sequence[KindTable], demands: Floats, ranked: Sequence[CapacityPattern], limit: Limit
) -> CapacityColumns | None:
    """Return the devices and splits on which serving all demands rests; None where they do not serve all, or in time.

    Parameters
    ----------
    kinds : sequence of KindTable
    demands : ndarray
        How many there are, by class.
    ranked : sequence of CapacityPattern
        The most promising first; the first are looked at, and the first that serves a class.
    limit : Limit
    """
    patterns, missing = list(ranked[:_MOST_PATTERNS]), set(range(len(demands)))
    for one in ranked:
        serves = {number for number, part in zip(one.classes, one.parts, strict=True) if part}
        if missing & serves and one not in patterns:
            patterns.append(one)
        missing -= serves
    if missing:
        return None
    relaxation = _Relaxation(kinds, demands, patterns)
    return relaxation.choose() if relaxation.generate(limit) else None


@dataclass(slots=True)
class _Relaxation:
    """The program in real numbers, kept in the solver while splits come."""

    kinds: Sequence[KindTable]
    demands: Floats
    patterns: Sequence[CapacityPattern]
    _rows: CapacityRows = field(init=False)
    _splits: dict[CapacitySplit, int] = field(default_factory=dict)  #: Their columns.
    _solver: highspy.Highs = field(init=False)
    _width: int = 0

    def __post_init__(self) -> None:
        self._solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (("output_flag", False), ("threads", 1)):
            self._solver.setOptionValue(option, value)
        self._rows = rows = CapacityRows(CapacityColumns(tuple(self.patterns), ()), len(self.demands))
        for needed in [0.0] * len(rows.of_parts) + self.demands.tolist():
            self._solver.addRow(needed, highspy.kHighsInf, 0, np.array([], dtype=np.int32), np.array([], dtype=float))
        for one in self.patterns:
            self._add_column(self.kinds[one.kind].price, rows.enter_pattern(one))
        for entries in rows.enter_replacements():
            self._add_column(0.0, entries)
        for number, part in rows.of_parts:
            self._add_split(CapacitySplit(number, (part,) * -(-WHOLE // part)))

    def generate(self, limit: Limit) -> bool:
        """Add splits until the duals ask for none; whether the program has a solution."""
        for _ in range(_MOST_ROUNDS):
            if limit.seconds is not None:
                self._solver.setOptionValue("time_limit", self._solver.getRunTime() + (limit.left_s or 0.0))
            self._solver.run()
            if self._solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                return False
            if limit.is_over or not self._price(np.array(self._solver.getSolution().row_dual)):
                break
        return True

    def choose(self) -> CapacityColumns:
        """Return the columns that the program takes, as it was solved last, and those of least reduced cost."""
        solution = self._solver.getSolution()
        reduced, values = np.zeros(self._width), np.zeros(self._width)  # splits that came after it cost nothing
        reduced[: len(solution.col_dual)], values[: len(solution.col_value)] = solution.col_dual, solution.col_value

        def rank(columns: Sequence[int]) -> tuple[list[int], int]:
            own = np.array(columns)
            order = np.lexsort((reduced[own], values[own] <= _TOLERANCE))
            return order.tolist(), int(np.count_nonzero(values[own] > _TOLERANCE))

        patterns, most_patterns = rank(range(len(self.patterns)))
        splits, most_splits = rank(list(self._splits.values()))
        listed = list(self._splits)
        return CapacityColumns(
            tuple(self.patterns[one] for one in patterns[: max(_CHOSEN_PATTERNS, most_patterns)]),
            tuple(listed[one] for one in splits[: max(_CHOSEN_SPLITS, most_splits)]),
            (most_patterns, most_splits),
            self._solver.getInfo().objective_function_value,
        )

    def _price(self, duals: Floats) -> int:
        """Add for each class the split that is worth least, if that is less than a demand; return how many."""
        return sum(self._price_class(number, duals) for number in range(len(self.demands)))

    def _price_class(self, number: int, duals: Floats) -> int:
        from gpuprof.placement.optimal.cover_kernel import find_cover  # numba takes long to import

        parts: Integers = np.array(self._rows.parts[number], dtype=np.int64)
        costs = np.maximum(0.0, duals[[self._rows.of_parts[number, part] for part in parts.tolist()]])
        chosen = np.zeros(WHOLE + 1, dtype=np.int64)
        whole = duals[self._rows.of_demands[number]]
        if find_cover(parts, costs, WHOLE, chosen) >= whole * (1.0 - _WORTHWHILE):
            return 0
        taken, left = [], WHOLE
        while left > 0:
            taken.append(int(parts[chosen[left]]))
            left -= taken[-1]
        return self._add_split(CapacitySplit(number, tuple(sorted(taken, reverse=True))))

    def _add_split(self, split: CapacitySplit) -> int:
        if split in self._splits:
            return 0
        self._splits[split] = self._width
        self._add_column(0.0, self._rows.enter_split(split))
        return 1

    def _add_column(self, cost: float, entries: Mapping[int, float]) -> None:
        rows, values = np.array(list(entries), dtype=np.int32), np.array(list(entries.values()), dtype=float)
        self._solver.addCol(cost, 0.0, highspy.kHighsInf, len(rows), rows, values)
        self._width += 1
