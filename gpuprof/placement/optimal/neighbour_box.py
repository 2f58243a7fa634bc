"""Upper bounds of what a device serves, by the number of its replicas and the sums of their pressures.

A box holds all devices of a kind on which the number of replicas and the sum of each pressure lie between two ends. As
fewer replicas and less pressure make nothing slower, none of them is quicker there than at the lower ends, and what all
of them could then serve together is a knapsack over shares; that the sums stay below the upper ends is relaxed with
multipliers (Lagrange), which any value of them leaves a bound.

What a replica is worth is the sum of two: what its rate is, and what the pieces of its demand are that it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpuprof.domain.estimate import Workload
from gpuprof.domain.interference_table import Floats, Integers, InterferenceTable

#: What stands on a device: indices of workloads, rising.
Items = tuple[int, ...]

#: That replicas of a demand have at least, by `count_pieces`: two of 49% serve no demand, though almost as much.
PIECES = 37
#: Part of a piece that counts for nothing; more than the check of a map lets demands and rates be missed by.
_NOTHING = 1e-3
#: Steps of the multipliers (Polyak's rule) before a box is taken as it is.
_MOST_STEPS = 12
#: Relative tolerance of times and rates beyond that of the check of a map.
_SLACK = 1e-8
#: How often the end of two halves of a box is looked for.
_BISECTIONS = 6
#: The smaller half is at least this part of a box.
_EDGE = 0.2
#: Boxes that say too much by less than this part are not split.
_LITTLE = 5e-4


_ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class KindTable:
    """The workloads of all classes on one kind of device, smallest share first."""

    price: float
    workloads: Sequence[Workload]
    table: InterferenceTable
    sizes: Integers  #: Shares in equal units, rounded down.
    space: int  #: The whole device in these units.
    classes: Integers  #: Number of its class, by workload.
    requests: Floats  #: In all processes' batches, by workload.
    budgets_ms: Floats  #: What a batch must stay below.
    rates_rps: Floats  #: What the demands of the class ask for each, which no replica exceeds.
    most: int  #: Replicas on one device.

    def most_rps(self, count: int, totals: Floats, rows: Integers | slice = _ALL) -> Floats:
        """Return the most that some workloads serve each beside ``count`` replicas with at least these pressures."""
        table = self.table if rows is _ALL else self.table.take(np.asarray(rows))
        latency, occupied = table.least_times_ms(count, totals)
        rates = np.minimum(self.rates_rps[rows], 1000.0 * self.requests[rows] / occupied * (1.0 + _SLACK))
        return np.where(latency * (1.0 - _SLACK) < self.budgets_ms[rows], rates, 0.0)

    def take(self, rows: Integers) -> KindTable:
        """Return the table of some of the workloads."""
        return replace(
            self,
            workloads=[self.workloads[row] for row in rows.tolist()],
            table=self.table.take(rows),
            sizes=self.sizes[rows],
            classes=self.classes[rows],
            requests=self.requests[rows],
            budgets_ms=self.budgets_ms[rows],
            rates_rps=self.rates_rps[rows],
        )

    def sum_pressures(self, items: Items) -> Floats:
        """Return the sums of the pressures of what stands on a device."""
        return np.asarray(self.table.pressures[list(items)].sum(axis=0), dtype=float)


@dataclass(frozen=True, slots=True, eq=False)
class DualPrices:
    """Dual prices: of the rate that a replica serves, and of the pieces of a demand that this makes, rounded up."""

    per_rps: Floats  #: By class.
    of_pieces: Floats  #: By class, and by the number of pieces, from none on; never falling.

    def of_workloads(self, box: PressureBox, rows: Integers) -> Floats:
        """Return what some workloads are worth at most in a box."""
        classes = box.kind.classes[rows]
        return self.per_rps[classes] * box.rates[rows] + self.of_pieces[classes, box.pieces[rows]]

    def mix(self, other: DualPrices, weight: float) -> DualPrices:
        """Return the average with other worths, these by their weight."""
        kept = (1.0 - weight) * other.per_rps, (1.0 - weight) * other.of_pieces
        return DualPrices(weight * self.per_rps + kept[0], weight * self.of_pieces + kept[1])

    def scale(self, factor: float) -> DualPrices:
        """Return the prices times ``factor``."""
        return DualPrices(factor * self.per_rps, factor * self.of_pieces)


def count_pieces(fractions: Floats) -> Integers:
    """Return how many pieces replicas count for that serve parts of a demand: those that serve all of it `PIECES`.

    With N = PIECES - 1, a part f counts for floor(N f) + 1, which is more than N f, so that parts that make a demand
    count for more than N. Two that are just below a half count for N, and show that they make none.
    """
    counts = np.floor((PIECES - 1) * fractions + _NOTHING) + 1.0
    return np.where(fractions > 0.0, np.minimum(counts, PIECES), 0.0).astype(np.int64)


@dataclass(slots=True, eq=False)
class PressureBox:
    """The devices of a kind with ``count`` to ``most`` replicas, and sums of pressures between two ends."""

    kind: KindTable
    count: int
    most: int
    low: Floats
    high: Floats
    multipliers: Floats
    rates: Floats = field(init=False)  #: What each workload serves at most here.
    pieces: Integers = field(init=False)  #: Of its demand that each workload serves at most here.
    value: float = 0.0  #: What no device of the box serves more than, at the worths that were asked for last.
    items: Items = ()  #: What that was found for; it need not lie in the box.
    halves: tuple[PressureBox, ...] = ()  #: Two that hold all that this one does, once it is split.
    highs: tuple[float, ...] = field(init=False)  #: ``high``, quick to compare with.
    _rows: Integers = field(init=False)  #: The workloads that serve anything here and that no other may stand for.
    #: Theirs: pressures; classes, pieces and sizes; rates.
    _serving: tuple[Floats, Integers, Floats] = field(init=False)

    def __post_init__(self) -> None:
        rates = self.kind.most_rps(self.count, self.low)
        # Whoever alone presses more than the upper end is not here.
        self.rates = np.where(np.any(self.kind.table.pressures > self.high, axis=1), 0.0, rates)
        self.pieces = count_pieces(self.rates / self.kind.rates_rps)
        self.highs = tuple(self.high.tolist())
        self._rows = rows = self._list_useful()
        pressures = np.ascontiguousarray(self.kind.table.pressures[rows], dtype=float)
        numbers = np.stack([self.kind.classes[rows], self.pieces[rows], self.kind.sizes[rows]])
        self._serving = pressures, numbers, self.rates[rows]

    def _list_useful(self) -> Integers:
        """Return the workloads that serve anything here and that no other may stand for."""
        from gpuprof.placement.optimal.box_kernel import find_undominated  # numba takes long to import

        rows = np.flatnonzero(self.rates > 0.0)
        if not len(rows):
            return rows
        kind, kept = self.kind, np.empty(len(rows), dtype=np.int64)
        pressures = np.ascontiguousarray(kind.table.pressures[rows], dtype=float)
        number = find_undominated(kind.classes[rows], kind.sizes[rows], self.rates[rows], pressures, kept)
        return rows[kept[:number]]

    def find(self, items: Items) -> PressureBox:
        """Return the smallest box within this one that a device with these replicas belongs to."""
        box, sums = self, self.kind.sum_pressures(items).tolist()
        while box.halves:
            first, second = box.halves
            fits = len(items) <= first.most and all(own <= high for own, high in zip(sums, first.highs, strict=True))
            box = first if fits else second
        return box

    def evaluate(self, worths: DualPrices, goal: float) -> None:
        """Find what no device of the box is worth more than; to be below the goal is good enough."""
        from gpuprof.placement.optimal.box_kernel import bound_box  # numba takes long to import

        steps = np.array([*self.multipliers, _MOST_STEPS, goal])
        packing = np.array([self.kind.space, self.count, self.most], dtype=np.int64)
        items = np.zeros(self.most, dtype=np.int64)
        self.value, number = bound_box(
            worths.per_rps, worths.of_pieces, *self._serving, self.high, packing, steps, items
        )
        self.items = tuple(sorted(self._rows[items[:number]].tolist()))
        self.multipliers = steps[:-2]

    def split(self, items: Items) -> bool:
        """Cut the box in halves where it says too much of ``items``; whether it does, wherever it is cut."""
        sums = np.minimum(self.kind.sum_pressures(items), self.high)
        now = self._serve(items, self.low)
        losses = []
        for pressure in range(len(sums)):
            losses.append(now - self._serve(items, _replace(self.low, pressure, sums[pressure])))
        pressure = int(np.argmax(losses))
        number = min(len(items), self.most)
        of_count = now - self._serve(items, self.low, number) if number > self.count else 0.0
        if max(losses[pressure], of_count) <= _LITTLE * now:
            return False
        if of_count >= losses[pressure]:
            self._cut_counts((self.count + number + 1) // 2)
            return True
        # Where half of that is lost: up to there the one half says too much, from there the other.
        low, high = self.low[pressure], sums[pressure]
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            lost = now - self._serve(items, _replace(self.low, pressure, middle))
            low, high = (middle, high) if lost < losses[pressure] / 2.0 else (low, middle)
        if np.isfinite(self.high[pressure]):  # halves that are hardly smaller would be split for ever
            edge = _EDGE * (self.high[pressure] - self.low[pressure])
            high = min(max(high, self.low[pressure] + edge), self.high[pressure] - edge)
        self._cut_pressure(pressure, high)
        return True

    def _cut_counts(self, first: int) -> None:
        """Cut the box in devices with fewer replicas than ``first``, and with so many or more."""
        ranges = (self.count, first - 1), (first, self.most)
        self.halves = tuple(
            PressureBox(self.kind, *counts, self.low, self.high, self.multipliers.copy()) for counts in ranges
        )

    def _cut_pressure(self, pressure: int, end: float) -> None:
        """Cut the box in devices whose sum of a pressure reaches up to ``end``, and those with more."""
        ends = (self.low, _replace(self.high, pressure, end)), (_replace(self.low, pressure, end), self.high)
        self.halves = tuple(
            PressureBox(self.kind, self.count, self.most, *pair, self.multipliers.copy()) for pair in ends
        )

    def _serve(self, items: Items, totals: Floats, count: int | None = None) -> float:
        """Return what part of what their classes ask for the items serve, exactly and in whole pieces, added up.

        ``count``: beside so many, the fewest of the box where it is left out.
        """
        rows = np.array(items, dtype=np.int64)
        exact = self.kind.most_rps(count or self.count, totals, rows) / self.kind.rates_rps[rows]
        return float((exact + count_pieces(exact) / PIECES).sum() / 2.0)


def root_boxes(kind: KindTable, counts: Sequence[int]) -> list[PressureBox]:
    """Return boxes that hold all devices of a kind, one for each count; the last holds those of more as well."""
    pressures = kind.table.pressures.shape[1]
    boxes = []
    for count in counts:
        most = kind.most if count == counts[-1] else count
        ends = np.zeros(pressures), np.full(pressures, np.inf)
        boxes.append(PressureBox(kind, count, most, *ends, np.zeros(pressures)))
    return boxes


def compile_kernel() -> None:
    """Compile the machine code of `PressureBox.evaluate`, or load it: with arrays of the types that it is given."""
    from gpuprof.placement.optimal.box_kernel import bound_box, find_undominated

    floats, numbers = np.zeros(1), np.zeros((3, 1), dtype=np.int64)
    steps, packing = np.array([0.0, 1.0, 1.0]), np.array([1, 1, 1], dtype=np.int64)
    table = np.zeros((1, 1))
    bound_box(floats, table, table, numbers, floats, floats, packing, steps, np.zeros(1, dtype=np.int64))
    find_undominated(numbers[0], numbers[0], floats, table, np.zeros(1, dtype=np.int64))


def _replace(values: Floats, position: int, value: float) -> Floats:
    replaced = values.copy()
    replaced[position] = value
    return replaced
