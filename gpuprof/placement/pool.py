"""Pooled queues: the replicas of a model share one queue at the router."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.sojourn import Arrivals, BatchServer, queue_of
from gpuprof.placement.evidence import RELATIVE_ROUNDING
from gpuprof.placement.limit import Limit
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, map_replicas
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_limit import NEARLY_IDLE, find_load
from gpuprof.placement.segment import Segments

Gpus = tuple[PlacedGpu, ...]
_Pools = Mapping[str, Counter[BatchServer]]


@dataclass(slots=True)
class Pools:
    """Evaluates maps with a common queue for all replicas of a model."""

    problem: Problem  #: Without a latency budget.
    segments: Segments  #: Segments of the same problem.

    def keeps(self, demand: Demand, servers: Counter[BatchServer], rate_rps: float) -> bool:
        """Return whether these replicas together serve a rate within the demand's SLO."""
        if rate_rps <= 0.0:
            return True
        if not servers:
            return False
        queueing = queue_of(self.problem.queueing, demand.model)
        return self.problem.limits.in_time(queueing, tuple(servers.elements()), demand.slo, rate_rps)

    def most_rps(
        self, demand: Demand, servers: Counter[BatchServer], upto_rps: float, *, is_rough: bool = False
    ) -> float:
        """Return the largest rate up to ``upto_rps`` that these replicas serve together within the SLO.

        ``is_rough``: a result below ``upto_rps`` may be off by some percent.
        """
        if not servers:
            return 0.0
        if is_rough:
            return upto_rps if self.keeps(demand, servers, upto_rps) else self._guess_rps(demand, servers, upto_rps)
        queueing, pool = queue_of(self.problem.queueing, demand.model), tuple(servers.elements())
        # A closer search is useless where this rate is late.
        idle_rps = NEARLY_IDLE * min(upto_rps, math.fsum(server.capacity_rps for server in pool))
        return self.problem.limits.largest_rps(queueing, pool, demand.slo, idle_rps, upto_rps, RELATIVE_ROUNDING)

    def _guess_rps(self, demand: Demand, servers: Counter[BatchServer], late_rps: float) -> float:
        """Return the approximate largest rate within the SLO, by coarse queues, below the late rate ``late_rps``."""
        queueing, pool = queue_of(self.problem.queueing, demand.model), tuple(servers.elements())
        capacity_rps = math.fsum(server.capacity_rps for server in pool)

        def tail_ms(load: float) -> float:
            self.problem.limits.check_time()
            whole = queueing.pool(Arrivals(load * capacity_rps), pool, coarse=True).whole
            return whole.percentile(demand.slo.percentile)

        guess = min(late_rps / capacity_rps, 1.0)
        return min(
            find_load(tail_ms, demand.slo.latency_ms, guess) * capacity_rps, late_rps * (1.0 - RELATIVE_ROUNDING)
        )

    def servers(self, gpus: Sequence[PlacedGpu]) -> dict[str, Counter[BatchServer]]:
        """Return the replicas of each model as servers, slowed by their neighbours."""
        servers: defaultdict[str, Counter[BatchServer]] = defaultdict(Counter)
        for gpu in gpus:
            for replica, server in self._of_gpu(gpu):
                servers[replica.model][server] += 1
        return dict(servers)

    def _of_gpu(self, gpu: PlacedGpu) -> Iterator[tuple[PlacedReplica, BatchServer]]:
        device = self.problem.device(gpu.device)
        for partition in gpu.partitions:
            yield from zip(partition.replicas, self.segments.servers(device, partition), strict=True)

    def served_rps(self, gpus: Sequence[PlacedGpu], *, is_rough: bool = False) -> dict[str, float]:
        """Return the rate at which each model's replicas keep its SLO, up to the demanded rate; see `most_rps`."""
        pools = self.servers(gpus)
        demands = (demand for demand in self.problem.demands if demand.model in pools)
        return {
            demand.model: self.most_rps(demand, pools[demand.model], demand.rate_rps, is_rough=is_rough)
            for demand in demands
        }

    def rerate(self, gpus: Sequence[PlacedGpu], rates: Mapping[str, float]) -> Gpus:
        """Return the used devices with the models' rates divided in proportion to their replicas' capacities."""
        pools = self.servers(gpus)
        capacity = {
            model: math.fsum(server.capacity_rps * count for server, count in pool.items())
            for model, pool in pools.items()
        }

        def rerate(gpu: PlacedGpu, partition: PlacedPartition, replica: PlacedReplica) -> PlacedReplica:
            device = self.problem.device(gpu.device)
            own_rps = self.segments.server(device, replica.workload, partition.beside(replica)).capacity_rps
            return replace(replica, rate_rps=rates[replica.model] * own_rps / capacity[replica.model])

        return map_replicas(gpus, rerate)

    def drop_spare(self, gpus: Gpus, limit: Limit) -> Gpus:
        """Return the devices without superfluous ones; the most expensive and emptiest are tried first."""
        rates: defaultdict[str, float] = defaultdict(float)
        for gpu in gpus:
            for replica in gpu.replicas():
                rates[replica.model] += replica.rate_rps
        groups: defaultdict[object, list[PlacedGpu]] = defaultdict(list)
        for gpu in gpus:
            groups[_content(gpu)].append(gpu)
        counts = {key: len(group) for key, group in groups.items()}
        pools = self.servers(gpus)
        for key in sorted(groups, key=lambda key: self._spare_order(groups[key][0])):
            if limit.is_over:
                break
            of_one_gpu = self.servers(groups[key][:1])
            removed_count = self._count_removable(pools, of_one_gpu, counts[key], rates)
            counts[key] -= removed_count
            for model, servers in of_one_gpu.items():
                pools[model] = pools[model] - _times(servers, removed_count)
        left = [gpu for key, group in groups.items() for gpu in group[: counts[key]]]
        return self.rerate(left, rates) if len(left) < len(gpus) else gpus

    def _count_removable(self, pools: _Pools, of_one_gpu: _Pools, count: int, rates: Mapping[str, float]) -> int:
        """Return the number of dispensable devices among ``count`` equal devices, by bisection."""

        def enough(number: int) -> bool:
            return all(
                self.keeps(self.problem.demand(model), pools[model] - _times(servers, number), rates[model])
                for model, servers in of_one_gpu.items()
            )

        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if enough(middle) else (low, middle - 1)
        return low

    def _spare_order(self, gpu: PlacedGpu) -> tuple[float, float]:
        device = self.problem.device(gpu.device)
        used_fraction = math.fsum(device.fraction(replica.share) for replica in gpu.replicas())
        return -self.problem.entry(gpu.device).price_per_hour, used_fraction


def _times(servers: Counter[BatchServer], count: int) -> Counter[BatchServer]:
    return Counter({server: count * times for server, times in servers.items()})


def _content(gpu: PlacedGpu) -> object:
    """Return what equal devices have in common: everything except rates and the instances' starts."""
    parts = (
        (part.mig or "", tuple(sorted(str(replace(replica, rate_rps=0.0)) for replica in part.replicas)))
        for part in gpu.partitions
    )
    return gpu.device, tuple(sorted(parts))
