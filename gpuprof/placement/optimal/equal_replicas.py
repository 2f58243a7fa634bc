"""Maps of equal replicas with one model on each device, and the search for dispensable devices.

Both evaluate neighbours and pools together: each replica is as slow as its neighbours make it, and the replicas of a
model serve the queue the router forms for all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import BatchServer
from gpuprof.errors import InputError
from gpuprof.placement.bin import MPS_CLIENTS, Bin
from gpuprof.placement.cover import MOST_REPLICAS
from gpuprof.placement.limit import Limit
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.pool import Gpus, Pools
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_bound import most_within_rps
from gpuprof.placement.segment import Segments

#: Maximum number of demands and of devices: with more, evaluating all pools takes too long.
_MOST_DEMANDS, _MOST_DEVICES = 20, 40
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class _FullDevice:
    """A device filled with equal replicas of a model."""

    gpu: PlacedGpu
    server: BatchServer  #: Each replica with the others as neighbours.
    price_per_hour: float
    least_replicas: int  #: Minimum number of replicas serving the demand, however short their queue.

    @property
    def replicas(self) -> int:
        """Number of replicas on a device."""
        return sum(1 for _ in self.gpu.replicas())

    def cost(self, replicas: int) -> float:
        """Return the price per hour of the devices that ``replicas`` replicas take."""
        return self.price_per_hour * math.ceil(replicas / self.replicas)


@dataclass(slots=True)
class EqualReplicas:
    """Places the demands of a problem without a latency budget."""

    problem: Problem
    segments: Segments  #: Segments of the same problem.
    pools: Pools
    limit: Limit

    def place(self) -> Gpus | None:
        """Return the cheapest map of equal replicas, with one model on each device.

        None with more than twenty demands, or where the fleet is too small.
        """
        gpus: list[PlacedGpu] = []
        if len(self.problem.demands) > _MOST_DEMANDS:
            return None
        for demand in self.problem.demands:
            filled = self._place_demand(demand)
            if filled is None:
                return None
            gpus += filled
        used = Counter(gpu.device for gpu in gpus)
        fits = all(
            entry.count is None or used[entry.device.name] <= entry.count for entry in self.problem.fleet.entries
        )
        return tuple(gpus) if fits else None

    def drop_devices(self, gpus: Gpus) -> Gpus:
        """Return the devices without dispensable devices; the dearest and emptiest are dropped first."""
        improved: Gpus | None = gpus
        if len(gpus) > _MOST_DEVICES or len(self.problem.demands) > _MOST_DEMANDS:
            return gpus
        while improved is not None:
            gpus, improved = improved, None
            for leaving in sorted(dict.fromkeys(gpus), key=self._dropping_order):
                if self.limit.is_over:
                    break
                left = list(gpus)
                left.remove(leaving)
                improved = self._take_over(left, leaving)
                if improved is not None:
                    break
        return gpus

    def _place_demand(self, demand: Demand) -> list[PlacedGpu] | None:
        options = sorted(self._list_devices(demand), key=lambda option: option.cost(option.least_replicas))
        best: tuple[float, int, _FullDevice] | None = None
        for option in options:
            if best is not None and (option.cost(option.least_replicas) >= best[0] or self.limit.is_over):
                break
            count = self._count_replicas(demand, option)
            if count is not None and (best is None or option.cost(count) < best[0]):
                best = option.cost(count), count, option
        if best is None:
            return None
        _, count, option = best
        rate_rps = demand.rate_rps / count
        replicas = [replace(replica, rate_rps=rate_rps) for replica in option.gpu.replicas()]
        whole, rest = divmod(count, option.replicas)
        sizes = [option.replicas] * whole + ([rest] if rest else [])
        return [_keep_first(option.gpu, replicas, size) for size in sizes]

    def _count_replicas(self, demand: Demand, option: _FullDevice) -> int | None:
        """Return the least number of replicas serving a demand; None where the maximum number does not."""
        most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)

        def enough(count: int) -> bool:
            return self.pools.keeps(demand, Counter({option.server: count}), demand.rate_rps)

        low = high = option.least_replicas
        while high <= most and not enough(high):
            low, high = high + 1, 2 * high
        if high > most:
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle + 1, high)
        return low

    def _list_devices(self, demand: Demand) -> Iterator[_FullDevice]:
        """Yield the ways to fill a device of each kind with equal replicas that may keep the SLO."""
        for entry in self.problem.fleet.entries:
            for share in self.problem.estimator.shares(demand.model, entry.device):
                for workload in self.segments.workloads(demand.model, entry.device, share):
                    try:
                        made = self._fill_device(entry.device, workload)
                    except InputError:
                        continue  # no estimate of this batch, of a smaller batch, or of this batch with neighbours
                    if made is None:
                        continue
                    gpu, server = made
                    most_rps = most_within_rps(server, demand.slo.latency_ms, demand.slo.percentile)
                    if most_rps * MOST_REPLICAS > demand.rate_rps:
                        least = max(1, math.ceil(demand.rate_rps / most_rps * (1.0 - _EPSILON)))
                        yield _FullDevice(gpu, server, entry.price_per_hour, least)

    def _fill_device(self, device: Device, workload: Workload) -> tuple[PlacedGpu, BatchServer] | None:
        """Return a device with as many equal replicas as fit, and a replica as slow as the others make it."""
        memory = self.segments.memory_bytes(self.segments.estimate(device, workload))
        if (memory or 0) > device.memory_bytes(workload.share):
            return None
        model, share = workload.model, workload.share
        replica = PlacedReplica(model, workload.batch, workload.processes, share, 0.0, memory_bytes=memory)
        filled = Bin(device)
        if share.mig is not None:
            profile = device.mig_profile(share.mig)
            while (start := filled.free_start(profile)) is not None:
                filled.add_instance(replica, start)
            return (filled.to_gpu(), self.segments.server(device, workload)) if not filled.is_empty else None
        count = min(int((100.0 + _EPSILON) / share.sm_pct), max(1, MPS_CLIENTS // workload.processes))
        if memory:
            count = min(count, device.memory_bytes(share) // memory)
        partition = PlacedPartition((replica,) * count)
        return PlacedGpu(device.name, (partition,)), self.segments.server(device, workload, (workload,) * (count - 1))

    def _dropping_order(self, gpu: PlacedGpu) -> tuple[float, float]:
        device = self.problem.device(gpu.device)
        filled = math.fsum(device.fraction(replica.share) for replica in gpu.replicas())
        return -self.problem.entry(gpu.device).price_per_hour, filled

    def _take_over(self, gpus: list[PlacedGpu], leaving: PlacedGpu) -> Gpus | None:
        """Return the devices with the needed replicas of a removed device; None where these do not fit."""
        if self._serves(gpus):
            return tuple(gpus)
        device = self.problem.device(leaving.device)
        for replica in sorted(leaving.replicas(), key=lambda moved: -device.fraction(moved.share)):
            hosts = sorted(range(len(gpus)), key=lambda index: self._free_pct(gpus[index]), reverse=True)
            for index in hosts:
                host = self._host(gpus[index], replica)
                if host is not None:
                    gpus[index] = host
                    break
            if self.limit.is_over:
                return None
            if self._serves(gpus):
                return tuple(gpus)
        return None

    def _free_pct(self, gpu: PlacedGpu) -> float:
        if gpu.partitions[0].mig is not None:
            return 0.0
        return 100.0 - gpu.partitions[0].taken_pct

    def _host(self, gpu: PlacedGpu, replica: PlacedReplica) -> PlacedGpu | None:
        """Return a device with another replica in its free share; None where share or memory is insufficient."""
        device, partition = self.problem.device(gpu.device), gpu.partitions[0]
        listed = self.problem.estimator.shares(replica.model, device)
        if partition.mig is not None:
            return self._host_in_instance(device, gpu, replica, listed)
        steps = self.segments.search_space.steps(replica.model, device, None)
        percents = {*steps, *(share.sm_pct for share in listed if share.mig is None)}
        wanted = min(self._free_pct(gpu) + _EPSILON, replica.share.sm_pct if replica.share.mig is None else 100.0)
        percent = max((pct for pct in percents if pct <= wanted), default=None)
        clients = sum(standing.processes for standing in partition.replicas) + replica.processes
        if percent is None or partition.unshared or clients > MPS_CLIENTS:
            return None
        added = self._with_share(device, replica, Share(percent))
        together = None if added is None else (*partition.replicas, added)
        if together is None or sum(standing.memory_bytes or 0 for standing in together) > device.dram_bytes:
            return None
        return replace(gpu, partitions=(replace(partition, replicas=together),))

    def _host_in_instance(
        self, device: Device, gpu: PlacedGpu, replica: PlacedReplica, listed: tuple[Share, ...]
    ) -> PlacedGpu | None:
        """Return a device with another instance, of the replica's profile or else the largest that fits."""
        standing = Bin(device, list(gpu.partitions))
        names = {share.mig for share in listed if share.mig is not None}
        profiles = [profile for profile in device.mig_profiles if profile.name in names]
        for profile in sorted(profiles, key=lambda free: (free.name != replica.share.mig, -free.sms)):
            start = standing.free_start(profile)
            added = None if start is None else self._with_share(device, replica, Share(100.0, profile.name))
            if start is not None and added is not None:
                standing.add_instance(added, start)
                return standing.to_gpu()
        return None

    def _with_share(self, device: Device, replica: PlacedReplica, share: Share) -> PlacedReplica | None:
        """Return the replica under another share; None where it has no estimate there, or exceeds the memory."""
        workload = replace(replica.workload, share=share)
        try:
            memory = self.segments.memory_bytes(self.segments.estimate(device, workload))
        except InputError:
            return None
        if (memory or 0) > device.memory_bytes(share):
            return None
        return replace(replica, share=share, memory_bytes=memory)

    def _serves(self, gpus: list[PlacedGpu]) -> bool:
        """Return whether all demands keep their SLOs at their rates."""
        try:
            servers = self.pools.servers(gpus)
        except InputError:
            return False
        counts = {model: sum(pool.values()) for model, pool in servers.items()}
        return all(
            demand.model in servers
            and (demand.max_replicas is None or counts[demand.model] <= demand.max_replicas)
            and self.pools.keeps(demand, servers[demand.model], demand.rate_rps)
            for demand in self.problem.demands
        )


def _keep_first(gpu: PlacedGpu, replicas: list[PlacedReplica], count: int) -> PlacedGpu:
    """Return a device with the first ``count`` of its equal replicas."""
    if gpu.partitions[0].mig is None:
        return PlacedGpu(gpu.device, (PlacedPartition(tuple(replicas[:count])),))
    pairs = zip(gpu.partitions[:count], replicas, strict=False)
    return PlacedGpu(gpu.device, tuple(replace(part, replicas=(replica,)) for part, replica in pairs))
