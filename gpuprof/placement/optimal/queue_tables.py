"""What parts of demands may run as by queues, in tables: how long a batch may take beside neighbours under each share.

Neighbours make batches of all sizes longer, small ones by other parts than large ones. Times are taken to grow as they
do beside a few neighbours that fill the device: a replica counts as in time as long as its full batch takes no longer
than where the times of all its batches, those beside such neighbours scaled by one factor, are just in time. Whoever
plans with it asks the queues of the partitions that it chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.interference_table import Floats, tabulate_interference
from gpuprof.domain.model_queues import queue_of
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import BatchServer, QuickQueueModel
from gpuprof.placement.bin import MPS_CLIENTS
from gpuprof.placement.optimal.class_program import DemandPart
from gpuprof.placement.optimal.neighbour_box import KindTable
from gpuprof.placement.optimal.partition_planner import PartitionPlanner
from gpuprof.placement.optimal.pattern import SPACE, share_units
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Larger batches in turn that are best under no share, after which no more are looked at.
_MOST_IN_VAIN = 2
#: How well the longest time of a batch is found, from below, in how many questions.
_PRECISION, _MOST_ASKED = 4e-3, 12
#: Logarithm of the ratio of what may be late to what is, below which that is as good as equal.
_NEARLY = 0.04
#: How far from a guess the longest time is looked for next, relative.
_STEP = 0.04
#: Parts of the SLO and of the requests that may be late that are counted on: nearer to them queues take long to tell.
_OF_SLO, _OF_LATE = 0.995, 0.97
_LEAST_PART = 1e-9
#: Replicas on a device, by whose number and share of it times are taken to grow.
_USUAL = 3


@dataclass(frozen=True, slots=True)
class _Grid:
    """Times of a model on a kind of device, in ms."""

    percents: Sequence[float]  #: Shares, rising.
    sizes: Sequence[int]  #: Batches to choose from, rising.
    alone_ms: Floats  #: Times of batches of 1, 2, … up to the largest, by share.
    beside_ms: Floats  #: The same beside as many neighbours as are usual.


@dataclass(slots=True)
class QueueTables:
    """The tables of one problem."""

    problem: Problem  #: Without a latency budget; queues tell at once who is late.
    segments: Segments  #: Of the same problem.
    _planner: PartitionPlanner = field(init=False)
    _grids: dict[tuple[str, str], _Grid | None] = field(default_factory=dict)
    _known: dict[tuple[str, DemandPart], Sequence[tuple[Workload, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._planner = PartitionPlanner(self.problem, self.segments)

    def tabulate(self, entry: FleetEntry, parts: Sequence[DemandPart]) -> KindTable | None:
        """Return the workloads of the parts, each a class by its number; None where no sums are told.

        Under each share a part has the batch that may become longest beside neighbours.
        """
        rows = [(number, *one) for number, part in enumerate(parts) for one in self._list_known(entry, part)]
        rows.sort(key=lambda row: row[1].share.sm_pct)
        workloads = [workload for _, workload, _ in rows]
        table = tabulate_interference(self.problem.estimator, entry.device, workloads) if rows else None
        if table is None:
            return None
        rates = [parts[number].fraction * self.problem.demand(parts[number].model).rate_rps for number, _, _ in rows]
        return KindTable(
            price=entry.price_per_hour,
            workloads=workloads,
            table=table,
            sizes=np.array([share_units(one.share) for one in workloads], dtype=np.int64),
            space=SPACE,
            classes=np.array([number for number, _, _ in rows], dtype=np.int64),
            requests=np.array([float(one.batch) for one in workloads]),
            budgets_ms=np.array([longest for _, _, longest in rows]),
            rates_rps=np.array(rates),
            most=MPS_CLIENTS,
        )

    def least_fraction(self, entry: FleetEntry, part: DemandPart) -> float:
        """Return what part of a device a part of a demand takes alone at least; infinite where none suffices."""
        known = self._list_known(entry, part)
        return entry.device.fraction(known[0][0].share) if known else math.inf

    def _list_known(self, entry: FleetEntry, part: DemandPart) -> Sequence[tuple[Workload, float]]:
        key = (entry.device.name, part)
        if key not in self._known:
            self.problem.limits.check_time()
            self._known[key] = list(self._list_workloads(entry, part))
        return self._known[key]

    def _list_workloads(self, entry: FleetEntry, part: DemandPart) -> Iterator[tuple[Workload, float]]:
        """Yield for each share that suffices alone the best batch and how long it may take."""
        grid = self._grid(entry, part.model)
        if grid is None:
            return
        demand, longest = self.problem.demand(part.model), np.zeros(len(grid.percents))
        slack, batch = np.ones(len(grid.percents)), np.zeros(len(grid.percents), dtype=np.int64)
        place, in_vain, allowed_ms = len(grid.percents) // 2, 0, 0.5 * demand.slo.latency_ms
        between_ms = 1000.0 / (part.fraction * demand.rate_rps)
        for size in grid.sizes:
            if np.all(min(demand.slo.latency_ms, size * between_ms) <= slack * grid.alone_ms[size - 1]):
                continue  # whatever the queue says
            allowed_ms, place = self._find_longest(entry, part, size, (allowed_ms, place))
            found = allowed_ms / grid.alone_ms[size - 1]
            better = found > slack
            slack[better], batch[better], longest[better] = found[better], size, allowed_ms
            in_vain = 0 if better.any() else in_vain + 1
            if in_vain >= _MOST_IN_VAIN and batch.any():
                break
        for number in np.flatnonzero(batch).tolist():
            yield Workload(part.model, int(batch[number]), Share(grid.percents[number])), float(longest[number])

    def _grid(self, entry: FleetEntry, model: str) -> _Grid | None:
        demand = self.problem.demand(model)
        key = (entry.device.name, f"{demand.source_model or model} {demand.dims}")
        if key not in self._grids:
            self._grids[key] = self._tabulate_alone(entry, model)
        return self._grids[key]

    def _tabulate_alone(self, entry: FleetEntry, model: str) -> _Grid | None:
        device = entry.device
        percents = self._planner.steps(device, None, model)
        sizes = self.segments.search_space.sizes(model, device, Share(percents[-1])) if percents else ()
        if not sizes:
            return None
        numbers = range(1, max(sizes) + 1)
        workloads = [Workload(model, number, Share(percent)) for number in numbers for percent in percents]
        table = tabulate_interference(self.problem.estimator, device, workloads)
        if table is None:
            return None
        fractions = np.array([device.fraction(one.share) for one in workloads])
        usual = np.median(table.pressures / fractions[:, None], axis=0)
        times = (table.least_times_ms(*one)[0] for one in ((1, np.zeros(len(usual))), (_USUAL, usual)))
        return _Grid(percents, sizes, *(one.reshape(len(numbers), len(percents)) for one in times))

    def _find_longest(
        self, entry: FleetEntry, part: DemandPart, size: int, guess: tuple[float, int]
    ) -> tuple[float, int]:
        """Return how long a batch of a size may take, and the smallest share that suffices for that alone.

        How times grow with batches differs by share: it is taken from the share that suffices. Those of another batch
        are guesses of both.
        """
        grid, (longest, place) = self._grid(entry, part.model), guess
        assert grid is not None
        server = self.segments.undisturbed_server(entry.device, Workload(part.model, size, Share(grid.percents[-1])))
        for _ in range(2):
            longest = self._ask(part, server, grid.beside_ms[:size, place], longest)
            enough = np.flatnonzero(grid.alone_ms[size - 1] <= longest)
            found = int(enough[0]) if len(enough) else len(grid.percents) - 1
            if abs(found - place) <= 1:
                break
            place = found
        return longest, place

    def _ask(self, part: DemandPart, server: BatchServer, times_ms: Floats, guess_ms: float) -> float:
        """Return the longest time of the last batch, the others in proportion, with which all are in time."""
        demand, handover_ms = self.problem.demand(part.model), self.problem.options.host.handover_ms
        queueing = cast(QuickQueueModel, queue_of(self.problem.queueing, demand.model))
        rate, slo = part.fraction * demand.rate_rps, demand.slo
        allowed, limit_ms = _OF_LATE * (1.0 - slo.percentile / 100.0), _OF_SLO * slo.latency_ms

        def compute_log_excess(factor: float) -> float:
            latency = tuple((factor * times_ms + handover_ms).tolist())
            late = queueing.late_parts(rate, replace(server, latency_ms=latency), [limit_ms])
            return math.inf if late is None else math.log(max(late[0], _LEAST_PART) / allowed)

        left_ms, last_ms = limit_ms - server.overhead_ms - handover_ms, float(times_ms[-1])
        most = min(left_ms / float(times_ms[0]), (1000.0 * len(times_ms) / rate - handover_ms) / last_ms)
        guess = guess_ms / last_ms or 0.5 * most
        return find_root(compute_log_excess, most, guess) * last_ms if most > 0.0 else 0.0


def find_root(function: Callable[[float], float], most: float, guess: float) -> float:
    """Return the largest argument up to ``most`` at which a rising function is not above 0, nearly and from below.

    0.0 where it is above 0 at next to none. By the secant of the two ends or, until both are known, of the last two
    arguments, which begin with the guess; by halves where the function is flat.
    """
    low, high, below, above = 0.0, most, -math.inf, math.inf
    argument, last, value_before = min(guess, most * (1.0 - _STEP)), 0.0, math.nan
    for asked in range(_MOST_ASKED):
        value = function(argument)
        slope = (value - value_before) / (argument - last)
        last, value_before = argument, value
        if value <= 0.0:
            low, below = argument, value
        else:
            high, above = argument, value
        if -_NEARLY < value <= 0.0 or high - low <= _PRECISION * high:
            break
        if math.isfinite(below) and math.isfinite(above) and asked % 4 != 3:
            part = -(below + _NEARLY / 2.0) / (above - below)  # aims a little below 0
            argument = low + min(max(part, 0.05), 0.95) * (high - low)
        elif asked == 0:
            argument *= 1.0 + math.copysign(_STEP, -value)
        else:
            argument += -value / slope if math.isfinite(slope) and slope > 0.0 else math.inf
        if not low < argument < high:
            argument = (low + high) / 2.0
    return low
