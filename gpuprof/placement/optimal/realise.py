"""Puts the segments that the integer program chose onto devices cut up as it chose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpuprof.domain.share import Share
from gpuprof.placement.bin import Bin
from gpuprof.placement.cover import Cover
from gpuprof.placement.fleet_bins import FleetBins
from gpuprof.placement.optimal.master import Choice
from gpuprof.placement.optimal.pattern import Content, Room
from gpuprof.placement.placement import PlacedReplica
from gpuprof.placement.segment import Segments

_Queues = dict[tuple[str, Share], list[PlacedReplica]]


def realise(
    covers: Mapping[str, Cover], choice: Choice, segments: Segments, bins: FleetBins
) -> list[tuple[str, PlacedReplica]]:
    """Fill ``bins``; return (device, replica) for what found no place.

    The program's contents hold every segment by their shares; memory and interference between the models that meet
    in a room are seen only here. What a room cannot take goes wherever it fits, on a new device if there is one.
    """
    queues = _queued(covers)
    contents = _by_room(choice.contents)
    for cut, count in choice.cuts:
        for _ in range(count):
            fresh = bins.open(cut.device)
            if fresh is None:
                continue
            for item in cut.layout:
                _fill(fresh, item.start, (cut.device, item.profile.name), contents, queues, segments)
            if not cut.layout:
                _fill(fresh, None, (cut.device, None), contents, queues, segments)
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


def _by_room(contents: Sequence[tuple[Content, int]]) -> dict[Room, list[Content]]:
    found: dict[Room, list[Content]] = {}
    for content, count in contents:
        found.setdefault(content.room, []).extend([content] * count)
    return found


def _fill(
    fresh: Bin, start: int | None, room: Room, contents: dict[Room, list[Content]], queues: _Queues, segments: Segments
) -> None:
    """Put the next content of a room into it, as far as replicas wait for its slots."""
    if not contents.get(room):
        return
    position: int | None = None
    for share, count in contents[room].pop(0).slots:
        queue = queues.get((room[0], share), [])
        for _ in range(count):
            index = next((i for i, one in enumerate(queue) if _put(fresh, start, position, one, segments)), None)
            if index is None:
                break
            queue.pop(index)
            position = len(fresh.partitions) - 1


def _put(fresh: Bin, start: int | None, position: int | None, replica: PlacedReplica, segments: Segments) -> bool:
    if position is not None:
        return fresh.add_inside(position, replica, segments)
    if start is None:
        return fresh.add(replica, segments)
    fresh.add_instance(replica, start)
    return True
