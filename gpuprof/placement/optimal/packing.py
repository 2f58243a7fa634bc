"""Packs the segments chosen by the integer program onto devices with the chosen configurations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpuprof.placement.bin import Bin
from gpuprof.placement.cover import Cover
from gpuprof.placement.fleet_bins import FleetBins
from gpuprof.placement.optimal.pattern import PartitionKind, PartitionSlot, SharePattern
from gpuprof.placement.optimal.restricted_master import Choice
from gpuprof.placement.placement import PlacedReplica
from gpuprof.placement.segment import Segments

_Queues = dict[tuple[str, PartitionSlot], list[PlacedReplica]]


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
    """Put the next pattern of a partition into it, as far as replicas wait for its slots."""
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
