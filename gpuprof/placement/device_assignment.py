"""Assigns a placement to the devices of an older map so that as many replicas as possible stay in place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from itertools import count as count_up

from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition, Replica
from gpuprof.placement.placement import PlacedGpu, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Program

#: Key of a replica for a running server: model, batch, processes, share and waiting time.
ReplicaKey = tuple[str, int, int, float, float]
#: A replica with its kind of device and its instance (profile, start), None for the whole device.
_Place = tuple[str, tuple[str, int] | None, ReplicaKey]


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    """A device of a numbered fleet: the ``index``-th of the machine called ``node``."""

    node: str
    index: int


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """The addresses of the devices of a placement."""

    #: The address is None for a device not in the older map.
    gpus: tuple[tuple[PlacedGpu, DeviceAddress | None], ...]
    moves: int  #: Replicas that must be started: they are not in the older map unchanged and in place.


def assign_devices(gpus: Sequence[PlacedGpu], previous: DeploymentMap) -> DeviceAssignment:
    """Return the addresses under which most replicas stay: an assignment problem over groups of equal devices."""
    old = [(DeviceAddress(node.name, gpu.index), gpu) for node in previous.nodes for gpu in node.gpus]
    new_contents, old_contents = [_list_content(gpu) for gpu in gpus], [_list_content(gpu) for _, gpu in old]
    new_groups, old_groups = _group_equal(new_contents), _group_equal(old_contents)
    similar: defaultdict[_Place, set[int]] = defaultdict(set)
    for j, group in enumerate(old_groups):
        for place in old_contents[group[0]]:
            similar[place].add(j)
    kept: dict[tuple[int, int], int] = {}
    for i, group in enumerate(new_groups):
        content = new_contents[group[0]]
        for j in sorted({j for place in content for j in similar[place]}):
            kept[i, j] = (content & old_contents[old_groups[j][0]]).total()
    addresses: list[DeviceAddress | None] = [None] * len(gpus)
    kept_count = 0
    for (i, j), times in _solve_assignment(new_groups, old_groups, kept).items():
        for _ in range(times):
            addresses[new_groups[i].pop()] = old[old_groups[j].pop()][0]
            kept_count += kept[i, j]
    moves = sum(content.total() for content in new_contents) - kept_count
    return DeviceAssignment(tuple(zip(gpus, addresses, strict=True)), moves)


def number_devices(
    problem: Problem, gpus: Sequence[PlacedGpu]
) -> tuple[list[tuple[DeviceAddress, PlacedGpu]], int | None]:
    """Return the devices by machine and index, and the moves from the problem's older map, None without a map.

    A machine holds devices of one kind: ``gpus_per_node`` of them or a single CPU. Unmoved devices keep their
    addresses; new devices fill machines of the older map with free addresses, then new machines.
    """
    if problem.previous is None:
        return [*_list_free_addresses(problem, list(gpus), {})], None
    plan = assign_devices(gpus, problem.previous)
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
    fresh = (name for name in map("node{}".format, count_up()) if name not in names)
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
    """Return the properties that must be unchanged for a replica to keep running; its planned rate may change."""
    share = replica.sm_share_pct if isinstance(replica, Replica) else replica.share.sm_pct
    return replica.model, replica.batch, replica.processes, round(share, 6), replica.max_wait_ms


def _list_content(gpu: PlacedGpu | Gpu) -> Counter[_Place]:
    """Return the replicas of a device with their instances."""
    content: Counter[_Place] = Counter()
    for part in gpu.partitions:
        if isinstance(part, Partition):
            instance = None if part.mig is None else (part.mig.profile, part.mig.start)
        else:
            instance = None if part.mig is None else (part.mig, part.start or 0)
        content.update((gpu.device, instance, replica_key(replica)) for replica in part.replicas)
    return content


def _group_equal(contents: Sequence[Counter[_Place]]) -> list[list[int]]:
    """Return the indices of equal contents together, later ones first within a group."""
    groups: dict[frozenset[tuple[_Place, int]], list[int]] = {}
    for index, content in enumerate(contents):
        # Inserted in front, so that `pop` takes the first of a group first.
        groups.setdefault(frozenset(content.items()), []).insert(0, index)
    return list(groups.values())


def _solve_assignment(
    new_groups: Sequence[Sequence[int]], old_groups: Sequence[Sequence[int]], kept: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """Return how many devices of each new group take those of each old group, with most replicas kept in total."""
    if not kept:
        return {}
    # A transportation problem: totally unimodular, so its relaxation is integral.
    program = Program()
    supply = [program.row(high=len(members)) for members in new_groups]
    places = [program.row(high=len(members)) for members in old_groups]
    for (new_group, old_group), count in kept.items():
        program.column(-float(count), {supply[new_group]: 1.0, places[old_group]: 1.0})
    solution = program.solve()
    values = () if solution is None else solution.values
    return {pair: round(value) for pair, value in zip(kept, values, strict=False)}
