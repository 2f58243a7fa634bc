"""Time sharing on a CPU: lightly loaded models take turns in one share instead of a share each.

The least profiled share of a CPU is mostly a core, so a machine of two cores would hold only two models. Models that
take turns (`gpuprof.rules.turns`) run one batch at a time on all cores of their share; each batch waits for at most one
batch of each of the others, and every SLO must hold with that wait.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Problem, collect_evidence
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced


def share_time(problem: Problem, placement: Placement, limit: Limit) -> Placement:
    """Return the placement with CPUs time-shared where this serves more demands, or takes fewer devices.

    Bounds for maps without time sharing are replaced by bounds from the devices' work. Unchanged with the option
    ``isolate``, or without a CPU in the fleet.
    """
    devices = {entry.device.name: entry.device for entry in problem.fleet.entries if entry.device.kind == "cpu"}
    if problem.options.isolate or not devices:
        return placement
    segments = Segments(problem)
    sharing = _TimeSharing(problem, segments, devices)
    gpus = list(placement.gpus)
    try:
        for unplaced in placement.unplaced:  # in any case
            gpus = sharing.add(gpus, unplaced.model, unplaced.rate_rps)
        with problem.limits.until(limit):
            gpus = sharing.join(gpus)
    except TimeUpError:
        pass  # the joins so far are sound
    shared = placement
    if sharing.changed:
        shared = with_unplaced(problem, segments, replace(placement, gpus=tuple(gpus), unplaced=()))
        shared = replace(shared, found_by="time sharing")
        if check(to_map(problem, shared), collect_evidence(problem)):
            shared = placement  # replicas on several devices are one queue, which no device alone can verify
    return _with_work_bounds(problem, segments, shared)


@dataclass(slots=True)
class _TimeSharing:
    """Joins models on CPUs; ``changed`` is True after any join."""

    problem: Problem
    segments: Segments
    devices: Mapping[str, Device]
    changed: bool = False

    def add(self, gpus: Sequence[PlacedGpu], model: str, rate_rps: float) -> list[PlacedGpu]:
        """Return the devices with an unplaced demand: on a device that can share time, else on a new device."""
        used_counts = Counter(gpu.device for gpu in gpus)
        spare = (
            PlacedGpu(entry.device.name, ())
            for entry in self.problem.fleet.entries
            if entry.device.name in self.devices and used_counts[entry.device.name] < (entry.count or math.inf)
        )
        replicas = Counter(replica.model for gpu in gpus for replica in gpu.replicas())
        most = self.problem.demand(model).max_replicas or math.inf
        for position, gpu in enumerate((*gpus, *spare)):
            if replicas[model] >= most and all(replica.model != model for replica in gpu.replicas()):
                continue
            partition = self._share(gpu, [PlacedReplica(model, 1, 1, Share(), rate_rps)])
            if partition is not None:
                self.changed = True
                shared_gpu = PlacedGpu(gpu.device, (partition,))
                return [*gpus[:position], shared_gpu, *gpus[position + 1 :]]
        return list(gpus)

    def join(self, gpus: Sequence[PlacedGpu]) -> list[PlacedGpu]:
        """Return the models of the devices on fewer devices, the least loaded emptied first."""
        remaining = sorted(gpus, key=self._load)
        position = 0
        while position < len(remaining):
            source = remaining[position]
            for index in range(len(remaining) - 1, -1, -1):
                target = remaining[index]
                if index == position or target.device not in self.devices or source.device not in self.devices:
                    continue
                partition = self._share(target, list(source.replicas()))
                if partition is not None:
                    self.changed = True
                    remaining[index] = PlacedGpu(target.device, (partition,))
                    del remaining[position]
                    position -= 1
                    break
            position += 1
        return remaining

    def _load(self, gpu: PlacedGpu) -> float:
        return math.fsum(self._busy(self.problem.device(gpu.device), replica) for replica in gpu.replicas())

    def _busy(self, device: Device, replica: PlacedReplica) -> float:
        """Return the part of a device's time a replica takes."""
        try:
            throughput_rps = self.segments.throughput_rps(device, replace(replica.workload, turns=0))
        except InputError:
            return device.fraction(replica.share)
        return device.fraction(replica.share) * replica.rate_rps / throughput_rps

    def _share(self, gpu: PlacedGpu, new_replicas: Sequence[PlacedReplica]) -> PlacedPartition | None:
        """Return a device's partition with further models, None where no time sharing keeps all SLOs.

        The busiest replicas keep their shares as long as the others can take turns in the rest of the device.
        """
        device = self.devices.get(gpu.device)
        if device is None or any(partition.mig for partition in gpu.partitions):
            return None
        rates: dict[str, float] = {}
        for replica in (*gpu.replicas(), *new_replicas):
            rates[replica.model] = rates.get(replica.model, 0.0) + replica.rate_rps
        names = {replica.model for replica in new_replicas}
        by_size = sorted(
            (replica for replica in gpu.replicas() if not replica.turns and replica.model not in names),
            key=lambda replica: -self._busy(device, replica),
        )
        for size in range(len(by_size), -1, -1):
            fixed = by_size[:size]
            left = dict(rates)
            for replica in fixed:
                left[replica.model] -= replica.rate_rps
            rotating = {model: rate for model, rate in left.items() if rate > TOLERANCE * rates[model]}
            if len(rotating) < 2 or rotating.keys() & {replica.model for replica in fixed}:
                continue
            for share in self._shares(device, rotating, 100.0 - math.fsum(replica.share.sm_pct for replica in fixed)):
                partition = self._take_turns(device, fixed, rotating, share)
                if partition is not None:
                    return partition
        return None

    def _shares(self, device: Device, rates: Mapping[str, float], free_pct: float) -> Iterator[Share]:
        """Yield the largest share within ``free_pct`` that is listed for every model."""
        sets = [set(self.problem.estimator.shares(model, device)) for model in rates]
        fitting = [share for share in set.intersection(*sets) if not share.mig and share.sm_pct <= free_pct + TOLERANCE]
        yield from sorted(fitting, key=lambda share: -share.sm_pct)[:1]

    def _take_turns(
        self, device: Device, fixed: Sequence[PlacedReplica], rates: Mapping[str, float], share: Share
    ) -> PlacedPartition | None:
        for cycles in count(1):  # a batch that holds the arrivals of more cycles waits less, until none is large enough
            batches = self._choose_batches(device, rates, share, cycles)
            if batches is None:
                return None
            replicas = list(fixed)
            for model, rate_rps in rates.items():
                workload = Workload(model, batches[model], share, turns=1)
                memory = self.segments.memory_bytes(self.segments.estimate(device, replace(workload, turns=0)))
                replicas.append(PlacedReplica(model, batches[model], 1, share, rate_rps, memory_bytes=memory, turns=1))
            partition = PlacedPartition(tuple(replicas))
            if self._keeps_slos(device, partition):
                return partition
        return None

    def _choose_batches(
        self, device: Device, rates: Mapping[str, float], share: Share, cycles: int
    ) -> dict[str, int] | None:
        """Return for each model the least batch holding the arrivals of ``cycles`` cycles, None where none does.

        A larger batch lengthens the cycle, so batches grow from the least until all are large enough.
        """
        sizes = {model: self.segments.search_space.listed_batches(model, device, share) for model in rates}
        if not all(sizes.values()):
            return None
        smallest = {model: batches[0] for model, batches in sizes.items()}
        while True:
            try:
                cycle_s = 1e-3 * math.fsum(
                    self.segments.latency_ms(device, Workload(model, batch, share)) for model, batch in smallest.items()
                )
            except InputError:
                return None
            least = {
                model: next((batch for batch in sizes[model] if batch > cycles * rate_rps * cycle_s), None)
                for model, rate_rps in rates.items()
            }
            larger = {model: max(batch, smallest[model]) for model, batch in least.items() if batch is not None}
            if len(larger) < len(smallest):
                return None
            if larger == smallest:
                return smallest
            smallest = larger

    def _keeps_slos(self, device: Device, partition: PlacedPartition) -> bool:
        if sum(replica.memory_bytes or 0 for replica in partition.replicas) > device.dram_bytes:
            return False
        return all(
            self.segments.meets(
                self.problem.demand(replica.model),
                device,
                replica.workload,
                replica.rate_rps,
                partition.beside(replica),
            )
            for replica in partition.replicas
        )


