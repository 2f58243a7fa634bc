"""Tables of the workloads of each kind of device, with their pressures and throughput, for bounds and pricing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.interference_table import Floats, Integers, InterferenceTable, tabulate_interference
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import MPS_CLIENTS
from gpuprof.placement.optimal.demand_classes import number_classes
from gpuprof.placement.optimal.partition_planner import PartitionPlanner
from gpuprof.placement.optimal.pattern import SPACE, share_units
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Units of a device where shares have no larger common unit; shares are rounded down.
_MOST_UNITS = 200

#: Relative tolerance of times and rates beyond the tolerance of the feasibility check.
_SLACK = 1e-8

#: Tables by segments: the search and the bounds need the same tables.
_KNOWN: WeakKeyDictionary[Segments, Sequence[KindTable]] = WeakKeyDictionary()


_ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class KindTable:
    """The workloads of all classes on a kind of device, smallest share first."""

    price: float
    workloads: Sequence[Workload]
    table: InterferenceTable
    sizes: Integers  #: Shares in equal units, rounded down.
    space: int  #: The whole device in these units.
    classes: Integers  #: Class number of each workload.
    requests: Floats  #: Requests in the batches of all processes, by workload.
    budgets_ms: Floats  #: Upper limit of the time of a batch.
    rates_rps: Floats  #: Rate of each demand of the class, which no replica exceeds.
    most: int  #: Replicas on one device.

    def most_rps(self, count: int, totals: Floats, rows: Integers | slice = _ALL) -> Floats:
        """Return the maximum rates of workloads beside ``count`` replicas with at least these pressures."""
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


def tabulate_kinds(problem: Problem, segments: Segments) -> Sequence[KindTable]:
    """Return a table for each kind of device; no tables where a kind has instances, or its estimator gives no sums.

    Parameters
    ----------
    problem : Problem
        With a latency budget.
    segments : Segments
        Of the same problem.
    """
    if segments not in _KNOWN:
        kinds: list[KindTable | None] = [None]
        with suppress(InputError):
            kinds = [_tabulate(problem, segments, entry) for entry in problem.fleet.entries]
        known = [kind for kind in kinds if kind is not None]
        _KNOWN[segments] = known if len(known) == len(kinds) else ()
    return _KNOWN[segments]


def _list_workloads(problem: Problem, segments: Segments, entry: FleetEntry) -> Iterator[Workload]:
    """Yield all workloads that may run on a kind of device."""
    planner, search_space = PartitionPlanner(problem, segments), segments.search_space
    for model in number_classes(problem, segments):
        for percent in planner.steps(entry.device, None, model):
            share = Share(percent)
            for processes in search_space.processes(share):
                for batch in search_space.sizes(model, entry.device, share):
                    yield Workload(model, batch, share, processes)


def count_units(workloads: Sequence[Workload]) -> tuple[Integers, int]:
    """Return the shares of workloads in units, rounded down, and the units of a device."""
    units = [share_units(one.share) for one in workloads]
    common = max(math.gcd(SPACE, *units), SPACE // _MOST_UNITS)
    return np.array(units, dtype=np.int64) // common, SPACE // common


def _tabulate(problem: Problem, segments: Segments, entry: FleetEntry) -> KindTable | None:
    """Return the workloads of a kind of device that are in time alone; None with MIG, or without a table of sums."""
    device, numbers = entry.device, number_classes(problem, segments)
    shares = [share for model in numbers for share in problem.estimator.shares(model, device)]
    if device.kind != "gpu" or any(share.mig is not None for share in shares):
        return None
    workloads = sorted(_list_workloads(problem, segments, entry), key=lambda one: one.share.sm_pct)
    units, space = count_units(workloads)
    table = tabulate_interference(problem.estimator, device, workloads) if workloads else None
    if table is None:
        return None
    demands = [problem.demand(one.model) for one in workloads]
    budget = problem.options.latency_budget or 1.0
    kind = KindTable(
        price=entry.price_per_hour,
        workloads=workloads,
        table=table,
        sizes=units,
        space=space,
        classes=np.array([numbers[one.model] for one in workloads], dtype=np.int64),
        requests=np.array([float(one.batch * one.processes) for one in workloads]),
        budgets_ms=np.array([budget * one.slo.latency_ms for one in demands]),
        rates_rps=np.array([one.rate_rps for one in demands]),
        most=MPS_CLIENTS,
    )
    alone = kind.most_rps(1, np.zeros(table.pressures.shape[1]))
    return kind.take(np.flatnonzero(alone > 0.0)) if np.any(alone > 0.0) else None
