"""Pricing of patterns where neighbours act through sums: thousands of combinations of parts are planned at once.

The content of a device is a row of parts, each with an option: a share and a batch that do its task alone. Options are
ordered by share, then by batch. Beside neighbours, a late part takes a larger share, and a part serving too little
the next batch, until all are in time and serve their rates, or the device is full. As less pressure makes nothing
slower, combinations with another part begin with the options they had without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.interference_table import Floats, Integers
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.kind_table import KindTable
from gpuprof.placement.optimal.pattern import SPACE, share_units
from gpuprof.placement.segment import Segments

#: Maximum number of combinations of each number of parts in a pricing round, those of the highest possible worth.
_MOST_PLANNED = 1_000
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, order=True)
class DemandPart:
    """A replica serving an equal part of a demand of a class."""

    model: str  #: The first demand of the class.
    divisor: int = 1  #: Number of equal replicas serving the demand.


@dataclass(frozen=True, slots=True)
class PricedParts:
    """Parts that keep their SLOs together on a device."""

    worth: float
    parts: tuple[DemandPart, ...]
    workloads: tuple[Workload, ...]  #: By part.


@dataclass(slots=True)
class TablePricing:
    """Finds the most valuable combinations of parts on a kind of device."""

    kind: KindTable
    parts: Sequence[DemandPart]
    rates_rps: Floats  #: By part.
    classes: Integers  #: Number of the part's class in ``kind``, by part.
    units: Integers  #: Shares in parts of `SPACE`, by workload of ``kind``.
    memory_bytes: Floats  #: Memory of all processes, by workload of ``kind``.
    capacity_bytes: float
    _rows: Integers = field(init=False)  #: The options of all parts, part by part: numbers of workloads.
    _larger: Integers = field(init=False)  #: The first option of the part with a larger share, by option.
    _starts: Integers = field(init=False)  #: The first option of each part.
    _ends: Integers = field(init=False)  #: The end of each part's options (exclusive).

    def __post_init__(self) -> None:
        kind = self.kind
        latency, occupied = kind.table.least_times_ms(1, np.zeros(kind.table.pressures.shape[1]))
        served = 1000.0 * kind.requests / occupied
        able = (latency < kind.budgets_ms) & (self.memory_bytes <= self.capacity_bytes)
        rows, larger, ends = [], [], [0]
        for rate, own in zip(self.rates_rps, self.classes, strict=True):
            options = np.flatnonzero(able & (kind.classes == own) & (served >= rate))
            options = options[np.lexsort((kind.requests[options], self.units[options]))]
            sizes = self.units[options]
            rows.append(options)
            larger.append(ends[-1] + np.searchsorted(sizes, sizes, side="right"))
            ends.append(ends[-1] + len(options))
        self._rows, self._larger = np.concatenate(rows), np.concatenate(larger)
        self._starts, self._ends = np.array(ends[:-1]), np.array(ends[1:])

    def least_units(self) -> Integers:
        """Return the least share each part takes, in parts of `SPACE`; more than `SPACE` where none suffices."""
        known = self._starts < self._ends
        first = self._rows[np.minimum(self._starts, max(len(self._rows) - 1, 0))] if len(self._rows) else 0
        return np.where(known, self.units[first], SPACE + 1)

    def list_alone(self) -> Iterator[PricedParts]:
        """Yield each part some workload serves alone, with the workload of the least share."""
        for part, start, end in zip(self.parts, self._starts, self._ends, strict=True):
            if start < end:
                yield PricedParts(0.0, (part,), (self.kind.workloads[self._rows[start]],))

    def price(self, worths: Mapping[DemandPart, float], cost: float, limit: Limit) -> Iterator[PricedParts]:
        """Yield combinations of parts that are worth more than their cost, most valuable first.

        Breadth first: for each number of parts, the combinations of the highest possible worth are evaluated. The worth
        of the free share is bounded by the part with the highest worth per share.
        """
        least = self.least_units()
        worth = np.array([max(0.0, worths.get(part, 0.0)) for part in self.parts])
        density = worth / least
        order = np.array([one for one in np.argsort(-density, kind="stable") if worth[one] > _EPSILON], dtype=np.int64)
        order = order[least[order] <= SPACE]
        goal = cost * (1.0 + _EPSILON) + _EPSILON
        # Ranks by falling density, so that an added part is worth no more for its share than the present parts.
        standing, options = np.zeros((1, 0), dtype=np.int64), np.zeros((1, 0), dtype=np.int64)
        found: list[tuple[float, Integers, Integers]] = []
        while len(standing) and not limit.is_over:
            standing, options = self._extend(order, worth, goal, (standing, options))
            values = worth[order[standing]].sum(axis=1)
            found += [(float(values[one]), standing[one], options[one]) for one in np.flatnonzero(values > goal)]
        for value, ranks, chosen in sorted(found, key=lambda one: -one[0]):
            parts = tuple(self.parts[order[rank]] for rank in ranks)
            yield PricedParts(value, parts, tuple(self.kind.workloads[self._rows[one]] for one in chosen))

    def _extend(
        self, order: Integers, worth: Floats, goal: float, known: tuple[Integers, Integers]
    ) -> tuple[Integers, Integers]:
        """Return the feasible combinations with another part, as ranks and options."""
        standing, options = known
        least = self.least_units()[order]
        density = worth[order] / least
        taken = self.units[self._rows[options]].sum(axis=1)
        values = worth[order[standing]].sum(axis=1)
        last = standing[:, -1] if standing.shape[1] else np.zeros(len(standing), dtype=np.int64)
        ranks = np.arange(len(order))
        left = SPACE - taken[:, None] - least[None, :]
        reach = values[:, None] + worth[order][None, :] + left * density[None, :]
        base, added = np.nonzero((ranks[None, :] >= last[:, None]) & (left >= 0) & (reach > goal))
        if len(base) > _MOST_PLANNED:
            best = np.argpartition(-reach[base, added], _MOST_PLANNED)[:_MOST_PLANNED]
            base, added = base[best], added[best]
        standing = np.concatenate([standing[base], added[:, None]], axis=1)
        options = np.concatenate([options[base], self._starts[order[added]][:, None]], axis=1)
        kept = self._settle(order[standing], options)
        return standing[kept], options[kept]

    def _settle(self, parts: Integers, options: Integers) -> npt.NDArray[np.bool_]:
        """Raise the options, in place, until all parts of a combination are served; return the feasible
        combinations.
        """
        kind, count = self.kind, parts.shape[1]
        kept, active = np.ones(len(parts), dtype=bool), np.arange(len(parts))
        while len(active):
            now, own = options[active], parts[active]
            rows = self._rows[now]
            totals = kind.table.pressures[rows].sum(axis=1)
            times = kind.table.take(rows.ravel()).least_times_ms(count, np.repeat(totals, count, axis=0).T)
            latency, occupied = (one.reshape(-1, count) for one in times)
            late = latency >= kind.budgets_ms[rows]
            short = 1000.0 * kind.requests[rows] / occupied < self.rates_rps[own]
            raised = np.where(late, self._larger[now], np.where(short, now + 1, now))
            full = (self.units[rows].sum(axis=1) > SPACE) | (count > kind.most)
            full |= self.memory_bytes[rows].sum(axis=1) > self.capacity_bytes
            full |= (raised >= self._ends[own]).any(axis=1)
            kept[active[full]] = False
            options[active] = np.where(full[:, None], now, raised)
            active = active[(raised != now).any(axis=1) & ~full]
        return kept


def make_table_pricing(
    segments: Segments, device: Device, kind: KindTable, parts: Sequence[DemandPart], classes: Sequence[int]
) -> TablePricing:
    """Return the pricing of parts on a kind of device.

    Parameters
    ----------
    segments : Segments
    device : Device
    kind : KindTable
        Of the device.
    parts : sequence of DemandPart
    classes : sequence of int
        Number in ``kind`` of the class of each part.
    """
    demands = [segments.problem.demand(part.model) for part in parts]
    return TablePricing(
        kind=kind,
        parts=parts,
        rates_rps=np.array([one.rate_rps / part.divisor for part, one in zip(parts, demands, strict=True)]),
        classes=np.array(classes, dtype=np.int64),
        units=np.array([share_units(one.share) for one in kind.workloads], dtype=np.int64),
        memory_bytes=_list_memory(segments, device, kind),
        capacity_bytes=float(device.dram_bytes),
    )


def _list_memory(segments: Segments, device: Device, kind: KindTable) -> Floats:
    """Return the memory of all workloads; 0 for a class whose first, middle and last workloads have no known memory."""
    memory = np.zeros(len(kind.workloads))

    def ask(row: int) -> float:
        return float(segments.memory_bytes(segments.estimate(device, kind.workloads[row])) or 0)

    for number in np.unique(kind.classes):
        rows = np.flatnonzero(kind.classes == number).tolist()
        if any(ask(row) for row in (rows[0], rows[len(rows) // 2], rows[-1])):
            memory[rows] = [ask(row) for row in rows]
    return memory
