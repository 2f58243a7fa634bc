"""The bound of maps by queues that accounts for interference: `NeighbourBound` of what replicas do at most.

By these estimates no map in the search space beats it. Proof: let a map serve a class within its SLO. Of each replica,
let n be the batch in time that does most for its time S among the neighbours that it has: it serves no more than
r = n / S at a time in batches that are in time, smaller ones included. By `waiting_bound` the r of all replicas of a
demand add up to what Poisson requests need at least, pools and single replicas alike, and whoever gets which request;
of other arrivals, to the part of the requests that must be in time (`gpuprof.placement.rate_bound`). So the map is a
solution of the program whose replicas are pairs (share, n) that serve r, if those press no more than the map's do and
are no slower. A replica that may form batches of B presses as one of B, which n <= B does: it is taken to press as that
B >= n that presses least. Times come from totals that its neighbours and it reach even so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.interference_table import Floats, Integers, InterferenceTable, tabulate_interference
from gpuprof.errors import InputError
from gpuprof.placement.bin import MPS_CLIENTS
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.alone_bound import GENEROUS, PATIENT, find_least_rps, list_series
from gpuprof.placement.optimal.bound_process import BoundProcess, start_bound_process
from gpuprof.placement.optimal.demand_classes import DemandClasses, group_alike
from gpuprof.placement.optimal.incumbent import clip_bounds, is_proven_optimal, raise_bounds
from gpuprof.placement.optimal.kind_table import count_units
from gpuprof.placement.optimal.neighbour_bound import BoundTask, NeighbourBound
from gpuprof.placement.optimal.neighbour_box import KindTable
from gpuprof.placement.optimal.partition_planner import PartitionPlanner
from gpuprof.placement.optimal.portfolio import has_fast_late_bounds
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_bound import SLACK
from gpuprof.placement.segment import Segments

#: Of so many demands the bound is worked out, where a time limit leaves at least so many seconds.
_MANY, _LEAST_S = 12, 7.0


@dataclass(frozen=True, slots=True)
class QueueBound:
    """The bound of one problem, which a process raises meanwhile."""

    problem: Problem
    limit: Limit
    task: BoundTask | None  #: None: there is none.
    process: BoundProcess | None  #: None: it is worked out once it is asked for.

    def raise_bounds(self, placement: Placement) -> Placement:
        """Return a placement with its bounds raised where it serves everything and may not be the best."""
        if self.task is None or placement.unplaced or is_proven_optimal(self.problem, placement):
            return placement
        if self.process is None:
            bound = max(NeighbourBound(self.task).raise_bound(self.limit), default=0.0)
        else:
            cost = sum(self.problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
            bound = self.process.wait(self.limit, cost)
        return clip_bounds(self.problem, raise_bounds(self.problem, placement, bound))


@contextmanager
def start_queue_bound(problem: Problem, segments: Segments, limit: Limit) -> Iterator[QueueBound]:
    """Give the bound of a problem without a latency budget; of many demands a process works on it, if there is a core.

    Parameters
    ----------
    problem : Problem
    segments : Segments
        Of the same problem.
    limit : Limit
    """
    wanted = len(problem.demands) >= _MANY and (limit.left_s or _LEAST_S) >= _LEAST_S and has_fast_late_bounds(problem)
    with start_bound_process(wanted=wanted) as process:
        task = make_queue_task(problem, segments) if wanted else None
        beside = process if process is not None and task is not None and process.begin(task, limit) else None
        yield QueueBound(problem, limit, task, beside)


@dataclass(frozen=True, slots=True)
class LargerBatchTable:
    """The table of replicas by the batches that they do best with, which may form larger ones.

    Implements `gpuprof.domain.interference_table.InterferenceTable`. Nothing of a batch overlaps the next: queues count
    all of its time.
    """

    table: InterferenceTable
    pressures: Floats  #: Of the batch that presses least of those that are no smaller.

    def take(self, rows: Integers) -> LargerBatchTable:
        """Return the table of some of the replicas."""
        return LargerBatchTable(self.table.take(rows), self.pressures[rows])

    def least_times_ms(self, count: int, totals: Floats) -> tuple[Floats, Floats]:
        """Return a lower bound of each batch time, twice."""
        latency, _ = self.table.least_times_ms(count, totals)
        return latency, latency


@dataclass(frozen=True, slots=True)
class _Needs:
    """What the replicas of a demand of a class must do together."""

    rate_rps: float
    limit_ms: float  #: Of a batch whose requests count.
    in_time: float  #: Requests of a batch stand for so many over this.


def make_queue_task(problem: Problem, segments: Segments) -> BoundTask | None:
    """Return what the bound by queues is worked out from; None where no sums of neighbours are told.

    Parameters
    ----------
    problem : Problem
        Without a latency budget.
    segments : Segments
        Of the same problem.
    """
    classes = group_alike(problem, segments)
    needs = [_find_needs(problem, model) for model in classes]
    kinds: list[KindTable] = []
    for entry in problem.fleet.entries:
        try:
            kind = _tabulate(problem, segments, entry, classes, needs)
        except InputError:
            kind = None
        if kind is None:
            return None
        kinds.append(kind)
    counts = np.array([float(len(own)) for own in classes.values()])
    needed = counts * np.array([one.rate_rps for one in needs])
    return BoundTask(kinds, needed, counts, (), problem.options.seed)


def _find_needs(problem: Problem, model: str) -> _Needs:
    demand = problem.demand(model)
    least_rps = find_least_rps(problem, demand)
    if least_rps > 0.0:
        return _Needs(least_rps, PATIENT * demand.slo.latency_ms, 1.0)
    part = demand.slo.percentile / 100.0 - SLACK
    return _Needs(demand.rate_rps, (1.0 + GENEROUS) * demand.slo.latency_ms, part)


def _list_workloads(
    problem: Problem, segments: Segments, entry: FleetEntry, classes: DemandClasses
) -> Iterator[tuple[int, Workload]]:
    """Yield the number of each class with what its replicas may do best with; the batches of a share come in turn."""
    planner = PartitionPlanner(problem, segments)
    for number, model in enumerate(classes):
        for series in list_series(segments, entry, model, planner.steps(entry.device, None, model)):
            for batch in range(1, series.largest + 1):
                yield number, Workload(model, batch, series.share, series.processes)


def _tabulate(
    problem: Problem, segments: Segments, entry: FleetEntry, classes: DemandClasses, needs: list[_Needs]
) -> KindTable | None:
    device = entry.device
    shares = [share for model in classes for share in problem.estimator.shares(model, device)]
    if device.kind != "gpu" or any(share.mig is not None for share in shares):
        return None
    rows = sorted(_list_workloads(problem, segments, entry, classes), key=lambda row: row[1].share.sm_pct)
    workloads = [workload for _, workload in rows]
    table = tabulate_interference(problem.estimator, device, workloads) if rows else None
    if table is None:
        return None
    units, space = count_units(workloads)
    own = [needs[number] for number, _ in rows]
    kind = KindTable(
        price=entry.price_per_hour,
        workloads=workloads,
        table=LargerBatchTable(table, _press_least(workloads, table.pressures)),
        sizes=units,
        space=space,
        classes=np.array([number for number, _ in rows], dtype=np.int64),
        requests=np.array([one.batch * one.processes / need.in_time for one, need in zip(workloads, own, strict=True)]),
        budgets_ms=np.array([need.limit_ms for need in own]),
        rates_rps=np.array([need.rate_rps for need in own]),
        most=MPS_CLIENTS,
    )
    able = kind.most_rps(1, np.zeros(table.pressures.shape[1])) > 0.0
    return kind.take(np.flatnonzero(able)) if able.any() else None


def _press_least(workloads: list[Workload], pressures: Floats) -> Floats:
    """Return for each workload the least that it presses with this batch or a larger one."""
    least, begin = pressures.copy(), 0
    for _, batches in groupby(workloads, key=lambda one: (one.model, one.share, one.processes)):
        end = begin + sum(1 for _ in batches)
        least[begin:end] = np.minimum.accumulate(pressures[begin:end][::-1], axis=0)[::-1]
        begin = end
    return least
