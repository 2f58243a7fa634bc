"""A lower bound on what demands cost that knows that neighbours slow one another.

The program has a column for what could stand on a device, and rows for each class of demands that are alike: their
rates must be served, by whatever replicas, and demands must be whole: of pieces of a demand, into which what a replica
serves is rounded up, so many replicas must serve so many as make one. Its dual gives a worth to requests per second and
to pieces. Where no device can serve more worth than it costs, no map is cheaper than what all demands are worth at
least, however they are split: a map's devices serve all of them, and each device at most what it costs. Where some can,
all worths are scaled down until none can (Farley 1990).

That none can is shown box by box (`neighbour_box`): each replica on a device of a box serves no more than its workload
does at the least pressure of the box, no more than its demand asks for, and nothing where it is too late even then;
shares add up to a whole device at most. Memory, numbers of devices and of replicas are left out: a relaxation. Boxes
are split where the program rests on devices of which they say too much.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpuprof.domain.interference_table import Floats, Integers
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.kind_table import number_classes, tabulate_kinds
from gpuprof.placement.optimal.neighbour_box import (
    PIECES,
    Items,
    KindTable,
    PressureBox,
    Worths,
    root_boxes,
)
from gpuprof.placement.placement import PlacedGpu
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Program
from gpuprof.placement.segment import Segments

#: Replicas on a device that are told apart by their number; the last stands for more as well.
_COUNTS = tuple(range(1, 10))
_MOST_ROUNDS = 80
#: A bound that is so much below the program without whole demands is good enough to go on with them.
_NEAR = 0.02
#: So often a round, ways to split demands are added.
_MOST_SPLITTINGS = 2
#: Boxes are split up to this number, so many a round.
_MOST_BOXES, _MOST_SPLIT = 1_500, 24
#: A device is worth more than it costs by less than this part: no more boxes are looked at for it.
_TOLERANCE = 1e-4
#: How much the worths of the best bound count beside those of the program, which are wild while it has few columns.
_STABLE = 0.6
#: What stands on a device, where it stands in the program.
_Column = tuple[int, Items]


def bound_with_neighbours(problem: Problem, segments: Segments, gpus: Sequence[PlacedGpu], limit: Limit) -> float:
    """Return what no way to serve all demands costs less than; 0 where nothing is known of how neighbours act.

    Parameters
    ----------
    problem : Problem
        With a latency budget.
    segments : Segments
        Of the same problem.
    gpus : sequence of PlacedGpu
        Of a known map, from which worths begin.
    limit : Limit
    """
    kinds = () if limit.is_over else tabulate_kinds(problem, segments)
    if not kinds:
        return 0.0
    search = _NeighbourBound(problem, segments, kinds)
    # What may be taken in any case is for the search: wrapped estimators take longer for the tables than that.
    return search.raise_bound(gpus, limit.with_least(limit.least_cpu_s))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of the program."""

    rates: Integers  #: By class: what is served.
    pieces: Integers  #: By class and number of pieces: by how many replicas they are.
    demands: Integers  #: By class: how many are split.


