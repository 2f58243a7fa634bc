"""A lower bound for several kinds of devices with integer numbers of devices and, for few demands, of replicas.

A demand takes at least a certain part of a kind of device: its rate times the smallest part of a device per request per
second, over the search space (`replica_options`), at the maximum rates beside any neighbours.
Demands may be divided among kinds at will, devices may not: an integer program with a column for each kind and a column
for each demand on each kind. Every map in the search space is a solution of the program, so none costs less.

For few demands the replicas are counted next: a column for each possible replica of a demand, with its part and its
maximum rate. Where the program rests on a replica serving the whole demand alone, its queue verifies this. No queue
of several replicas is solved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.replica_options import ReplicaOption, list_options, settle_options
from gpuprof.placement.pooled_segment import BoundingSegments
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Program

#: A kind of device and a model.
_Pair = tuple[str, str]
#: Minimum time (s) of the program, which has a column for each demand on each kind.
_LEAST_S = 0.2
#: Part of a demand below which the demand's use of a kind is ignored.
_LITTLE = 1e-6
#: Maximum number of demands with counted replicas.
_FEW_DEMANDS = 12


class _KnownOptions(dict[_Pair, tuple[ReplicaOption, ...]]):
    """The options of demands' replicas, as far as evaluated; similar demands use the options of the first."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self._problem, self._segments = problem, BoundingSegments(problem)

    def look_up(self, pair: _Pair) -> None:
        """Evaluate the options of a demand's replicas on a kind."""
        kind, model = pair
        first = self._segments.first_alike(model)
        if (kind, first) not in self:
            self[kind, first] = list_options(self._segments, self._problem.demand(first), self._problem.entry(kind))
        self[pair] = self[kind, first]

    def settle(self, pair: _Pair) -> None:
        """Solve the queues of replicas that may serve a whole demand alone."""
        kind, model = pair
        demand, entry = self._problem.demand(model), self._problem.entry(kind)
        self[pair] = settle_options(self._segments, demand, entry, self[pair])


@dataclass(frozen=True, slots=True)
class WholeDeviceBound:
    """The minimum cost of serving every demand; infinite where no number of these devices serves everything."""

    cost_per_hour: float
    kinds: tuple[str, ...] = ()  #: Kinds of the cheapest solution, which might give such a map.


def bound_whole_devices(problem: Problem, limit: Limit) -> WholeDeviceBound:
    """Return the bound.

    Parameters
    ----------
    problem : Problem
        Without a latency budget.
    limit : Limit
        A demand on a kind is evaluated where the program rests on it; demands not evaluated in time take nothing.
    """
    known, best = _KnownOptions(problem), WholeDeviceBound(0.0)
    with problem.limits.until(limit), suppress(TimeUpError):
        for whole in (False, True) if len(problem.demands) <= _FEW_DEMANDS else (False,):
            while True:
                found = _solve(problem, known, limit, whole=whole)
                best = max(best, found.bound, key=lambda one: one.cost_per_hour)
                if math.isinf(best.cost_per_hour) or not found.resolve(known):
                    break
    return best


@dataclass(frozen=True, slots=True)
class _Relaxation:
    """The program's bound, and the pairs it rests on."""

    bound: WholeDeviceBound
    unknown: Sequence[_Pair] = ()  #: Demands on kinds not yet evaluated.
    unsettled: Sequence[_Pair] = ()  #: Pairs with a replica serving the whole demand, if its queue confirms it.

    def resolve(self, known: _KnownOptions) -> bool:
        """Evaluate a pair the bound rests on; return False where all are known."""
        if self.unknown:
            known.look_up(self.unknown[0])
        elif self.unsettled:
            known.settle(self.unsettled[0])
        return bool(self.unknown or self.unsettled)


def _solve(problem: Problem, known: _KnownOptions, limit: Limit, *, whole: bool) -> _Relaxation:
    """Return the program's bound, with ``whole`` replicas or not; unknown pairs take nothing."""
    names = [entry.device.name for entry in problem.fleet.entries]
    for demand in problem.demands:
        if all(known.get((name, demand.model)) == () for name in names):
            return _Relaxation(WholeDeviceBound(math.inf))
    program = Program()
    served = {demand.model: program.row(1.0) for demand in problem.demands}
    room, kinds = {name: program.row(0.0) for name in names}, {}
    for entry in problem.fleet.entries:
        most = math.inf if entry.count is None else float(entry.count)
        kinds[entry.device.name] = program.column(entry.price_per_hour, {room[entry.device.name]: 1.0}, most)
    unknown: dict[int, _Pair] = {}
    unsettled: dict[int, _Pair] = {}
    for kind, model in product(names, served):
        rate_rps, options = problem.demand(model).rate_rps, known.get((kind, model))
        if options is not None and whole:
            for one in options:
                rows = {served[model]: one.rate_rps / rate_rps, room[kind]: -one.part}
                column = program.column(0.0, rows, math.ceil(rate_rps / one.rate_rps))
                if one.candidates:
                    unsettled[column] = kind, model
                    break  # larger options serve no more
        elif options != ():
            part = min((one.part * rate_rps / one.rate_rps for one in options or ()), default=0.0)
            none_without = program.row(0.0)  # a kind without devices serves nothing
            program.add(kinds[kind], none_without, 1.0)
            column = program.column(
                0.0, {served[model]: 1.0, room[kind]: -part, none_without: -1.0}, 1.0, integer=False
            )
            if options is None:
                unknown[column] = kind, model
    solution = program.solve(time_limit_s=None if limit.left_s is None else max(limit.left_s, _LEAST_S))
    if solution is None:  # not in time, or too few devices
        return _Relaxation(WholeDeviceBound(0.0))
    taken = tuple(name for name, column in kinds.items() if solution.values[column] > 0.5)
    used = {column for column, value in enumerate(solution.values) if value > _LITTLE}
    return _Relaxation(
        WholeDeviceBound(solution.bound, taken),
        [pair for column, pair in unknown.items() if column in used],
        [pair for column, pair in unsettled.items() if column in used],
    )
