"""What a device could serve at most with so many replicas whose pressures on one another come to so much in sum.

A box holds all devices of a kind on which a certain number of replicas stand and the sum of each pressure lies between
two ends. As less pressure makes nothing slower, none of them is quicker there than at the lower ends, and what all of
them could then serve together is a knapsack over shares; that the sums stay below the upper ends is relaxed with
multipliers (Lagrange), which any value of them leaves a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpuprof.domain.estimate import Workload
from gpuprof.domain.interference_table import Floats, Integers, InterferenceTable

#: What stands on a device: indices of workloads, rising.
Items = tuple[int, ...]

#: Steps of the multipliers (Polyak's rule) before a box is taken as it is.
_MOST_STEPS = 12
#: Times are compared, and rates allowed, so much more generously than whoever checks a map does.
_SLACK = 1e-8
#: How often the end of two halves of a box is looked for.
_BISECTIONS = 6
#: The smaller half is at least this part of a box.
_EDGE = 0.2
#: Boxes that say too much by less than this part are not split.
_LITTLE = 5e-4


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

    def most_rps(self, count: int, totals: Floats) -> Floats:
        """Return what each workload serves at most where so many press at least so much."""
        latency, occupied = self.table.least_times_ms(count, totals)
        rates = np.minimum(self.rates_rps, 1000.0 * self.requests / occupied * (1.0 + _SLACK))
        return np.where(latency * (1.0 - _SLACK) < self.budgets_ms, rates, 0.0)

    def sum_pressures(self, items: Items) -> Floats:
        """Return the sums of the pressures of what stands on a device."""
        return np.asarray(self.table.pressures[list(items)].sum(axis=0), dtype=float)


@dataclass(slots=True, eq=False)
class PressureBox:
    """The devices of a kind with ``count`` replicas, the last count or more, and sums of pressures between two ends."""

    kind: KindTable
    count: int
    most: int  #: ``count``; where it stands for larger ones too, all that a device takes.
    low: Floats
    high: Floats
    multipliers: Floats
    rates: Floats = field(init=False)  #: What each workload serves at most here.
    value: float = 0.0  #: What no device of the box serves more than, at the worths that were asked for last.
    items: Items = ()  #: What that was found for; it need not lie in the box.

    def __post_init__(self) -> None:
        rates = self.kind.most_rps(self.count, self.low)
        # Whoever alone presses more than the upper end is not here.
        self.rates = np.where(np.any(self.kind.table.pressures > self.high, axis=1), 0.0, rates)

    def holds(self, items: Items, sums: Floats) -> bool:
        """Whether a device with these replicas belongs to the box."""
        together = self.count <= len(items) <= self.most
        return together and bool(np.all(self.low <= sums) and np.all(sums <= self.high))

    def evaluate(self, worths: Floats, goal: float) -> None:
        """Find what no device of the box serves more than; to be below the goal is good enough.

        Parameters
        ----------
        worths : ndarray, by class
            What a request per second is worth.
        """
        worth = np.where(self.rates > 0.0, worths[self.kind.classes] * self.rates, -np.inf)
        bounded, pressures = np.isfinite(self.high), self.kind.table.pressures
        highs, self.value = np.where(bounded, self.high, 0.0), np.inf
        units = np.maximum(highs, 1e-300)
        best, length = self.multipliers, 1.0
        for _ in range(_MOST_STEPS):
            items, packed = pack_most(self.kind, worth - pressures @ self.multipliers, (self.count, self.most))
            bound = packed + float(self.multipliers @ highs)
            if not items:  # so many do not fit
                self.value, self.items = -np.inf, ()
                break
            if bound < self.value:
                self.value, self.items, best = bound, items, self.multipliers
            else:
                length /= 2.0
            beyond = np.where(bounded, self.kind.sum_pressures(items) - highs, 0.0)
            step = np.where((self.multipliers > 0.0) | (beyond > 0.0), beyond, 0.0) / units
            if bound <= goal or not step.any():
                break
            step *= length * (bound - goal) / float(step @ step)
            self.multipliers = np.maximum(0.0, self.multipliers + step / units)
        self.multipliers = best

    def split(self, items: Items) -> tuple[PressureBox, PressureBox] | None:
        """Return two boxes that hold all that this one does, cut where it says too much of ``items``.

        None where it says hardly too much, whichever sum is cut.
        """
        sums = np.minimum(self.kind.sum_pressures(items), self.high)
        now = self._serve(items, self.low)
        losses = []
        for pressure in range(len(sums)):
            losses.append(now - self._serve(items, _replace(self.low, pressure, sums[pressure])))
        pressure = int(np.argmax(losses))
        if losses[pressure] <= _LITTLE * now:
            return None
        # Where half of that is lost: up to there the one half says too much, from there the other.
        low, high = self.low[pressure], sums[pressure]
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            lost = now - self._serve(items, _replace(self.low, pressure, middle))
            low, high = (middle, high) if lost < losses[pressure] / 2.0 else (low, middle)
        if np.isfinite(self.high[pressure]):  # halves that are hardly smaller would be split for ever
            edge = _EDGE * (self.high[pressure] - self.low[pressure])
            high = min(max(high, self.low[pressure] + edge), self.high[pressure] - edge)
        ends = (self.low, _replace(self.high, pressure, high)), (_replace(self.low, pressure, high), self.high)
        first, second = (PressureBox(self.kind, self.count, self.most, *pair, self.multipliers.copy()) for pair in ends)
        return first, second

    def _serve(self, items: Items, totals: Floats) -> float:
        """Return what part of what their classes ask for the items serve, added up, those too late left out."""
        rates = self.kind.most_rps(self.count, totals)[list(items)]
        return float((rates / self.kind.rates_rps[list(items)]).sum())


def pack_most(kind: KindTable, worth: Floats, counts: tuple[int, int]) -> tuple[Items, float]:
    """Return what is worth most together on a device and what it is worth; nothing where too few fit.

    Parameters
    ----------
    kind : KindTable
    worth : ndarray, by workload
        Minus infinity where it may not stand there.
    counts : (int, int)
        The fewest and the most replicas.
    """
    starts = np.flatnonzero(np.diff(kind.sizes, prepend=-1))
    best = np.full(kind.space + 1, -np.inf)
    best[kind.sizes[starts]] = np.maximum.reduceat(worth, starts)
    # Of every space: what stands in it and one of each size more.
    spaces = np.arange(kind.space + 1)
    left = spaces[:, None] - spaces[None, :]
    added = np.where(left >= 0, best[None, :], -np.inf)
    tables, chosen = [np.zeros(kind.space + 1)], []
    for number in range(counts[1]):
        candidates = tables[-1][np.maximum(left, 0)] + added
        size = candidates.argmax(axis=1)
        found = candidates[spaces, size]
        better = (found > tables[-1] + 1e-15) | (number < counts[0])
        if not better.any():
            break
        chosen.append(np.where(better, size, -1))
        tables.append(np.where(better, found, tables[-1]))
    if not np.isfinite(tables[-1][kind.space]):
        return (), -np.inf
    items, space = [], kind.space
    for sizes in reversed(chosen):
        if sizes[space] >= 0:
            begin, end = np.searchsorted(kind.sizes, (sizes[space], sizes[space] + 1))
            items.append(int(begin + worth[begin:end].argmax()))
            space -= int(sizes[space])
    return tuple(sorted(items)), float(tables[-1][kind.space])


def root_boxes(kind: KindTable, counts: Sequence[int]) -> list[PressureBox]:
    """Return boxes that hold all devices of a kind, one for each count; the last holds those of more as well."""
    pressures = kind.table.pressures.shape[1]
    boxes = []
    for count in counts:
        most = kind.most if count == counts[-1] else count
        ends = np.zeros(pressures), np.full(pressures, np.inf)
        boxes.append(PressureBox(kind, count, most, *ends, np.zeros(pressures)))
    return boxes


def _replace(values: Floats, position: int, value: float) -> Floats:
    replaced = values.copy()
    replaced[position] = value
    return replaced
