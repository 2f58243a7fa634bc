"""Assigns a placement to the devices of an older map so that as many replicas as possible stay in place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, count

from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition, Replica
from gpuprof.domain.device import Device, MigProfile
from gpuprof.domain.mig import Layout, MigPlacement, is_legal
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Program

#: Key of a replica for a running server: model, batch, processes, share and waiting time.
ReplicaKey = tuple[str, int, int, float, float]
#: Replicas by (profile, start), or by None for the whole device.
_ReplicasByInstance = Mapping[tuple[str, int] | None, Counter[ReplicaKey]]


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    """A device of a numbered fleet: the ``index``-th of the machine called ``node``."""

    node: str
    index: int


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """The addresses of the devices of a placement."""

    #: MIG instances may have other starts than in the placement; the address is None for a device not in the older map.
    gpus: tuple[tuple[PlacedGpu, DeviceAddress | None], ...]
    moves: int  #: Replicas that must be started: they are not in the older map unchanged and in place.


def assign_devices(
    gpus: Sequence[PlacedGpu], previous: DeploymentMap, devices: Mapping[str, Device]
) -> DeviceAssignment:
    """Return the addresses under which most replicas stay: an assignment problem over groups of equal devices.

    ``previous``: its devices that are not in ``devices`` are not reused.
    """
    old = [(DeviceAddress(node.name, gpu.index), gpu) for node in previous.nodes for gpu in node.gpus]
    ours = _group_equal([_describe_content(gpu) for gpu in gpus])
    theirs = _group_equal([_describe_old_content(gpu) for _, gpu in old])
    arranged = _list_pairs(gpus, [gpu for _, gpu in old], ours, theirs, devices)
    chosen: list[tuple[PlacedGpu, DeviceAddress | None]] = [(gpu, None) for gpu in gpus]
    stays = 0
    for (ours_at, theirs_at), times in _solve_assignment(ours, theirs, arranged).items():
        for _ in range(times):
            new, before = ours[ours_at].pop(), theirs[theirs_at].pop()
            gpu, kept = arranged[ours_at, theirs_at]
            chosen[new] = (_arrange_like(gpus[new], gpu), old[before][0])
            stays += kept
    return DeviceAssignment(tuple(chosen), sum(sum(1 for _ in gpu.replicas()) for gpu in gpus) - stays)


def number_devices(
    problem: Problem, gpus: Sequence[PlacedGpu]
) -> tuple[list[tuple[DeviceAddress, PlacedGpu]], int | None]:
    """Return the devices by machine and index, and the moves from the problem's older map, None without a map.

    A machine holds devices of one kind: ``gpus_per_node`` of them or a single CPU. Unmoved devices keep their
    addresses; new devices fill machines of the older map with free addresses, then new machines.
    """
    if problem.previous is None:
        return [*_list_free_addresses(problem, list(gpus), {})], None
    kept = assign_devices(gpus, problem.previous, {entry.device.name: entry.device for entry in problem.fleet.entries})
    order = {node.name: position for position, node in enumerate(problem.previous.nodes)}
    taken = {node.name: {gpu.device for gpu in node.gpus} for node in problem.previous.nodes}
    fixed = [(address, gpu) for gpu, address in kept.gpus if address is not None]
    used: dict[str, set[int]] = {name: set() for name in order}
    for address, _ in fixed:
        used[address.node].add(address.index)
    open_nodes = {name: (next(iter(kinds)), used[name]) for name, kinds in taken.items() if len(kinds) == 1}
    unassigned = [gpu for gpu, address in kept.gpus if address is None]
    for address, gpu in _list_free_addresses(problem, unassigned, open_nodes, set(order)):
        order.setdefault(address.node, len(order))
        fixed.append((address, gpu))
    return sorted(fixed, key=lambda pair: (order[pair[0].node], pair[0].index)), kept.moves


def _list_free_addresses(
    problem: Problem,
    gpus: Sequence[PlacedGpu],
    open_nodes: Mapping[str, tuple[str, set[int]]],
    names: Collection[str] = (),
) -> Iterator[tuple[DeviceAddress, PlacedGpu]]:
    """Yield a free address for each device: in ``open_nodes`` (machine → kind, used indices), then in new machines."""
    fresh = (name for name in map("node{}".format, count()) if name not in names)
    for entry in problem.fleet.entries:
        size = 1 if entry.device.kind == "cpu" else problem.options.gpus_per_node
        own = [(name, taken) for name, (kind, taken) in open_nodes.items() if kind == entry.device.name]
        free = (DeviceAddress(name, index) for name, taken in own for index in range(size) if index not in taken)
        more = (DeviceAddress(name, index) for name in fresh for index in range(size))
        addresses = chain(free, more)
        for gpu in gpus:
            if gpu.device == entry.device.name:
                yield next(addresses), gpu
        more.close()


def replica_key(replica: PlacedReplica | Replica) -> ReplicaKey:
    """Return the properties that must not change for a replica to go on running; its planned rate may change."""
    share = replica.sm_share_pct if isinstance(replica, Replica) else replica.share.sm_pct
    return replica.model, replica.batch, replica.processes, round(share, 6), replica.max_wait_ms


def _describe_content(gpu: PlacedGpu) -> object:
    parts = ((part.mig or "", tuple(sorted(map(replica_key, part.replicas)))) for part in gpu.partitions)
    return gpu.device, tuple(sorted(parts))


def _describe_old_content(gpu: Gpu) -> object:
    standing = ((str(place), tuple(sorted(there.items()))) for place, there in _group_by_instance(gpu).items())
    return gpu.device, tuple(sorted(standing))


def _group_equal(keys: Sequence[object]) -> list[list[int]]:
    """Return the indices of equal keys together, later ones first within a group."""
    groups: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        # Inserted in front, so that `pop` takes the first of a group first.
        groups.setdefault(key, []).insert(0, index)
    return list(groups.values())


def _group_by_instance(gpu: Gpu) -> _ReplicasByInstance:
    def place(part: Partition) -> tuple[str, int] | None:
        return None if part.mig is None else (part.mig.profile, part.mig.start)

    return {place(part): Counter(map(replica_key, part.replicas)) for part in gpu.partitions}


def _list_pairs(
    gpus: Sequence[PlacedGpu],
    old: Sequence[Gpu],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    devices: Mapping[str, Device],
) -> dict[tuple[int, int], tuple[PlacedGpu, int]]:
    """Return the rearranged device and its kept replicas, for each pair of groups with a common replica."""
    having: defaultdict[tuple[str, ReplicaKey], set[int]] = defaultdict(set)
    for group, members in enumerate(theirs):
        gpu = old[members[0]]
        for partition in gpu.partitions:
            for replica in partition.replicas:
                having[gpu.device, replica_key(replica)].add(group)
    pairs = {}
    for group, members in enumerate(ours):
        gpu_here = gpus[members[0]]
        near = {other for one in gpu_here.replicas() for other in having[gpu_here.device, replica_key(one)]}
        for other in sorted(near):
            standing = _group_by_instance(old[theirs[other][0]])
            arranged, kept = _arrange_instances(devices[gpu_here.device], gpu_here, standing)
            if kept:
                pairs[group, other] = (arranged, kept)
    return pairs


def _solve_assignment(
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    arranged: Mapping[tuple[int, int], tuple[PlacedGpu, int]],
) -> dict[tuple[int, int], int]:
    """Return the number of assigned devices by pair of groups, with most replicas kept in total."""
    if not arranged:
        return {}
    # A transportation problem: totally unimodular, so its relaxation is integral.
    program = Program()
    supply = [program.row(high=len(members)) for members in ours]
    places = [program.row(high=len(members)) for members in theirs]
    for (here, there), (_, kept) in arranged.items():
        program.column(-float(kept), {supply[here]: 1.0, places[there]: 1.0})
    solution = program.solve()
    values = () if solution is None else solution.values
    return {pair: round(value) for pair, value in zip(arranged, values, strict=False)}


def _arrange_instances(device: Device, gpu: PlacedGpu, standing: _ReplicasByInstance) -> tuple[PlacedGpu, int]:
    """Return the device with its instances at the starts that keep most replicas, and the number of kept replicas."""
    if any(part.mig is None for part in gpu.partitions):
        return gpu, sum(_count_kept(part, standing.get(None)) for part in gpu.partitions)
    best, most = gpu, -1
    for layout in _list_layouts(device, Counter(str(part.mig) for part in gpu.partitions)):
        parts, kept = _assign_instances(gpu.partitions, layout, standing)
        if kept > most:
            best, most = PlacedGpu(gpu.device, tuple(sorted(parts, key=lambda part: part.start or 0))), kept
    return best, max(most, 0)


def _assign_instances(
    partitions: Sequence[PlacedPartition], layout: Layout, standing: _ReplicasByInstance
) -> tuple[list[PlacedPartition], int]:
    """Return the partitions on the instances of a layout, profile by profile as an assignment problem."""
    from scipy.optimize import linear_sum_assignment

    placed, kept = [], 0
    for profile in {item.profile.name for item in layout}:
        instances = [part for part in partitions if part.mig == profile]
        starts = [item.start for item in layout if item.profile.name == profile]
        gain = [[_count_kept(part, standing.get((profile, start))) for start in starts] for part in instances]
        rows, columns = linear_sum_assignment(gain, maximize=True)
        for row, column in zip(rows, columns, strict=True):
            placed.append(replace(instances[row], start=starts[column]))
            kept += gain[row][column]
    return placed, kept


def _count_kept(partition: PlacedPartition, there: Counter[ReplicaKey] | None) -> int:
    return 0 if there is None else (Counter(map(replica_key, partition.replicas)) & there).total()


def _list_layouts(device: Device, wanted: Counter[str]) -> Iterator[Layout]:
    def extend(remaining: list[tuple[MigProfile, int]], chosen: Layout) -> Iterator[Layout]:
        if not remaining:
            yield chosen
            return
        profile, times = remaining[0]
        for starts in combinations(profile.start_slots, times):
            more = (*chosen, *(MigPlacement(profile, start) for start in starts))
            if is_legal(device, more):
                yield from extend(remaining[1:], more)

    yield from extend([(device.mig_profile(name), count) for name, count in sorted(wanted.items())], ())


def _arrange_like(gpu: PlacedGpu, arranged: PlacedGpu) -> PlacedGpu:
    """Return ``gpu``, whose content equals that of ``arranged`` up to the rates, with its starts."""
    remaining = list(gpu.partitions)
    parts = []
    for pattern in arranged.partitions:
        wanted = (pattern.mig, Counter(map(replica_key, pattern.replicas)))
        same = next(one for one in remaining if (one.mig, Counter(map(replica_key, one.replicas))) == wanted)
        remaining.remove(same)
        parts.append(replace(same, start=pattern.start))
    return PlacedGpu(gpu.device, tuple(parts))
