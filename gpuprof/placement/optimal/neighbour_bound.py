"""A lower bound on what demands cost that knows that neighbours slow one another.

The program has a column for what could stand on a device, and a row for each class of demands that are alike: their
rates must be served, by whatever replicas. Its dual gives each class a worth per request per second. Where no device
can serve more worth than it costs, no map is cheaper than what all demands are worth: a map's devices serve all of the
demands, and each device at most what it costs. Where some can, all worths are scaled down until none can (Farley 1990).

That none can is shown box by box (`neighbour_box`): each replica on a device of a box serves no more than its workload
does at the least pressure of the box, no more than its demand asks for, and nothing where it is too late even then;
shares add up to a whole device at most. Memory, numbers of devices and of replicas are left out: a relaxation. Boxes
are split where the program rests on devices of which they say too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpuprof.domain.interference_table import Floats
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.kind_table import number_classes, tabulate_kinds
from gpuprof.placement.optimal.neighbour_box import Items, KindTable, PressureBox, root_boxes
from gpuprof.placement.placement import PlacedGpu
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Program
from gpuprof.placement.segment import Segments

#: Replicas on a device that are told apart by their number; the last stands for more as well.
_COUNTS = tuple(range(1, 10))
_MOST_ROUNDS = 80
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


@dataclass(slots=True)
class _NeighbourBound:
    """The program over what could stand on devices, and the boxes that bound it."""

    problem: Problem
    segments: Segments
    kinds: Sequence[KindTable]
    boxes: list[PressureBox] = field(init=False)
    needed: Floats = field(init=False)  #: Requests per second, by class.
    _columns: dict[_Column, PressureBox] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.boxes = [box for kind in self.kinds for box in root_boxes(kind, _COUNTS)]
        numbers = number_classes(self.problem, self.segments)
        self.needed = np.zeros(len(numbers))
        for demand in self.problem.demands:
            self.needed[numbers[self.segments.first_alike(demand.model)]] += demand.rate_rps

    def raise_bound(self, gpus: Sequence[PlacedGpu], limit: Limit) -> float:
        """Return the highest bound that was found in time."""
        for number, kind in enumerate(self.kinds):
            self._begin(number, kind)
            own = [gpu for gpu in gpus if gpu.device == self.problem.fleet.entries[number].device.name]
            self._add_known(number, own)
        highest, centre, weight = 0.0, np.zeros(len(self.needed)), 0.0
        for _ in range(_MOST_ROUNDS):
            solved = self._solve(limit)
            if solved is None:
                break
            duals, used = solved
            worths = weight * centre + (1.0 - weight) * duals
            for box in self.boxes:
                box.evaluate(worths, box.kind.price)
                if limit.is_over:
                    return highest
            worths = worths / max(1.0, *(box.value / box.kind.price for box in self.boxes))
            if float(worths @ self.needed) > highest:
                highest, centre = float(worths @ self.needed), worths
            added = self._add_worth(duals)
            split = self._split(used)
            if not added and not split and not weight:
                break
            weight = _STABLE if added else 0.0
        return highest

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
        sums = kind.sum_pressures(items)
        box = next((one for one in self.boxes if one.kind is kind and one.holds(items, sums)), None)
        if box is not None:
            self._columns[number, items] = box

    def _add_worth(self, duals: Floats) -> int:
        """Add what is worth more than its device, and return how much that is."""
        before = len(self._columns)
        for box in self.boxes:
            worth = float((duals[box.kind.classes[list(box.items)]] * box.rates[list(box.items)]).sum())
            if box.items and worth > box.kind.price * (1.0 + _TOLERANCE):
                self._add(self.kinds.index(box.kind), box.items)
        return len(self._columns) - before

    def _solve(self, limit: Limit) -> tuple[Floats, list[_Column]] | None:
        """Return what requests of each class are worth, and the columns that are taken, most first."""
        program = Program()
        rows = [program.row(low=float(needed)) for needed in self.needed]
        for (number, items), box in self._columns.items():
            served = np.bincount(
                box.kind.classes[list(items)], weights=box.rates[list(items)], minlength=len(self.needed)
            )
            entries = {rows[group]: float(rate) for group, rate in enumerate(served) if rate > 0.0}
            program.column(self.kinds[number].price, entries, integer=False)
        solution = program.solve(relaxed=True, time_limit_s=limit.left_s, seed=self.problem.options.seed)
        if solution is None or not solution.proven:
            return None
        worths = np.maximum(0.0, np.array([solution.duals[row] for row in rows]))
        taken = zip(self._columns, solution.values, strict=True)
        used = sorted(((value, column) for column, value in taken if value > 1e-9), reverse=True)
        return worths, [column for _, column in used]

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
                inside = halves[0].holds(column[1], box.kind.sum_pressures(column[1]))
                self._columns[column] = halves[0] if inside else halves[1]