@dataclass(slots=True)
class _NeighbourBound:
    """The program over what could stand on devices, and the boxes that bound it."""

    problem: Problem
    segments: Segments
    kinds: Sequence[KindTable]
    boxes: list[PressureBox] = field(init=False)
    needed: Floats = field(init=False)  #: Requests per second, by class.
    demands: Floats = field(init=False)  #: How many there are, by class.
    most_pieces: list[int] = field(init=False)  #: That one replica serves, by class.
    _columns: dict[_Column, PressureBox] = field(default_factory=dict)
    #: Ways to split a demand, by class: how often so many pieces of it are served.
    _splits: list[list[dict[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.boxes = [box for kind in self.kinds for box in root_boxes(kind, _COUNTS)]
        numbers = number_classes(self.problem, self.segments)
        self.needed, self.demands = np.zeros(len(numbers)), np.zeros(len(numbers))
        for demand in self.problem.demands:
            group = numbers[self.segments.first_alike(demand.model)]
            self.needed[group] += demand.rate_rps
            self.demands[group] += 1.0
        most = np.ones(len(numbers), dtype=np.int64)
        for box in self.boxes:
            np.maximum.at(most, box.kind.classes, box.pieces)
        self.most_pieces = most.tolist()
        self._splits = [list(_list_splits(own)) for own in self.most_pieces]

    def raise_bound(self, gpus: Sequence[PlacedGpu], limit: Limit) -> float:
        """Return the highest bound that was found in time."""
        for number, kind in enumerate(self.kinds):
            self._begin(number, kind)
            own = [gpu for gpu in gpus if gpu.device == self.problem.fleet.entries[number].device.name]
            self._add_known(number, own)
        highest, weight, whole = 0.0, 0.0, False
        centre = Worths(np.zeros(len(self.needed)), np.zeros((len(self.needed), PIECES + 1)))
        for _ in range(_MOST_ROUNDS):
            solved = self._solve(limit, whole=whole)
            if solved is None:
                break
            duals, used = solved
            worths = centre.mix(duals, weight)
            for box in self.boxes:
                box.evaluate(worths, box.kind.price)
                if limit.is_over:
                    return highest
            worths = worths.scale(1.0 / max(1.0, *(box.value / box.kind.price for box in self.boxes)))
            if (bound := self._bound(worths)) > highest:
                highest, centre = bound, worths
            added = self._add_worth(duals)
            split = self._split(used)
            if not whole and self._bound(duals) < highest * (1.0 + _NEAR):
                whole = True
            elif not added and not split and not weight:
                break
            weight = _STABLE if added else 0.0
        return highest

    def _bound(self, worths: Worths) -> float:
        """Return what all demands are worth at least, whichever replicas serve them."""
        whole = [self._cheapest_split(group, worths.of_pieces[group])[0] for group in range(len(self.needed))]
        return float(worths.per_rps @ self.needed + np.array(whole) @ self.demands)

    def _cheapest_split(self, group: int, worth: Floats) -> tuple[float, dict[int, int]]:
        """Return which pieces serve a demand and are worth least, how often each, and what they are worth."""
        least, chosen = np.zeros(PIECES + 1), np.zeros(PIECES + 1, dtype=np.int64)
        sizes = np.arange(1, self.most_pieces[group] + 1)
        for total in range(1, PIECES + 1):
            reached = least[np.maximum(total - sizes, 0)] + worth[sizes]
            best = int(reached.argmin())
            least[total], chosen[total] = reached[best], sizes[best]
        split: Counter[int] = Counter()
        left = PIECES
        while left > 0:
            split[int(chosen[left])] += 1
            left -= int(chosen[left])
        return float(least[PIECES]), dict(split)

    def _begin(self, number: int, kind: KindTable) -> None:
        """Add what serves most of each class alone, so that the program has a solution where there is one."""
        alone = kind.most_rps(1, np.zeros(kind.table.pressures.shape[1]))
        for group in range(len(self.needed)):
            own = np.flatnonzero((kind.classes == group) & (alone > 0.0))
            if len(own):
                self._add(number, (int(own[alone[own].argmax()]),))

    def _add_known(self, number: int, gpus: Sequence[PlacedGpu]) -> None:
        """Add what stands on the devices of a known map."""
        indices = {workload: index for index, workload in enumerate(self.kinds[number].workloads)}
        for gpu in gpus:
            standing = [replace(one.workload, model=self.segments.first_alike(one.model)) for one in gpu.replicas()]
            if all(one in indices for one in standing):
                self._add(number, tuple(sorted(indices[one] for one in standing)))

    def _add(self, number: int, items: Items) -> None:
        kind = self.kinds[number]
        sums = kind.sum_pressures(items).tolist()
        box = next((one for one in self.boxes if one.kind is kind and one.holds(len(items), sums)), None)
        if box is not None:
            self._columns[number, items] = box

    def _add_worth(self, duals: Worths) -> int:
        """Add what is worth more than its device, and return how much that is."""
        before = len(self._columns)
        for box in self.boxes:
            worth = float(duals.of_workloads(box, np.array(box.items, dtype=np.int64)).sum())
            if box.items and worth > box.kind.price * (1.0 + _TOLERANCE):
                self._add(self.kinds.index(box.kind), box.items)
        return len(self._columns) - before

    def _solve(self, limit: Limit, *, whole: bool) -> tuple[Worths, list[_Column]] | None:
        """Return what replicas of each class are worth, and the columns that are taken, most first.

        Ways to split a demand are added until none is worth less than the program says that a demand is.
        """
        for _ in range(_MOST_SPLITTINGS):
            program, rows = self._make_program(whole=whole)
            solution = program.solve(relaxed=True, time_limit_s=limit.left_s, seed=self.problem.options.seed)
            if solution is None or not solution.proven:
                return None
            duals = np.maximum(0.0, np.array(solution.duals))
            # Whatever is worth more pieces is worth as much.
            of_pieces = np.maximum.accumulate(duals[rows.pieces], axis=1)
            of_pieces[:, 0] = 0.0
            taken = zip(self._columns, solution.values, strict=False)
            used = sorted(((value, column) for column, value in taken if value > 1e-9), reverse=True)
            if not whole or not self._add_splits(of_pieces, duals[rows.demands]) or limit.is_over:
                break
        return Worths(duals[rows.rates], of_pieces), [column for _, column in used]

    def _add_splits(self, of_pieces: Floats, demands: Floats) -> int:
        """Add the ways to split a demand that are worth less than the demand, and return how many there are."""
        added = 0
        for group, (worths, demand) in enumerate(zip(of_pieces, demands, strict=True)):
            worth, split = self._cheapest_split(group, worths)
            if worth < demand * (1.0 - _TOLERANCE) and split not in self._splits[group]:
                self._splits[group].append(split)
                added += 1
        return added

    def _make_program(self, *, whole: bool) -> tuple[Program, _Rows]:
        """Return the program: first its columns for devices, in their order; with whole demands or without."""
        program, classes = Program(), range(len(self.needed))
        rows = _Rows(
            np.array([program.row(low=float(needed)) for needed in self.needed]),
            np.array([[program.row(low=0.0) for _ in range(PIECES + 1)] for _ in classes]),
            np.array([program.row(low=float(count) * whole) for count in self.demands]),
        )
        for (number, items), box in self._columns.items():
            own = list(items)
            entries: defaultdict[int, float] = defaultdict(float)
            for group, rate, pieces in zip(box.kind.classes[own], box.rates[own], box.pieces[own], strict=True):
                if rate > 0.0:
                    entries[int(rows.rates[group])] += float(rate)
                if rate > 0.0 and whole:
                    entries[int(rows.pieces[group, pieces])] += 1.0
            program.column(self.kinds[number].price, entries, integer=False)
        for group in classes if whole else ():
            for split in self._splits[group]:
                takes = {int(rows.pieces[group, pieces]): -float(count) for pieces, count in split.items()}
                program.column(0.0, {int(rows.demands[group]): 1.0, **takes}, integer=False)
            for pieces in range(2, self.most_pieces[group] + 1):  # whoever serves more pieces serves one less
                larger, smaller = (int(row) for row in rows.pieces[group, [pieces, pieces - 1]])
                program.column(0.0, {larger: -1.0, smaller: 1.0}, integer=False)
        return program, rows

    def _split(self, used: Sequence[_Column]) -> int:
        """Split boxes that say too much of what the program uses, and those worth most; return how many."""
        most = sorted(self.boxes, key=lambda box: -box.value / box.kind.price)[:_MOST_SPLIT]
        worst = [(box, box.items) for box in most if box.value > box.kind.price * (1.0 + _TOLERANCE)]
        taken = [(self._columns[column], column[1]) for column in used]
        split: set[int] = set()
        for box, items in (*worst[: _MOST_SPLIT // 3], *taken):
            if len(split) >= _MOST_SPLIT or len(self.boxes) >= _MOST_BOXES:
                break
            halves = box.split(items) if items and id(box) not in split else None
            if halves is not None:
                split.add(id(box))
                self._replace_box(box, halves)
        return len(split)

    def _replace_box(self, box: PressureBox, halves: tuple[PressureBox, PressureBox]) -> None:
        self.boxes.remove(box)
        self.boxes.extend(halves)
        for column, where in self._columns.items():
            if where is box:
                inside = halves[0].holds(len(column[1]), box.kind.sum_pressures(column[1]).tolist())
                self._columns[column] = halves[0] if inside else halves[1]


def _list_splits(most: int) -> Iterator[dict[int, int]]:
    """Yield ways to serve a demand by so many pieces at most: by one size, or by one piece of each of two sizes."""
    for pieces in range(1, most + 1):
        yield {pieces: -(-PIECES // pieces)}
        if PIECES - most <= pieces < PIECES - pieces:
            yield {pieces: 1, PIECES - pieces: 1}
