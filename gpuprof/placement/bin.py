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
        together = replace(partition, replicas=(*partition.replicas, replica))
        if partition.mig != replica.share.mig or not self._fits(together):
            return False
        if not segments.holds(self.device, together):
            return False
        self.partitions[position] = together
        return True

    def _fits(self, partition: PlacedPartition) -> bool:
        replicas = partition.replicas
        return (
            (partition.unshared or sum(one.share.sm_pct for one in replicas) <= 100.0 + TOLERANCE)
            and (len(replicas) < 2 or sum(one.processes for one in replicas) <= MPS_CLIENTS)
            and sum(one.memory_bytes or 0 for one in replicas) <= self.device.memory_bytes(replicas[0].share)
        )

    def _add_shared(self, replica: PlacedReplica, segments: Segments) -> bool:
        if self.partitions:
            return self.add_inside(0, replica, segments)
        alone = PlacedPartition((replica,), unshared=self.unshared)
        if self._fits(alone):
            self.partitions = [alone]
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
        if sum(one.name == profile.name for one in present) >= profile.max_count:
            return None
        taken = {
            slot
            for partition, one in zip(self.partitions, present, strict=True)
            for slot in range(partition.start or 0, (partition.start or 0) + one.memory_slices)
        }
        free = [start for start in profile.start_slots if not taken & set(range(start, start + profile.memory_slices))]
        return min(free, key=lambda start: (self._count_blocked(taken, start, profile), -start), default=None)

    def _count_blocked(self, taken: set[int], start: int, profile: MigProfile) -> int:
        """Count the presently possible placements of all profiles an instance at ``start`` would block."""
        ours = set(range(start, start + profile.memory_slices))
        count = 0
        for other in self.device.mig_profiles:
            for slot in other.start_slots:
                theirs = set(range(slot, slot + other.memory_slices))
                count += not theirs & taken and bool(theirs & ours)
        return count
