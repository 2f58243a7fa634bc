"""A bin of bin packing: a device a policy is filling."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gpuprof.domain.device import Device, MigProfile
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.segment import Segments

#: Maximum number of CUDA MPS clients of a device (CUDA up to 13.0).
MPS_CLIENTS = 48


@dataclass(slots=True)
class Bin:
    """A device and its partitions: MIG instances, or the whole device shared by percentage."""

    device: Device
    partitions: list[PlacedPartition] = field(default_factory=list)
    #: True if the replicas of the whole device have no enforced shares, each free to use the whole device.
    unshared: bool = False

    def add(self, replica: PlacedReplica, segments: Segments) -> bool:
        """Put ``replica`` here if geometry, shares, memory and all SLOs allow it; return whether they did."""
        if replica.share.mig is None:
            return self._add_shared(replica, segments)
        return self._add_instance(replica, segments)

    def add_instance(self, replica: PlacedReplica, start: int) -> None:
        """Put a replica into an instance of its own at ``start``, which must be free."""
        self.partitions.append(PlacedPartition((replica,), replica.share.mig, start))

    @property
    def is_empty(self) -> bool:
        """Return whether the device holds nothing."""
        return not self.partitions

    def to_gpu(self) -> PlacedGpu:
        """Return the device with its partitions, instances in the order of their slots."""
        return PlacedGpu(self.device.name, tuple(sorted(self.partitions, key=lambda p: p.start or 0)))

    def add_inside(self, position: int, replica: PlacedReplica, segments: Segments) -> bool:
        """Put ``replica`` into a partition if there is room and all its replicas keep their SLOs."""
        partition = self.partitions[position]
        candidate = replace(partition, replicas=(*partition.replicas, replica))
        if partition.mig != replica.share.mig or not self._fits(candidate):
            return False
        if not segments.holds(self.device, candidate):
            return False
        self.partitions[position] = candidate
        return True

    def _fits(self, partition: PlacedPartition) -> bool:
        replicas = partition.replicas
        return (
            (partition.unshared or sum(replica.share.sm_pct for replica in replicas) <= 100.0 + TOLERANCE)
            and (len(replicas) < 2 or sum(replica.processes for replica in replicas) <= MPS_CLIENTS)
            and sum(replica.memory_bytes or 0 for replica in replicas) <= self.device.memory_bytes(replicas[0].share)
        )

    def _add_shared(self, replica: PlacedReplica, segments: Segments) -> bool:
        if self.partitions:
            return self.add_inside(0, replica, segments)
        single = PlacedPartition((replica,), unshared=self.unshared)
        if self._fits(single):
            self.partitions = [single]
        return bool(self.partitions)

    def _add_instance(self, replica: PlacedReplica, segments: Segments) -> bool:
        if any(partition.mig is None for partition in self.partitions):
            return False
        if replica.share.sm_pct < 100.0 and any(
            self.add_inside(position, replica, segments) for position in range(len(self.partitions))
        ):
            return True
        profile = self.device.mig_profile(str(replica.share.mig))
        start = self.free_start(profile)
        if start is None:
            return False
        self.partitions.append(PlacedPartition((replica,), profile.name, start))
        return True

    def free_start(self, profile: MigProfile) -> int | None:
        """Return the slot where an instance of ``profile`` blocks the fewest other placements, None if none is free."""
        present = [self.device.mig_profile(str(partition.mig)) for partition in self.partitions]
        if sum(item.name == profile.name for item in present) >= profile.max_count:
            return None
        used = {
            slot
            for partition, item in zip(self.partitions, present, strict=True)
            for slot in range(partition.start or 0, (partition.start or 0) + item.memory_slices)
        }
        free = [start for start in profile.start_slots if not used & set(range(start, start + profile.memory_slices))]
        return min(free, key=lambda start: (self._count_blocked(used, start, profile), -start), default=None)

    def _count_blocked(self, used: set[int], start: int, profile: MigProfile) -> int:
        """Count the presently possible placements of all profiles an instance at ``start`` would block."""
        own_slots = set(range(start, start + profile.memory_slices))
        count = 0
        for candidate in self.device.mig_profiles:
            for slot in candidate.start_slots:
                slots = set(range(slot, slot + candidate.memory_slices))
                count += not slots & used and bool(slots & own_slots)
        return count
