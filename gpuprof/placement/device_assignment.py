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
    new_groups = _group_equal([_describe_content(gpu) for gpu in gpus])
    old_groups = _group_equal([_describe_old_content(gpu) for _, gpu in old])
    arranged = _list_pairs(gpus, [gpu for _, gpu in old], new_groups, old_groups, devices)
    assignment: list[tuple[PlacedGpu, DeviceAddress | None]] = [(gpu, None) for gpu in gpus]
    kept_count = 0
    for (new_group, old_group), times in _solve_assignment(new_groups, old_groups, arranged).items():
        for _ in range(times):
            new, before = new_groups[new_group].pop(), old_groups[old_group].pop()
            gpu, kept = arranged[new_group, old_group]
            assignment[new] = (_arrange_like(gpus[new], gpu), old[before][0])
            kept_count += kept
    return DeviceAssignment(tuple(assignment), sum(sum(1 for _ in gpu.replicas()) for gpu in gpus) - kept_count)


def number_devices(
    problem: Problem, gpus: Sequence[PlacedGpu]
) -> tuple[list[tuple[DeviceAddress, PlacedGpu]], int | None]:
    """Return the devices by machine and index, and the moves from the problem's older map, None without a map.

    A machine holds devices of one kind: ``gpus_per_node`` of them or a single CPU. Unmoved devices keep their
    addresses; new devices fill machines of the older map with free addresses, then new machines.
    """
    if problem.previous is None:
        return [*_list_free_addresses(problem, list(gpus), {})], None
    plan = assign_devices(gpus, problem.previous, {entry.device.name: entry.device for entry in problem.fleet.entries})
    order = {node.name: position for position, node in enumerate(problem.previous.nodes)}
    types = {node.name: {gpu.device for gpu in node.gpus} for node in problem.previous.nodes}
    numbered = [(address, gpu) for gpu, address in plan.gpus if address is not None]
    used: dict[str, set[int]] = {name: set() for name in order}
    for address, _ in numbered:
        used[address.node].add(address.index)
    open_nodes = {name: (next(iter(kinds)), used[name]) for name, kinds in types.items() if len(kinds) == 1}
    unassigned = [gpu for gpu, address in plan.gpus if address is None]
    for address, gpu in _list_free_addresses(problem, unassigned, open_nodes, set(order)):
        order.setdefault(address.node, len(order))
        numbered.append((address, gpu))
    return sorted(numbered, key=lambda pair: (order[pair[0].node], pair[0].index)), plan.moves


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
        nodes = [(name, used) for name, (kind, used) in open_nodes.items() if kind == entry.device.name]
        free = (DeviceAddress(name, index) for name, used in nodes for index in range(size) if index not in used)
        fresh_addresses = (DeviceAddress(name, index) for name in fresh for index in range(size))
        addresses = chain(free, fresh_addresses)
        for gpu in gpus:
            if gpu.device == entry.device.name:
                yield next(addresses), gpu
        fresh_addresses.close()


def replica_key(replica: PlacedReplica | Replica) -> ReplicaKey:
    """Return the properties that must not change for a replica to go on running; its planned rate may change."""
    share = replica.sm_share_pct if isinstance(replica, Replica) else replica.share.sm_pct
    return replica.model, replica.batch, replica.processes, round(share, 6), replica.max_wait_ms


def _describe_content(gpu: PlacedGpu) -> object:
    parts = ((part.mig or "", tuple(sorted(map(replica_key, part.replicas)))) for part in gpu.partitions)
    return gpu.device, tuple(sorted(parts))


def _describe_old_content(gpu: Gpu) -> object:
    contents = ((str(place), tuple(sorted(keys.items()))) for place, keys in _group_by_instance(gpu).items())
    return gpu.device, tuple(sorted(contents))


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
    new_groups: Sequence[Sequence[int]],
    old_groups: Sequence[Sequence[int]],
    devices: Mapping[str, Device],
) -> dict[tuple[int, int], tuple[PlacedGpu, int]]:
    """Return the rearranged device and its kept replicas, for each pair of groups with a common replica."""
    groups: defaultdict[tuple[str, ReplicaKey], set[int]] = defaultdict(set)
    for group, members in enumerate(old_groups):
        gpu = old[members[0]]
        for partition in gpu.partitions:
            for replica in partition.replicas:
                groups[gpu.device, replica_key(replica)].add(group)
    pairs = {}
    for group, members in enumerate(new_groups):
        gpu_here = gpus[members[0]]
        similar = {j for placed in gpu_here.replicas() for j in groups[gpu_here.device, replica_key(placed)]}
        for j in sorted(similar):
            old_replicas = _group_by_instance(old[old_groups[j][0]])
            arranged, kept = _arrange_instances(devices[gpu_here.device], gpu_here, old_replicas)
            if kept:
                pairs[group, j] = (arranged, kept)
    return pairs