def _with_work_bounds(problem: Problem, segments: Segments, placement: Placement) -> Placement:
    """Return the placement with bounds that also hold for maps with time sharing.

    A request takes a part of a device's time, the least over the allowed batches and shares; the total over all
    requests bounds the number of devices.
    """
    least_devices, least_cost = 0.0, 0.0
    for demand in problem.demands:
        parts = [
            (part, part * entry.price_per_hour)
            for entry in problem.fleet.entries
            if (part := _least_part(segments, demand.model, entry.device)) is not None
        ]
        if not parts:
            continue  # no map serves it
        least_devices += demand.rate_rps * min(part for part, _ in parts)
        least_cost += demand.rate_rps * min(cost for _, cost in parts)
    if placement.unplaced:
        return replace(placement, lower_bound_gpus=None, lower_bound_cost_per_hour=None, upper_bound_goodput_rps=None)
    cheapest = min(entry.price_per_hour for entry in problem.fleet.entries)
    count = max(1, math.ceil(least_devices - 1e-6))
    same_price = len({entry.price_per_hour for entry in problem.fleet.entries}) == 1
    return replace(
        placement,
        lower_bound_gpus=count,
        lower_bound_cost_per_hour=count * cheapest if same_price else max(cheapest, least_cost),
        upper_bound_goodput_rps=None,
    )


def _least_part(segments: Segments, model: str, device: Device) -> float | None:
    """Return the least part of a device's time in seconds a request takes, None without a workload.

    Zero, which bounds nothing, where batches between the listed ones may run: they are too many to evaluate.
    """
    parts = []
    for share in segments.problem.estimator.shares(model, device):
        if segments.search_space.is_dense(model, device, share):
            return 0.0
        for workload in segments.workloads(model, device, share):
            try:
                parts.append(device.fraction(share) / segments.throughput_rps(device, workload))
            except InputError:
                continue
    return min(parts, default=None)
