"""Puts the segments that the integer program chose onto devices cut up by the patterns that it chose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpuprof.placement.bin import Bin
from gpuprof.placement.cover import Cover
from gpuprof.placement.fleet_bins import FleetBins
from gpuprof.placement.pattern import Pattern
from gpuprof.placement.placement import PlacedReplica
from gpuprof.placement.segment import Segments
from gpuprof.share import Share

_Queues = dict[tuple[str, Share], list[PlacedReplica]]


def realise(
    covers: Mapping[str, Cover], patterns: Sequence[tuple[Pattern, int]], segments: Segments, bins: FleetBins
) -> list[tuple[str, PlacedReplica]]:
    """Fill ``bins``; return (device, replica) for what found no place.

    The patterns hold every segment by their shares; memory and interference between the models that meet on a
    device are seen only here. What a pattern cannot take goes wherever it fits, on a new device if there is one.
    """
    queues = _queued(covers)
    for pattern, count in patterns:
        for _ in range(count):
            fresh = bins.open(pattern.device)
            if fresh is not None:
                _fill(fresh, pattern, queues, segments)
    left = [(device, replica) for (device, _), queue in queues.items() for replica in queue]
    left.sort(key=lambda item: -max(item[1].share.sm_pct, 0.0))
    return [(device, replica) for device, replica in left if not bins.first_fit(device, replica)]


def _queued(covers: Mapping[str, Cover]) -> _Queues:
    """Return the replicas by device and share, those that need most memory first."""
    queues: defaultdict[tuple[str, Share], list[PlacedReplica]] = defaultdict(list)
    for cover in covers.values():
        for device, replica in cover.replicas():
            queues[device, replica.share].append(replica)
    for queue in queues.values():
        queue.sort(key=lambda replica: -(replica.memory_bytes or 0))
    return dict(queues)


def _fill(fresh: Bin, pattern: Pattern, queues: _Queues, segments: Segments) -> None:
    for item in pattern.layout:
        queue = queues.get((pattern.device, Share(100.0, item.profile.name)))
        if queue:
            fresh.add_instance(queue.pop(0), item.start)
    if pattern.layout:
        return
    for share, count in pattern.slots:
        queue = queues.get((pattern.device, share), [])
        for _ in range(count):
            index = next((i for i, replica in enumerate(queue) if fresh.add(replica, segments)), None)
            if index is None:
                break
            queue.pop(index)
