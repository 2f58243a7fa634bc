"""The devices of a fleet while a policy fills them."""

from __future__ import annotations

from dataclasses import replace

from gpuprof.domain.estimate import Workload
from gpuprof.placement.bin import Bin
from gpuprof.placement.placement import PlacedGpu, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments


class FleetBins:
    """Opens devices on demand, at most as many of a kind as the fleet has."""

    def __init__(self, problem: Problem, segments: Segments) -> None:
        self._segments = segments
        self._devices = {entry.device.name: entry.device for entry in problem.fleet.entries}
        self._left = {entry.device.name: entry.count for entry in problem.fleet.entries}
        self._full: dict[tuple[str, Workload, float], int] = {}
        self.bins: list[Bin] = []

    def first_fit(self, device: str, replica: PlacedReplica) -> bool:
        """Put ``replica`` on the first device of this kind that takes it, opening a device if available."""
        # A device that refused a replica keeps refusing it, since devices only fill up.
        workload = replace(replica.workload, model=self._segments.first_alike(replica.model))
        key = (device, workload, replica.rate_rps)
        for index in range(self._full.get(key, 0), len(self.bins)):
            self._full[key] = index
            if self.bins[index].device.name == device and self.bins[index].add(replica, self._segments):
                return True
        self._full[key] = len(self.bins)
        if self._left[device] == 0:
            return False
        fresh = Bin(self._devices[device])
        if not fresh.add(replica, self._segments):
            return False
        self._open(fresh)
        return True

    def open(self, device: str) -> Bin | None:
        """Return a new empty device of this kind, None when none is left."""
        if self._left[device] == 0:
            return None
        fresh = Bin(self._devices[device])
        self._open(fresh)
        return fresh

    def to_gpus(self) -> tuple[PlacedGpu, ...]:
        """Return the nonempty devices, kinds in the fleet's order."""
        order = list(self._devices)
        bins = [gpu_bin for gpu_bin in self.bins if not gpu_bin.is_empty]
        return tuple(gpu_bin.to_gpu() for gpu_bin in sorted(bins, key=lambda gpu_bin: order.index(gpu_bin.device.name)))

    def count(self, model: str) -> int:
        """Return the number of replicas of ``model`` on all devices."""
        return sum(
            replica.model == model
            for gpu_bin in self.bins
            for partition in gpu_bin.partitions
            for replica in partition.replicas
        )

    def _open(self, fresh: Bin) -> None:
        left = self._left[fresh.device.name]
        if left is not None:
            self._left[fresh.device.name] = left - 1
        self.bins.append(fresh)
