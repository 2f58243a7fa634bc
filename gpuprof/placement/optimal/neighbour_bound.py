"""A lower bound on the cost of demands that accounts for interference.

The program has a column for what could stand on a device, and rows for each class of demands that are alike: their
rates must be served, by whatever replicas, and demands must be whole: each replica counts for pieces of its demand
(`count_pieces`), and so many replicas must serve so many as make one. Its dual gives a worth to requests per second and
to pieces. Where no device can serve more worth than it costs, no map is cheaper than what all demands are worth at
least, however they are split: a map's devices serve all of them, and each device at most what it costs. Where some can,
all worths are scaled down until none can (Farley 1990).

That none can is shown box by box (`neighbour_box`): each replica on a device of a box serves no more than its workload
does at the least pressure of the box, no more than its demand asks for, and nothing where it is too late even then;
shares add up to a whole device at most. Memory, numbers of devices and of replicas are left out: a relaxation. Boxes
are split where the program rests on devices of which they say too much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from gpuprof.domain.interference_table import Floats
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.alone_bound import find_cheapest_covers
from gpuprof.placement.optimal.bound_program import BoundProgram
from gpuprof.placement.optimal.capacity_program import WHOLE, CapacityPattern, make_pattern
from gpuprof.placement.optimal.neighbour_box import (
    PIECES,
    DualPrices,
    Items,
    KindTable,
    PressureBox,
    count_pieces,
    root_boxes,
)

#: Numbers of replicas on a device that have boxes of their own; the last stands for more as well.
_COUNTS = tuple(range(1, 10))
#: Rounds where no time limit says otherwise.
_MOST_ROUNDS = 80
#: Relative gap to the program without whole demands at which the bound goes on with them.
_NEAR = 0.02
#: Most boxes, and how many are split in a round.
_MOST_BOXES, _MOST_SPLIT = 1_500, 24
#: A device is worth more than it costs by less than this part: no more boxes are looked at for it.
_TOLERANCE = 1e-4
#: How much the worths of the best bound count beside those of the program, which are wild while it has few columns.
_STABLE = 0.6
#: What stands on a device, where it stands in the program.
_Column = tuple[int, Items]


@dataclass(frozen=True, slots=True)
class BoundTask:
    """What is to be bounded."""

    kinds: Sequence[KindTable]  #: What may run on each kind of device.
    needed: Floats  #: Requests per second, by class.
    demands: Floats  #: How many there are, by class.
    known: Sequence[_Column]  #: What stands on the devices of a known map, from which worths begin.
    seed: int = 0
    for_maps: bool = False  #: Whether it is wanted, too, what a map may be made of.


@dataclass(slots=True)
class NeighbourBound:
    """The program over what could stand on devices, and the boxes that bound it."""

    task: BoundTask
    boxes: list[PressureBox] = field(init=False)
    most_pieces: list[int] = field(init=False)  #: That one replica serves, by class.
    _roots: list[list[PressureBox]] = field(init=False)  #: By kind and number of replicas.
    _program: BoundProgram = field(init=False)
    _columns: dict[_Column, PressureBox] = field(default_factory=dict)  #: In the program's order.
    #: Ways to split a demand, by class: how often so many pieces of it are served.
    _splits: list[list[dict[int, int]]] = field(default_factory=list)
    _duals: DualPrices | None = None  #: Of the program as it was solved last.

    def __post_init__(self) -> None:
        self._roots = [root_boxes(kind, _COUNTS) for kind in self.task.kinds]
        self.boxes = [box for own in self._roots for box in own]
        most = np.ones(len(self.task.needed), dtype=np.int64)
        for box in self.boxes:
            np.maximum.at(most, box.kind.classes, box.pieces)
        self.most_pieces = most.tolist()
        self._program = BoundProgram(self.task.needed, self.task.demands, self.task.seed)
        for group, own in enumerate(self.most_pieces):
            self._splits.append([])
            self._program.let_larger_replace_smaller(group, own)
            for split in _list_splits(own):
                self._add_split(group, split)

    def raise_bound(self, limit: Limit) -> Iterator[float]:
        """Yield the highest bound so far, after each round, until there is no higher one or the time is up."""
        for number, kind in enumerate(self.task.kinds):
            self._begin(number, kind)
        for number, items in self.task.known:
            self._add(number, items)
        classes = len(self.task.needed)
        highest, weight, whole = 0.0, 0.0, False
        centre = DualPrices(np.zeros(classes), np.zeros((classes, PIECES + 1)))
        for _ in range(_MOST_ROUNDS) if limit.seconds is None else count():
            solved = self._solve(limit, whole=whole)
            if solved is None:
                break
            duals, used, settled = solved
            self._duals = duals
            worths = centre.mix(duals, weight)
            for box in self.boxes:
                box.evaluate(worths, box.kind.price)
                if limit.is_over:
                    return
            worths = worths.scale(1.0 / max(1.0, *(box.value / box.kind.price for box in self.boxes)))
            if (bound := self._bound(worths)) > highest:
                highest, centre = bound, worths
            yield highest
            added = self._add_worth(duals)
            split = self._split(used)
            if not whole and self._bound(duals) < highest * (1.0 + _NEAR):
                whole = True
                self._program.require_whole_demands()
            elif settled and not added and not split and not weight:
                break
            weight = _STABLE if added else 0.0

    def rank_patterns(self) -> list[CapacityPattern]:
        """Return the program's devices by what their replicas can serve, those worth most for their price first."""
        duals = self._duals
        if duals is None:
            return []
        patterns = [make_pattern(number, self.task.kinds[number], items) for number, items in self._columns]

        def worth(pattern: CapacityPattern) -> float:
            classes, parts = np.array(pattern.classes), np.array(pattern.parts) / WHOLE
            rates = parts * self.task.needed[classes] / self.task.demands[classes]
            return float((duals.per_rps[classes] * rates + duals.of_pieces[classes, count_pieces(parts)]).sum())

        return sorted(patterns, key=lambda one: -worth(one) / self.task.kinds[one.kind].price)

    def _bound(self, worths: DualPrices) -> float:
        """Return what all demands are worth at least, whichever replicas serve them."""
        whole, _ = find_cheapest_covers(self._limit_pieces(worths.of_pieces))
        return float(worths.per_rps @ self.task.needed + whole @ self.task.demands)

    def _limit_pieces(self, of_pieces: Floats) -> Floats:
        """Return what 1, 2, … pieces are worth, beyond reach where no replica serves so many."""
        worths = of_pieces[:, 1:].copy()
        worths[np.arange(1, PIECES + 1) > np.array(self.most_pieces)[:, None]] = np.inf
        return worths

    def _begin(self, number: int, kind: KindTable) -> None:
        """Add what serves most of each class alone, so that the program has a solution where there is one."""
        alone = kind.most_rps(1, np.zeros(kind.table.pressures.shape[1]))
        for group in range(len(self.task.needed)):
            own = np.flatnonzero((kind.classes == group) & (alone > 0.0))
            if len(own):
                self._add(number, (int(own[alone[own].argmax()]),))

    def _add(self, number: int, items: Items) -> None:
        kind = self.task.kinds[number]
        if len(items) <= kind.most and (number, items) not in self._columns:
            root = self._roots[number][min(len(items), len(_COUNTS)) - 1]
            self._columns[number, items] = box = root.find(items)
            self._program.add_devices(kind.price, self._make_entries(box, items))

    def _make_entries(self, box: PressureBox, items: Items) -> dict[int, float]:
        own = list(items)
        groups, rates, pieces = box.kind.classes[own], box.rates[own], box.pieces[own]
        return self._program.make_entries(groups.tolist(), rates.tolist(), pieces.tolist())

    def _add_split(self, group: int, split: dict[int, int]) -> None:
        self._splits[group].append(split)
        self._program.add_split(group, split)

    def _add_worth(self, duals: DualPrices) -> int:
        """Add what is worth more than its device, and return how much that is."""
        before = len(self._columns)
        for box in self.boxes:
            worth = float(duals.of_workloads(box, np.array(box.items, dtype=np.int64)).sum())
            if box.items and worth > box.kind.price * (1.0 + _TOLERANCE):
                self._add(self.task.kinds.index(box.kind), box.items)
        return len(self._columns) - before

    def _solve(self, limit: Limit, *, whole: bool) -> tuple[DualPrices, list[_Column], bool] | None:
        """Return what replicas of each class are worth, the columns that are taken, most first, and whether it settled.

        Ways to split a demand are added while one is worth less than the program says that a demand is; where that
        takes several rounds, devices are looked at in between.
        """
        solution, settled = self._program.solve(limit.left_s), True
        if solution is not None and whole and self._add_splits(solution.worths.of_pieces, solution.of_demands):
            solution, settled = self._program.solve(limit.left_s), False
        if solution is None:
            return None
        taken = zip(solution.taken.tolist(), self._columns, strict=True)
        used = sorted(((value, column) for value, column in taken if value > 1e-9), reverse=True)
        return solution.worths, [column for _, column in used], settled

    def _add_splits(self, of_pieces: Floats, demands: Floats) -> int:
        """Add the ways to split a demand that are worth less than the demand, and return how many there are."""
        added = 0
        least, counts = find_cheapest_covers(self._limit_pieces(of_pieces))
        for group in np.flatnonzero(least < demands * (1.0 - _TOLERANCE)).tolist():
            split = {pieces: count for pieces, count in enumerate(counts[group].tolist(), 1) if count}
            if split not in self._splits[group]:
                self._add_split(group, split)
                added += 1
        return added

    def _split(self, used: Sequence[_Column]) -> int:
        """Split boxes that say too much of what the program uses, and those worth most; return how many."""
        most = sorted(self.boxes, key=lambda box: -box.value / box.kind.price)[:_MOST_SPLIT]
        worst = [(box, box.items) for box in most if box.value > box.kind.price * (1.0 + _TOLERANCE)]
        taken = [(self._columns[column], column[1]) for column in used]
        split: set[int] = set()
        for box, items in (*worst[: _MOST_SPLIT // 3], *taken):
            if len(split) >= _MOST_SPLIT or len(self.boxes) >= _MOST_BOXES:
                break
            if items and id(box) not in split and box.split(items):
                split.add(id(box))
                self._replace_box(box)
        return len(split)

    def _replace_box(self, box: PressureBox) -> None:
        self.boxes.remove(box)
        self.boxes.extend(box.halves)
        for number, (column, where) in enumerate(self._columns.items()):
            if where is box:
                half = self._columns[column] = box.find(column[1])
                self._program.change_devices(number, self._make_entries(half, column[1]))


def _list_splits(most: int) -> Iterator[dict[int, int]]:
    """Yield ways to serve a demand by at most ``most`` pieces: by one size, or by one piece of each of two sizes."""
    for pieces in range(1, most + 1):
        yield {pieces: -(-PIECES // pieces)}
        if PIECES - most <= pieces < PIECES - pieces:
            yield {pieces: 1, PIECES - pieces: 1}