def _solve_assignment(
    new_groups: Sequence[Sequence[int]],
    old_groups: Sequence[Sequence[int]],
    arranged: Mapping[tuple[int, int], tuple[PlacedGpu, int]],
) -> dict[tuple[int, int], int]:
    """Return the number of assigned devices by pair of groups, with most replicas kept in total."""
    if not arranged:
        return {}
    # A transportation problem: totally unimodular, so its relaxation is integral.
    program = Program()
    supply = [program.row(high=len(members)) for members in new_groups]
    places = [program.row(high=len(members)) for members in old_groups]
    for (new_group, old_group), (_, kept) in arranged.items():
        program.column(-float(kept), {supply[new_group]: 1.0, places[old_group]: 1.0})
    solution = program.solve()
    values = () if solution is None else solution.values
    return {pair: round(value) for pair, value in zip(arranged, values, strict=False)}


def _arrange_instances(device: Device, gpu: PlacedGpu, old_replicas: _ReplicasByInstance) -> tuple[PlacedGpu, int]:
    """Return the device with its instances at the starts that keep most replicas, and the number of kept replicas."""
    if any(part.mig is None for part in gpu.partitions):
        return gpu, sum(_count_kept(part, old_replicas.get(None)) for part in gpu.partitions)
    best, most = gpu, -1
    for layout in _list_layouts(device, Counter(str(part.mig) for part in gpu.partitions)):
        parts, kept = _assign_instances(gpu.partitions, layout, old_replicas)
        if kept > most:
            best, most = PlacedGpu(gpu.device, tuple(sorted(parts, key=lambda part: part.start or 0))), kept
    return best, max(most, 0)


def _assign_instances(
    partitions: Sequence[PlacedPartition], layout: Layout, old_replicas: _ReplicasByInstance
) -> tuple[list[PlacedPartition], int]:
    """Return the partitions on the instances of a layout, profile by profile as an assignment problem."""
    from scipy.optimize import linear_sum_assignment

    placed, kept = [], 0
    for profile in {item.profile.name for item in layout}:
        instances = [part for part in partitions if part.mig == profile]
        starts = [item.start for item in layout if item.profile.name == profile]
        gain = [[_count_kept(part, old_replicas.get((profile, start))) for start in starts] for part in instances]
        rows, columns = linear_sum_assignment(gain, maximize=True)
        for row, column in zip(rows, columns, strict=True):
            placed.append(replace(instances[row], start=starts[column]))
            kept += gain[row][column]
    return placed, kept


def _count_kept(partition: PlacedPartition, old_keys: Counter[ReplicaKey] | None) -> int:
    return 0 if old_keys is None else (Counter(map(replica_key, partition.replicas)) & old_keys).total()


def _list_layouts(device: Device, counts: Counter[str]) -> Iterator[Layout]:
    def extend(remaining: list[tuple[MigProfile, int]], layout: Layout) -> Iterator[Layout]:
        if not remaining:
            yield layout
            return
        profile, times = remaining[0]
        for starts in combinations(profile.start_slots, times):
            extended = (*layout, *(MigPlacement(profile, start) for start in starts))
            if is_legal(device, extended):
                yield from extend(remaining[1:], extended)

    yield from extend([(device.mig_profile(name), count) for name, count in sorted(counts.items())], ())


def _arrange_like(gpu: PlacedGpu, arranged: PlacedGpu) -> PlacedGpu:
    """Return ``gpu``, whose content equals that of ``arranged`` up to the rates, with its starts."""
    remaining = list(gpu.partitions)
    parts = []
    for pattern in arranged.partitions:
        content = (pattern.mig, Counter(map(replica_key, pattern.replicas)))
        match = next(part for part in remaining if (part.mig, Counter(map(replica_key, part.replicas))) == content)
        remaining.remove(match)
        parts.append(replace(match, start=pattern.start))
    return PlacedGpu(gpu.device, tuple(parts))
