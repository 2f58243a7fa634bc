"""Maps from patterns, where all combinations can be listed: exact, with interference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpuprof.domain.demand import Demand
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.goodput import solve_for_goodput
from gpuprof.placement.optimal.partition_planner import PartitionPlanner
from gpuprof.placement.optimal.pattern_enumeration import PatternEnumeration
from gpuprof.placement.optimal.pattern_program import PatternProgram, ReplicaPattern, drop_dominated
from gpuprof.placement.placement import PlacedGpu
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_limit import RATE_PRECISION
from gpuprof.placement.segment import Segments

#: Maximum number of demands: with more there are too many combinations.
_MOST_DEMANDS = 8


@dataclass(frozen=True, slots=True)
class PatternSolution:
    """A map, and the known lower bound on the cost of every map."""

    gpus: tuple[PlacedGpu, ...]
    bound: float = 0.0  #: Per hour; 0.0 where nothing is proven.


@dataclass(slots=True)
class PatternSearch:
    """Assembles maps serving all demands."""

    problem: Problem
    demands: Sequence[Demand]  #: Demands with a segment.
    segments: Segments  #: Segments of the same problem.
    limit: Limit
    planner: PartitionPlanner = field(init=False)
    _listed: list[tuple[ReplicaPattern, ...] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.planner = PartitionPlanner(self.problem, self.segments)

    @property
    def is_worth_trying(self) -> bool:
        """Return whether the demands are few enough to be combined."""
        return len(self.demands) <= _MOST_DEMANDS and not self.limit.is_over

    def _list_all(self) -> tuple[ReplicaPattern, ...] | None:
        if not self._listed:
            self._listed.append(
                PatternEnumeration(self.problem, self.demands, self.segments, self.planner, self.limit).list_patterns()
            )
        return self._listed[0]

    def exact(self) -> PatternSolution | None:
        """Return the cheapest of all maps, None where they are too many to list or none serves everything."""
        patterns = self._list_all()
        if patterns is None:
            return None
        solution = self._cheapest(patterns)
        if solution is None or self.problem.options.latency_budget is not None:
            return solution
        optimistic = self._cheapest([_at_best(one, self.demands) for one in patterns])
        return replace(solution, bound=0.0 if optimistic is None else optimistic.bound)

    def maximise_goodput_of_patterns(self, *, fair: bool) -> tuple[PlacedGpu, ...]:
        """Return the map serving most of the demands in part, or with ``fair`` most of the least-served demand.

        No devices where patterns are too many to list.
        """
        patterns = self._list_all()
        if patterns is None:
            return ()
        program = PatternProgram(self.problem, self.demands, drop_dominated(patterns, self.demands), partial=True)
        solution = solve_for_goodput(self.problem, program, self.limit, fair=fair)
        return () if solution is None else program.read_solution(solution)

    def _cheapest(self, patterns: Sequence[ReplicaPattern]) -> PatternSolution | None:
        program = PatternProgram(self.problem, self.demands, drop_dominated(patterns, self.demands))
        prices = {entry.price_per_hour for entry in self.problem.fleet.entries}
        # At a single price all costs are multiples of it: within less than one price of the bound nothing cheaper is
        # left.
        solution = program.program.solve(
            time_limit_s=self.limit.left_s,
            seed=self.problem.options.seed,
            least_step=min(prices) if len(prices) == 1 else 0.0,
        )
        return None if solution is None else PatternSolution(program.read_solution(solution), solution.bound)


def _at_best(pattern: ReplicaPattern, demands: Sequence[Demand]) -> ReplicaPattern:
    """Return a pattern at the highest rates within the precision of the capacities."""
    most = {one.model: one.rate_rps for one in demands}
    replicas = (
        replace(one, rate_rps=max(one.rate_rps, min(one.rate_rps * (1.0 + RATE_PRECISION), most[one.model])))
        for one in pattern.partition.replicas
    )
    return replace(pattern, partition=replace(pattern.partition, replicas=tuple(replicas)))
