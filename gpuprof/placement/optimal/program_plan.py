"""The map of the integer program, which chooses segments and devices together without interference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.placement.cover import MOST_REPLICAS, Cover, share_out_rate
from gpuprof.placement.fleet_bins import FleetBins
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.candidates import Choices
from gpuprof.placement.optimal.column_generation import solve_relaxation
from gpuprof.placement.optimal.cost_bound import find_step, list_prices, round_up_to_step
from gpuprof.placement.optimal.goodput import maximise_goodput
from gpuprof.placement.optimal.merge_replicas import merge_replicas
from gpuprof.placement.optimal.packing import pack_replicas
from gpuprof.placement.optimal.restricted_master import Choice, DemandClass, RestrictedMaster, group_demands
from gpuprof.placement.placement import PlacedGpu
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """Segments chosen by the integer program, and a lower bound on the cost of all maps of the same segments."""

    demands: tuple[Demand, ...]  #: Those with a segment, at rates that their replicas reach.
    choices: Choices
    choice: Choice | None
    bound: float  #: Per hour; 0.0 where nothing is known, or memory was rounded up.

    def pack(self, problem: Problem, segments: Segments) -> tuple[PlacedGpu, ...]:
        """Return the devices of the chosen segments, whose neighbours are only evaluated here."""
        bins = FleetBins(problem, segments)
        if self.choice is not None:
            pack_replicas(_make_covers(self.demands, self.choices, self.choice), self.choice, segments, bins)
        return merge_replicas(problem, segments, self.choices, bins.to_gpus())


def plan_by_program(
    problem: Problem, choices: Choices, demands: Sequence[Demand], limit: Limit, *, fair: bool
) -> ProgramPlan:
    """Return the cheapest choice that serves all demands, else the choice that serves most.

    Parameters
    ----------
    problem : Problem
    choices : mapping of str to tuple of Segment
    demands : sequence of Demand
        Demands of models of the problem, at any rates.
    limit : Limit
    fair : bool
        As `gpuprof.placement.optimal.optimal.Optimal`.
    """
    able = tuple(_lower_to_reach(demand, choices[demand.model]) for demand in demands if choices[demand.model])
    if not able:
        return ProgramPlan((), choices, None, 0.0)
    classes = group_demands(able, choices)
    choice, bound = minimise_cost(problem, classes, limit)
    if choice is None and not limit.is_over:
        choice = maximise_goodput(problem, classes, limit, fair=fair)
    return ProgramPlan(able, choices, choice, bound)


def minimise_cost(problem: Problem, classes: Sequence[DemandClass], limit: Limit) -> tuple[Choice | None, float]:
    """Return the cheapest choice of the segments of ``classes``, None without one, and a lower bound on its cost."""
    entries, seed = problem.fleet.entries, problem.options.seed
    master, prices = RestrictedMaster(entries, classes), list_prices(entries)
    relaxation, bound = solve_relaxation(master, prices, limit, seed)
    if relaxation is None:
        return None, 0.0
    solution = master.program.solve(time_limit_s=limit.left_s, seed=seed, least_step=find_step(prices))
    if solution is None:
        return None, round_up_to_step(bound, prices) if master.is_exact else 0.0
    # The integer program's bound covers only its own patterns where patterns are generated.
    if not master.generated:
        bound = max(bound, solution.bound)
    bound = min(round_up_to_step(bound, prices), solution.objective)
    return master.read_solution(solution), bound if master.is_exact else 0.0


def _lower_to_reach(demand: Demand, segments: Sequence[Segment]) -> Demand:
    """Return the demand lowered to the maximum rate of its allowed number of replicas."""
    most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    limit_rps = most * max(segment.capacity_rps for segment in segments)
    return demand if demand.rate_rps <= limit_rps else replace(demand, rate_rps=limit_rps)


def _make_covers(demands: Sequence[Demand], choices: Choices, choice: Choice) -> Mapping[str, Cover]:
    covers: dict[str, Cover] = {}
    for demand in demands:
        counts = choice.covers[demand.model]
        segments = [s for s, count in zip(choices[demand.model], counts, strict=True) for _ in range(count)]
        if segments:
            covers[demand.model] = share_out_rate(demand.rate_rps, segments)
    return covers
