"""The map of the integer program, which chooses segments and devices together without interference."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.placement.bin import MOST_REPLICAS, Bin, Cover, FleetBins, share_out_rate
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.candidates import Choices
from gpuprof.placement.optimal.judge import find_step, join_alike, list_prices, round_up_to_step
from gpuprof.placement.optimal.pattern import PartitionKind, PartitionSlot, SharePattern
from gpuprof.placement.optimal.restricted_master import (
    Choice,
    RestrictedMaster,
    generate_patterns,
    solve_relaxation,
)
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT, Solution
from gpuprof.placement.segment import Segment, Segments

_Queues = dict[tuple[str, PartitionSlot], list[PlacedReplica]]


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """Segments chosen by the integer program, and a lower bound on the cost of all maps of the same segments."""

    demands: tuple[Demand, ...]  #: Those with a segment, at rates that their replicas reach.
    choices: Choices
    choice: Choice | None
    bound: float  #: Per hour; 0.0 where nothing is known, or memory was rounded up.

    def pack(self, problem: Problem, segments: Segments) -> tuple[PlacedGpu, ...]:
        """Lower bounds on devices and cost of maps that serve all demands; upper bound on the goodput of any map."""
        bins = FleetBins(problem, segments)
        if self.choice is not None:
            pack_replicas(_make_covers(self.demands, self.choices, self.choice), self.choice, segments, bins)
        return merge_replicas(problem, segments, self.choices, bins.to_gpus())


def plan_by_program(
    problem: Problem, choices: Choices, demands: Sequence[Demand], limit: Limit, most_cost: float = math.inf
) -> ProgramPlan:
    """Return the cheapest choice that serves all demands, else the choice that serves most.

    No choice where the relaxation shows that none costs less than ``most_cost``, the cost of a known map.

    Parameters
    ----------
    problem : Problem
    choices : mapping of str to tuple of Segment
    demands : sequence of Demand
        Demands of models of the problem, at any rates.
    limit : Limit
    """
    able = tuple(_lower_to_reach(demand, choices[demand.model]) for demand in demands if choices[demand.model])
    if not able:
        return ProgramPlan((), choices, None, 0.0)
    choice, bound = minimise_cost(problem, able, choices, limit, most_cost)
    if choice is None and math.isinf(most_cost) and not limit.is_over:
        choice = maximise_goodput(problem, able, choices, limit)
    return ProgramPlan(able, choices, choice, bound)


def minimise_cost(
    problem: Problem, demands: Sequence[Demand], choices: Choices, limit: Limit, most_cost: float = math.inf
) -> tuple[Choice | None, float]:
    """Return the cheapest choice of segments below ``most_cost``, None without one, and a lower bound on its cost."""
    entries, seed = problem.fleet.entries, problem.options.seed
    prices, joined = list_prices(entries), RestrictedMaster(entries, join_alike(problem, demands), choices)
    relaxation, bound = solve_relaxation(joined, prices, limit, seed)
    if relaxation is None:
        return None, 0.0
    if round_up_to_step(bound, prices) >= most_cost * (1.0 - EXACT):
        return None, round_up_to_step(bound, prices) if joined.is_exact else 0.0
    master = RestrictedMaster(entries, demands, choices)
    for pattern in joined.patterns:
        master.add_pattern(pattern)
    solution = master.program.solve(time_limit_s=limit.left_s, seed=seed, least_step=find_step(prices))
    if solution is None:
        return None, round_up_to_step(bound, prices) if master.is_exact else 0.0
    # The integer program's bound covers only its own patterns where patterns are generated.
    if not master.generated:
        bound = max(bound, solution.bound)
    bound = min(round_up_to_step(bound, prices), solution.objective)
    return master.read_solution(solution), bound if master.is_exact else 0.0


def _lower_to_reach(demand: Demand, segments: Sequence[Segment]) -> Demand:
    """Return the demand, its rate lowered to what its maximum number of replicas can serve."""
    most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    limit_rps = most * max(segment.capacity_rps for segment in segments)
    return demand if demand.rate_rps <= limit_rps else replace(demand, rate_rps=limit_rps)


def _make_covers(demands: Sequence[Demand], choices: Choices, choice: Choice) -> Mapping[str, Cover]:
    covers: dict[str, Cover] = {}
    for demand in demands:
        counts = choice.counts[demand.model]
        segments = [s for s, count in zip(choices[demand.model], counts, strict=True) for _ in range(count)]
        if segments:
            covers[demand.model] = share_out_rate(demand.rate_rps, segments)
    return covers


def maximise_goodput(problem: Problem, demands: Sequence[Demand], choices: Choices, limit: Limit) -> Choice | None:
    """Return the choice with the most goodput, higher priorities first, then the least cost; None if out of time."""
    master = RestrictedMaster(problem.fleet.entries, demands, choices, partial=True)
    solution = _solve_by_priority(problem, master, limit)
    return None if solution is None else master.read_solution(solution)


def _solve_by_priority(problem: Problem, master: RestrictedMaster, limit: Limit) -> Solution | None:
    """Return the solution that serves most of the highest priority, then most of the next, and so on.

    Patterns are generated for the objective of each priority, once the higher priorities are held at their optimum.
    """
    columns = master.served_columns
    solution = None
    for level in sorted({demand.priority for demand, _ in columns}, reverse=True):
        level_columns = [(demand, column) for demand, column in columns if demand.priority == level]
        row = master.program.row(low=0.0)
        for _, column in level_columns:
            master.program.add(column, row, 1.0)
        master.program.recost({column: -1.0 for _, column in level_columns})
        generate_patterns(master, limit, problem.options.seed)
        next_solution = _solve_program(problem, master, limit)
        if next_solution is None:
            break
        solution = next_solution
        total = sum(demand.rate_rps for demand, _ in level_columns)
        master.program.bound_row(row, low=max(0.0, -next_solution.objective - EXACT * total))
    if solution is None:
        return None
    master.program.recost(master.device_costs({e.device.name: e.price_per_hour for e in problem.fleet.entries}))
    return _solve_program(problem, master, limit) or solution


def bound_goodput(problem: Problem, demands: Sequence[Demand], choices: Choices, limit: Limit) -> float:
    """Return an upper bound on the rate (requests/s) that any map on the fleet serves within the SLOs.

    The bound ignores priorities. Where patterns are too many to list, only the sum of shares is bounded,
    which can only raise the bound.

    Parameters
    ----------
    demands : sequence of Demand
        Demands with a segment.
    choices : mapping of str to tuple of Segment
        Their optimistic segments.
    """
    total = math.fsum(demand.rate_rps for demand in demands)
    if not demands:
        return 0.0
    master = RestrictedMaster(
        problem.fleet.entries, demands, choices, partial=True, summed=True, floors=False, relaxed=True
    )
    master.program.recost({column: -1.0 for _, column in master.served_columns})
    # Not stopped by the limit: this short solve gives the only sure bound.
    first = master.program.solve(relaxed=True, seed=problem.options.seed)
    if first is None or not first.is_proven:
        return total
    solution = _solve_program(problem, master, limit)
    least = first.objective if solution is None else max(first.objective, solution.bound)
    return min(total, -least * (1.0 + 1e-9))


def _solve_program(problem: Problem, master: RestrictedMaster, limit: Limit) -> Solution | None:
    return master.program.solve(time_limit_s=limit.left_s, seed=problem.options.seed)


def pack_replicas(
    covers: Mapping[str, Cover], choice: Choice, segments: Segments, bins: FleetBins
) -> list[tuple[str, PlacedReplica]]:
    """Fill ``bins``; return (device, replica) for unplaced replicas.

    The program's patterns hold every segment by its share and memory; interference between the models of a partition is
    evaluated only here. Rejected replicas go wherever they fit, on a new device if available.
    """
    queues = _queue_replicas(covers, choice)
    patterns = _by_kind(choice.patterns)
    for configuration, count in choice.configurations:
        for _ in range(count):
            fresh = bins.open(configuration.device)
            if fresh is None:
                continue
            for item in configuration.layout:
                _fill(fresh, item.start, (configuration.device, item.profile.name), patterns, queues, segments)
            if not configuration.layout:
                _fill(fresh, None, (configuration.device, None), patterns, queues, segments)
    left = [(device, replica) for (device, _), queue in queues.items() for replica in queue]
    left.sort(key=lambda item: -max(item[1].share.sm_pct, 0.0))
    return [(device, replica) for device, replica in left if not bins.first_fit(device, replica)]


def _queue_replicas(covers: Mapping[str, Cover], choice: Choice) -> _Queues:
    """Return the replicas by device and slot, largest memory first."""
    queues: defaultdict[tuple[str, PartitionSlot], list[PlacedReplica]] = defaultdict(list)
    for cover in covers.values():
        for device, replica in cover.replicas():
            memory = choice.grids[device, replica.share.mig].count(replica.memory_bytes)
            queues[device, PartitionSlot(replica.share, memory)].append(replica)
    for queue in queues.values():
        queue.sort(key=lambda replica: -(replica.memory_bytes or 0))
    return dict(queues)


def _by_kind(patterns: Sequence[tuple[SharePattern, int]]) -> dict[PartitionKind, list[SharePattern]]:
    by_kind: dict[PartitionKind, list[SharePattern]] = {}
    for pattern, count in patterns:
        by_kind.setdefault(pattern.kind, []).extend([pattern] * count)
    return by_kind


def _fill(
    fresh: Bin,
    start: int | None,
    kind: PartitionKind,
    patterns: dict[PartitionKind, list[SharePattern]],
    queues: _Queues,
    segments: Segments,
) -> None:
    """Fill a partition with the next pattern, as long as replicas for its slots remain."""
    if not patterns.get(kind):
        return
    position: int | None = None
    for slot, count in patterns[kind].pop(0).slots:
        queue = queues.get((kind[0], slot), [])
        for _ in range(count):
            index = next((i for i, task in enumerate(queue) if _try_add(fresh, start, position, task, segments)), None)
            if index is None:
                break
            queue.pop(index)
            position = len(fresh.partitions) - 1


def _try_add(fresh: Bin, start: int | None, position: int | None, replica: PlacedReplica, segments: Segments) -> bool:
    if position is not None:
        return fresh.add_inside(position, replica, segments)
    if start is None:
        return fresh.add(replica, segments)
    fresh.add_instance(replica, start)
    return True


def merge_replicas(
    problem: Problem, segments: Segments, choices: Choices, gpus: Sequence[PlacedGpu]
) -> tuple[PlacedGpu, ...]:
    """Return the devices with replicas of a model in a partition merged; no share grows."""
    merged: dict[PlacedGpu, PlacedGpu] = {}
    for gpu in gpus:
        if gpu not in merged:
            device = problem.device(gpu.device)
            parts = tuple(_merge_in_partition(device, segments, choices, part) for part in gpu.partitions)
            merged[gpu] = PlacedGpu(gpu.device, parts)
    return tuple(merged[gpu] for gpu in gpus)


def _merge_in_partition(
    device: Device, segments: Segments, choices: Choices, partition: PlacedPartition
) -> PlacedPartition:
    for model, count in Counter(replica.model for replica in partition.replicas).items():
        if count < 2:
            continue
        replicas = [replica for replica in partition.replicas if replica.model == model]
        single = _find_single(device, choices, partition, replicas, segments.problem.demand(model).rate_rps)
        if single is None:
            continue
        other_replicas = tuple(replica for replica in partition.replicas if replica.model != model)
        candidate = replace(partition, replicas=(single, *other_replicas))
        if segments.holds(device, candidate):
            partition = candidate
    return partition


def _find_single(
    device: Device, choices: Choices, partition: PlacedPartition, replicas: Sequence[PlacedReplica], asked_rps: float
) -> PlacedReplica | None:
    """Return one replica that serves the rate of these; None if no known segment takes as little space."""
    rate = math.fsum(replica.rate_rps for replica in replicas)
    if math.isclose(rate, asked_rps, rel_tol=1e-9):
        rate = asked_rps  # the whole demand: parts must not add up to a rounded sum
    most_pct = sum(replica.share.sm_pct for replica in replicas) * (1.0 + 1e-12)
    memory = sum(replica.memory_bytes or 0 for replica in replicas)
    able = [
        segment
        for segment in choices[replicas[0].model]
        if (segment.device, segment.share.mig) == (device.name, partition.mig)
        and segment.share.sm_pct <= min(most_pct, 100.0)
        and segment.capacity_rps >= rate * (1.0 - 1e-12)
        and (segment.memory_bytes or 0) <= memory
    ]
    best = min(able, key=lambda segment: (segment.share.sm_pct, segment.processes), default=None)
    return None if best is None else best.replica(rate)
