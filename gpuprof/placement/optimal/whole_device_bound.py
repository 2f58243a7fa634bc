"""A lower bound among devices of several kinds that needs no queues and knows that devices are whole.

Of a kind of device a demand takes at least a certain part: its rate times the smallest part of a device per request a
second, over all shares and batches on the menu, at what no replica exceeds whatever stands beside it
(`most_within_rps`). Demands may be divided among kinds at will, devices may not: an integer program with a column for
each kind and one for each demand on each kind. Every map of the menu is a solution of it, so none costs less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import Workload, batch_times
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.pooled_segment import BoundingSegments, most_within_rps
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Program

#: A kind of device and a model.
_Pair = tuple[str, str]
#: Seconds that the program may take in any case: it has a column for each demand on each kind.
_LEAST_S = 0.2
#: A demand of which a kind serves less is not looked at there.
_LITTLE = 1e-6


class _LeastParts(dict[_Pair, float]):
    """What demands take of devices at least, as far as it was asked for."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self._problem, self._segments = problem, BoundingSegments(problem)

    def find(self, kind: str, model: str) -> None:
        """Work out what a demand takes of a kind; demands that are alike take as much."""
        first = self._segments.first_alike(model)
        if (kind, first) not in self:
            demand, entry = self._problem.demand(first), self._problem.entry(kind)
            self[kind, first] = find_least_part(self._segments, demand, entry)
        self[kind, model] = self[kind, first]


@dataclass(frozen=True, slots=True)
class WholeDeviceBound:
    """What serving every demand takes at least; infinite where no number of these devices serves everything."""

    cost_per_hour: float
    kinds: tuple[str, ...] = ()  #: Of the cheapest solution of the program: where a map so cheap might be found.


def bound_whole_devices(problem: Problem, limit: Limit) -> WholeDeviceBound:
    """Return the bound.

    Parameters
    ----------
    problem : Problem
        Without a latency budget.
    limit : Limit
        What a demand takes of a kind is worked out where the program rests on it; what was not in time is nothing.
    """
    parts = _LeastParts(problem)
    with problem.limits.until(limit), suppress(TimeUpError):
        while True:
            found = _solve(problem, parts, limit)
            missing = [pair for pair in found.pairs if pair not in parts]
            if not missing:
                break
            parts.find(*missing[0])
    return _solve(problem, parts, limit).bound


@dataclass(frozen=True, slots=True)
class _Relaxation:
    """The program's bound, and which demands it serves on which kinds."""

    bound: WholeDeviceBound
    pairs: Sequence[_Pair]


def _solve(problem: Problem, parts: Mapping[_Pair, float], limit: Limit) -> _Relaxation:
    """Return the program's bound where demands take nothing of kinds that were not looked at."""
    entries = problem.fleet.entries
    for demand in problem.demands:
        if all(math.isinf(parts.get((entry.device.name, demand.model), 0.0)) for entry in entries):
            return _Relaxation(WholeDeviceBound(math.inf), ())
    program, pairs, kinds = Program(), {}, {}
    served = {demand.model: program.row(1.0) for demand in problem.demands}
    room = {entry.device.name: program.row(0.0) for entry in entries}
    for entry in entries:
        most = math.inf if entry.count is None else float(entry.count)
        kinds[entry.device.name] = program.column(entry.price_per_hour, {room[entry.device.name]: 1.0}, most)
    for pair in product(room, served):
        part = parts.get(pair, 0.0)
        if math.isfinite(part):
            none_without = program.row(0.0)  # nothing is served by a kind of which there is no device
            program.add(kinds[pair[0]], none_without, 1.0)
            rows = {served[pair[1]]: 1.0, room[pair[0]]: -part, none_without: -1.0}
            pairs[pair] = program.column(0.0, rows, 1.0, integer=False)
    solution = program.solve(time_limit_s=None if limit.left_s is None else max(limit.left_s, _LEAST_S))
    if solution is None:  # not in time, or fewer devices than it takes
        return _Relaxation(WholeDeviceBound(0.0), ())
    taken = tuple(name for name, column in kinds.items() if solution.values[column] > 0.5)
    used = [pair for pair, column in pairs.items() if solution.values[column] > _LITTLE]
    return _Relaxation(WholeDeviceBound(solution.bound, taken), used)


def find_least_part(segments: BoundingSegments, demand: Demand, entry: FleetEntry) -> float:
    """Return the least number of devices that serving a whole demand takes, which may be less than one.

    Infinite where nothing is in time.
    """
    device, least = entry.device, math.inf
    for share in _list_shares(segments, demand, entry):
        for most in _bound_rates(segments, demand, entry, share):
            if most > 0.0:
                least = min(least, demand.rate_rps * device.fraction(share) / most)
    return least


def _list_shares(segments: BoundingSegments, demand: Demand, entry: FleetEntry) -> Iterator[Share]:
    listed = segments.problem.estimator.shares(demand.model, entry.device)
    yield from listed
    for mig in dict.fromkeys((None, *(share.mig for share in listed))):
        for percent in segments.menu.steps(demand.model, entry.device, mig):
            yield Share(percent, mig)


def _bound_rates(segments: BoundingSegments, demand: Demand, entry: FleetEntry, share: Share) -> Iterator[float]:
    """Yield what no replica under ``share`` exceeds.

    A replica forms smaller batches, too, so that of times that do not vary those of the largest batch in time say all;
    measured ones vary by batch, each in its own way.
    """
    slo, confidence = demand.slo, segments.problem.options.confidence
    listed = segments.menu.listed_batches(demand.model, entry.device, share)
    for processes in segments.menu.processes(share):
        named = demand.model, entry.device, listed, share, processes
        try:
            figures = batch_times(segments.problem.estimator, *named)
        except InputError:
            figures = ()
        late = [planned_ms(figure, confidence) > slo.latency_ms for figure in figures]
        if figures and not any(figure.is_observed for figure in figures):
            in_time = len(late) - late[::-1].index(False) if False in late else 0
            batches = listed[in_time : in_time + 1] or listed[-1:]  # those between may be in time, too
        else:
            batches = listed
        for batch in batches:
            with suppress(InputError):
                server = segments.undisturbed_server(entry.device, Workload(demand.model, batch, share, processes))
                yield most_within_rps(server, slo.latency_ms, slo.percentile)
