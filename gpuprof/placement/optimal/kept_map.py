"""Maps that keep the running replicas of a previous map."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import DeploymentMap, Partition, share_of
from gpuprof.domain.device import Device
from gpuprof.domain.fleet import Fleet
from gpuprof.domain.mig import is_legal, make_placement
from gpuprof.errors import InputError
from gpuprof.placement.bin import fits_device
from gpuprof.placement.device_assignment import assign_devices
from gpuprof.placement.optimal.judge import Judge
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Problem

#: Plans a problem anew.
Planner = Callable[[Problem], Placement]


@dataclass(frozen=True, slots=True)
class KeptMap:
    """Keeps as much of a running map as costs nothing."""

    problem: Problem
    judge: Judge
    previous: DeploymentMap

    def choose(self, planned: Placement, plan: Planner) -> Placement:
        """Return the map of fewest moved replicas among those as good as ``planned``."""
        return min([planned, *self._list_maps(planned, plan)], key=self._rank)

    def _rank(self, placement: Placement) -> tuple[object, ...]:
        moves = assign_devices(placement.gpus, self.previous).moves
        return *self.judge.rank(placement), moves

    def _list_maps(self, planned: Placement, plan: Planner) -> Iterator[Placement]:
        """Yield the running map with its remainder placed, replanning as many devices as make it cost no more.

        The remainder may need a further device it does not fill, while others have capacity that does not fit it: then
        the least filled devices are replanned too, twice as many each time.
        """
        old_gpus, freed = self._list_standing(), 0
        while freed < len(old_gpus) and not self.judge.limit.is_over:
            try:
                placement = self._place(old_gpus[freed:], plan)
            except InputError:
                return
            if placement is None:
                return
            yield replace(
                placement,
                lower_bound_gpus=planned.lower_bound_gpus,
                lower_bound_cost_per_hour=planned.lower_bound_cost_per_hour,
                upper_bound_goodput_rps=planned.upper_bound_goodput_rps,
            )
            if self.judge.rank(placement) <= self.judge.rank(planned):
                return
            freed = 2 * freed or 1

    def _place(self, old_gpus: Sequence[PlacedGpu], plan: Planner) -> Placement | None:
        """Return the standing devices with the rest of the demands placed; None where an SLO would break."""
        kept_map = self.judge.settle(self.judge.share_out(old_gpus), "what runs already")
        if not self.judge.is_sound(kept_map):
            return None
        remainder = self._find_rest(kept_map)
        if remainder is None:
            return kept_map
        new_gpus = plan(remainder).gpus
        return self.judge.settle((*kept_map.gpus, *new_gpus), "what runs already") if new_gpus else kept_map

    def _list_standing(self) -> list[PlacedGpu]:
        """Return the legal devices of the previous map within the fleet, the least filled first."""
        free = {
            entry.device.name: math.inf if entry.count is None else entry.count for entry in self.problem.fleet.entries
        }
        quotas = {demand.model: demand.max_replicas or math.inf for demand in self.problem.demands}
        old_gpus = []
        for gpu in self._list_previous(quotas):
            counts = Counter(replica.model for replica in gpu.replicas())
            if free[gpu.device] > 0 and all(quotas[model] >= count for model, count in counts.items()):
                old_gpus.append(gpu)
                free[gpu.device] -= 1
                for model, count in counts.items():
                    quotas[model] -= count
        return sorted(old_gpus, key=self._fill_price)

    def _fill_price(self, gpu: PlacedGpu) -> float:
        device = self.problem.device(gpu.device)
        used_fraction = math.fsum(device.fraction(replica.share) for replica in gpu.replicas())
        return used_fraction * self.problem.entry(gpu.device).price_per_hour

    def _list_previous(self, models: dict[str, float]) -> Iterator[PlacedGpu]:
        kinds = {entry.device.name: entry.device for entry in self.problem.fleet.entries}
        for node in self.previous.nodes:
            for gpu in node.gpus:
                if gpu.device not in kinds:
                    continue
                try:
                    parts = tuple(self._read_partition(kinds[gpu.device], part, models) for part in gpu.partitions)
                except InputError:
                    continue
                old_gpu = PlacedGpu(gpu.device, tuple(part for part in parts if part.replicas))
                if old_gpu.partitions and self._is_legal(kinds[gpu.device], old_gpu):
                    yield old_gpu

    def _read_partition(self, device: Device, partition: Partition, models: dict[str, float]) -> PlacedPartition:
        replicas = []
        for p in partition.replicas:
            if p.model in models and not p.max_wait_ms:  # replicas waiting for full batches are no longer planned
                replica = PlacedReplica(p.model, p.batch, p.processes, share_of(partition, p), 0.0)
                memory = self.judge.segments.memory_bytes(self.judge.segments.estimate(device, replica.workload))
                replicas.append(replace(replica, memory_bytes=memory))
        mig = partition.mig
        return PlacedPartition(
            tuple(replicas), None if mig is None else mig.profile, None if mig is None else mig.start
        )

    def _is_legal(self, device: Device, gpu: PlacedGpu) -> bool:
        """Return whether a device's configuration and contents are legal, and its replicas within the options."""
        options, search_space = self.problem.options, self.judge.segments.search_space
        instances = [part for part in gpu.partitions if part.mig is not None]
        planned = all(
            replica.batch <= options.max_batch and replica.processes <= search_space.processes(replica.share)[-1]
            for replica in gpu.replicas()
        )
        is_complete = len(instances) == len(gpu.partitions) or len(gpu.partitions) == 1
        legal = is_legal(device, [make_placement(device, str(part.mig), part.start or 0) for part in instances])
        return planned and is_complete and legal and all(fits_device(device, part) for part in gpu.partitions)

    def _find_rest(self, placement: Placement) -> Problem | None:
        """Return the problem of the remaining demands, None when nothing remains."""
        rates = placement.rates_rps()
        replicas = Counter(replica.model for gpu in placement.gpus for replica in gpu.replicas())
        remainders = [_find_remainder(d, rates.get(d.model, 0.0), replicas[d.model]) for d in self.problem.demands]
        demands = tuple(demand for demand in remainders if demand is not None)
        used_counts = Counter(gpu.device for gpu in placement.gpus)
        entries = tuple(
            replace(entry, count=None if entry.count is None else entry.count - used_counts[entry.device.name])
            for entry in self.problem.fleet.entries
        )
        fleet = Fleet(tuple(entry for entry in entries if entry.count != 0))
        if not demands or not fleet.entries:
            return None
        return replace(self.problem, demands=demands, fleet=fleet, previous=None, alike={})


def _find_remainder(demand: Demand, served_rps: float, replicas: int) -> Demand | None:
    """Return the remainder of a demand, None when nothing remains or no more replicas are allowed."""
    if served_rps >= demand.rate_rps * (1.0 - TOLERANCE):
        return None
    max_replicas = None if demand.max_replicas is None else demand.max_replicas - replicas
    if max_replicas == 0:
        return None
    floor = demand.min_goodput_rps
    return replace(
        demand,
        rate_rps=demand.rate_rps - served_rps,
        max_replicas=max_replicas,
        min_goodput_rps=None if floor is None else max(0.0, floor - served_rps),
    )
