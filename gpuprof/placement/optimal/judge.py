"""Judges maps: the rates that their replicas serve, and the better of two maps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpuprof.errors import InputError
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.bounds import sum_prices
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica, Placement, map_replicas
from gpuprof.placement.pool import Gpus, Pools
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced


@dataclass(slots=True)
class Judge:
    """Evaluates the maps of a problem with pooled queues, or with a separate request stream for each replica."""

    problem: Problem
    segments: Segments  #: Of the same problem, for replicas with streams of their own.
    limit: Limit
    _pools: Pools = field(init=False)

    def __post_init__(self) -> None:
        self._pools = Pools(self.problem, self.segments)

    @property
    def is_pooled(self) -> bool:
        """Return whether the replicas of a model have one queue; with a latency budget they have separate streams."""
        return self.problem.options.latency_budget is None

    def rank(self, placement: Placement) -> tuple[tuple[float, ...], float]:
        """Return the key by which maps are compared: less is better."""
        return rank_map(self.problem, placement)

    def settle(self, gpus: Gpus, method: str, *, is_rough: bool = False) -> Placement:
        """Return the map with the rates that its replicas serve, up to the demanded ones, without idle devices.

        ``is_rough``: whether rates below the demanded ones may be off by some percent.
        """
        if self.is_pooled:
            rerated = self._pools.rerate(gpus, self._pools.served_rps(gpus, is_rough=is_rough))
            gpus = self._pools.drop_spare(rerated, self.limit)
        return with_unplaced(self.problem, self.segments, Placement("optimal", gpus, found_by=method))

    def raise_rates(self, placement: Placement) -> Placement:
        """Return the map with the replicas of unmet demands at their full capacity."""
        if self.is_pooled or not placement.unplaced:
            return placement
        missing = {shortfall.model: shortfall.rate_rps for shortfall in placement.unplaced}

        def raise_rate(gpu: PlacedGpu, partition: PlacedPartition, replica: PlacedReplica) -> PlacedReplica:
            if missing.get(replica.model, 0.0) <= 0.0:
                return replica
            spare = self._find_capacity(gpu, partition, replica) - replica.rate_rps
            added_rps = max(0.0, min(missing[replica.model], spare))
            missing[replica.model] -= added_rps
            return replace(replica, rate_rps=replica.rate_rps + added_rps)

        gpus = map_replicas(placement.gpus, raise_rate)
        return with_unplaced(self.problem, self.segments, replace(placement, gpus=gpus, unplaced=()))

    def share_out(self, gpus: Sequence[PlacedGpu]) -> Gpus:
        """Return the devices with each demand's rate divided by the capacities of its replicas.

        Raises `InputError` where a replica has no estimate beside its neighbours.
        """
        total: defaultdict[str, float] = defaultdict(float)

        def fill(gpu: PlacedGpu, partition: PlacedPartition, replica: PlacedReplica) -> PlacedReplica:
            capacity_rps = self._find_capacity(gpu, partition, replica)
            total[replica.model] += capacity_rps
            return replace(replica, rate_rps=capacity_rps)

        def reduce(gpu: PlacedGpu, partition: PlacedPartition, replica: PlacedReplica) -> PlacedReplica:
            factor = min(1.0, self.problem.demand(replica.model).rate_rps / total[replica.model])
            return replace(replica, rate_rps=replica.rate_rps * factor)

        return map_replicas(map_replicas(gpus, fill), reduce)

    def _find_capacity(self, gpu: PlacedGpu, partition: PlacedPartition, replica: PlacedReplica) -> float:
        """Return the rate of a replica beside its neighbours; in a pool, of its full batches."""
        device, beside = self.problem.device(gpu.device), partition.beside(replica)
        if self.is_pooled:
            return self.segments.server(device, replica.workload, beside).capacity_rps
        segment = self.segments.make(self.problem.demand(replica.model), device, replica.workload, beside)
        return 0.0 if segment is None else segment.capacity_rps

    def accept(self, gpus: Gpus) -> Gpus | None:
        """Return the devices with the rates that their pools serve; None where these are less than planned."""
        if not self.is_pooled:
            return gpus
        planned = Placement("", gpus).rates_rps()
        try:
            served_rps = self._pools.served_rps(gpus)
        except InputError:
            return None
        if any(served_rps.get(model, 0.0) < rate * (1.0 - TOLERANCE) for model, rate in planned.items()):
            return None
        return self._pools.drop_spare(self._pools.rerate(gpus, served_rps), self.limit)

    def is_sound(self, placement: Placement) -> bool:
        """Return whether every replica with a stream of its own keeps its SLO; the rates of pools are sound."""
        return self.is_pooled or all(
            self.segments.holds(self.problem.device(gpu.device), partition)
            for gpu in placement.gpus
            for partition in gpu.partitions
        )


def rank_map(problem: Problem, placement: Placement) -> tuple[tuple[float, ...], float]:
    """Return the unserved rates and the cost: less is better."""
    return _unserved_by_priority(problem, placement), round(sum_prices(problem, placement.gpus), 9)


def _unserved_by_priority(problem: Problem, placement: Placement) -> tuple[float, ...]:
    """Return the unserved rates, by falling priority, to a millionth of the rates; below its floor all is unserved."""
    levels = sorted({demand.priority for demand in problem.demands}, reverse=True)
    missing = dict.fromkeys(levels, 0.0)
    for unplaced in placement.unplaced:
        demand = problem.demand(unplaced.model)
        is_below_minimum = demand.rate_rps - unplaced.rate_rps < (demand.min_goodput_rps or 0.0) * (1.0 - 1e-9)
        missing[demand.priority] += demand.rate_rps if is_below_minimum else unplaced.rate_rps
    total = sum(demand.rate_rps for demand in problem.demands)
    return tuple(round(missing[level] / total, 6) for level in levels)
