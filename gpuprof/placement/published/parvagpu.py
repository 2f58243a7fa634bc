"""ParvaGPU: MIG instances filled with processes of one model each (Lee et al., SC'24, §III)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeploymentMap, Unplaced, share_of
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.mig import MigPlacement, basic_profiles, is_legal, legal_starts
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import MOST_REPLICAS, share_out_rate
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.search_space import MIG_PROCESSES
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import explain_shortfall, explain_unplaced


@dataclass(frozen=True, slots=True)
class _Triplet:
    """The best (batch, processes) of an instance size for a service."""

    segment: Segment
    slices: int

    @property
    def efficiency(self) -> float:
        """Throughput for each compute slice (equation 2)."""
        return self.segment.capacity_rps / self.slices


@dataclass(slots=True)
class _Service:
    demand: Demand
    triplets: tuple[_Triplet, ...]

    def last(self, rate_rps: float) -> _Triplet:
        """LASTSEG: the smallest instance that serves the remaining rate; if none does, the most efficient."""
        enough = [triplet for triplet in self.triplets if triplet.segment.capacity_rps >= rate_rps * (1 - 1e-9)]
        return min(enough, key=lambda t: t.slices) if enough else self.optimal(self.triplets)

    @staticmethod
    def optimal(triplets: Iterable[_Triplet]) -> _Triplet:
        """OPTSEG: the triplet with the most throughput per slice; among equals, the smaller instance."""
        return max(triplets, key=lambda t: (t.efficiency, -t.slices))


@dataclass(slots=True)
class _Gpu:
    placed: list[tuple[MigPlacement, _Service, _Triplet]] = field(default_factory=list)

    @property
    def slices(self) -> int:
        """Compute slices in use (``num_gpcs``)."""
        return sum(triplet.slices for _, _, triplet in self.placed)

    def add(self, device: Device, service: _Service, triplet: _Triplet) -> bool:
        """Place the segment where it blocks the fewest others, if it fits."""
        profile = device.mig_profile(str(triplet.segment.share.mig))
        starts = legal_starts(device, profile, [place for place, _, _ in self.placed])
        # Instances of three slices go to their highest start only, so that slot 3 stays usable (§III-E1).
        if triplet.slices == 3:
            starts = tuple(start for start in starts if start == profile.start_slots[-1])
        if not starts:
            return False
        self.placed.append((MigPlacement(profile, starts[0]), service, triplet))
        return True


@dataclass(frozen=True, slots=True)
class ParvaGpu:
    """ParvaGPU's Algorithms 1 and 2: MIG instances for each service, filled with processes that share them by MPS.

    Algorithm 1 is Optimal Triplet Decision and Demand Matching, Algorithm 2 Segment Relocation and Allocation
    Optimization. Decided here, where the paper and the published code are silent: the starts are those that the driver
    allows (the paper's configuration 18 has a forbidden one); among equally efficient instance sizes the smaller is
    taken; the broken-up placement is kept only if it takes no more GPUs; the rate is divided among a service's segments
    in proportion to their throughput. `triplets` and `_match_rate` are Algorithm 1, `allocate` and `optimize` Algorithm
    2.

    With a previous map in the problem (`Problem.previous`), only services with a changed demand or profile are
    configured and relocated (§III-F), around the segments of the others. Decided here: Allocation Optimization then
    breaks up only GPUs that hold nothing but changed services, so that no other service moves.
    """

    single: bool = False  #: One process in each instance (the paper's ParvaGPU-single).
    unoptimized: bool = False  #: Without Allocation Optimization (ParvaGPU-unoptimized).
    #: Maximum processes of an instance where `Options.max_processes` is None; None: three, as in the paper.
    processes: int | None = None

    def place(self, problem: Problem) -> Placement:
        """Return the placement on the fleet's first kind of device that has MIG.

        Raises `InputError` when no device of the fleet has MIG, or ``processes`` is below one or has no effect.
        """
        limit = 1 if self.single else problem.options.max_processes
        if self.processes is not None and limit is not None and self.processes != limit:
            option = "single" if self.single else f"a limit of {limit}"
            raise InputError(f"processes={self.processes} has no effect beside {option}", "leave one of them out")
        if self.processes is not None and self.processes < 1:
            raise InputError(f"processes must be at least 1 but got {self.processes}")
        entry = problem.mig_entry("parvagpu")
        most = limit or self.processes or MIG_PROCESSES
        segments = Segments(replace(problem, options=replace(problem.options, max_processes=most)), capped=False)
        services = [_Service(demand, triplets(segments, demand, entry.device)) for demand in problem.by_priority()]
        old_gpus = standing(problem, segments, entry, services)
        kept_services = {id(service) for gpu in old_gpus for _, service, _ in gpu.placed}
        new_services = [service for service in services if id(service) not in kept_services]
        queue = [(service, triplet) for service in new_services for triplet in _match_rate(service)]
        gpus = allocate(entry, queue, old_gpus)
        if not self.unoptimized:
            gpus = optimize(entry, gpus, frozenset(service.demand.model for service in new_services))
        name = f"parvagpu{'-single' if self.single else ''}{'-unoptimized' if self.unoptimized else ''}"
        return _placement(name, problem, segments, entry, gpus)


def triplets(segments: Segments, demand: Demand, device: Device) -> tuple[_Triplet, ...]:
    """Optimal Triplet Decision (Algorithm 1, lines 2 to 12): the segment of most throughput for each instance size."""
    triplet_list = []
    for profile in basic_profiles(device):
        share = Share(100.0, profile.name)
        best = segments.largest(demand, device, segments.workloads(demand.model, device, share))
        if best is not None:
            triplet_list.append(_Triplet(best, profile.compute_slices))
    return tuple(triplet_list)


def _match_rate(service: _Service) -> list[_Triplet]:
    """Demand Matching (Algorithm 1, lines 14 to 22): optimal segments, and the smallest serving the rest."""
    if not service.triplets:
        return []
    demand = service.demand
    limit = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    best = service.optimal(service.triplets)
    count = math.floor(demand.rate_rps / best.segment.capacity_rps * (1 + 1e-12))
    rest_rps = demand.rate_rps - count * best.segment.capacity_rps
    triplets = [best] * min(count, limit + 1) + ([service.last(rest_rps)] if rest_rps > demand.rate_rps * 1e-9 else [])
    if len(triplets) <= limit:
        return triplets
    widest = max(service.triplets, key=lambda triplet: triplet.segment.capacity_rps)
    return [widest] * min(limit, math.ceil(demand.rate_rps / widest.segment.capacity_rps * (1 - 1e-12)))


def allocate(entry: FleetEntry, queue: Sequence[tuple[_Service, _Triplet]], gpus: Sequence[_Gpu]) -> list[_Gpu]:
    """Segment Relocation (Algorithm 2, ALLOCATION): largest segments first, each to the first GPU that takes it.

    Segments without room on a fixed fleet are left out.
    """
    result = [_Gpu(list(gpu.placed)) for gpu in gpus]
    first: dict[int, int] = {}
    for service, triplet in sorted(queue, key=lambda item: -item[1].slices):
        start = first.get(triplet.slices, 0)
        for index in range(start, len(result)):
            if result[index].add(entry.device, service, triplet):
                first[triplet.slices] = index
                break
        else:
            first[triplet.slices] = len(result)
            if entry.count is None or len(result) < entry.count:
                result.append(_Gpu())
                result[-1].add(entry.device, service, triplet)
    return result


def standing(problem: Problem, segments: Segments, entry: FleetEntry, services: Sequence[_Service]) -> list[_Gpu]:
    """Return the GPUs of the previous map with only the segments of services that need no reconfiguration.

    Empty if the map needs more GPUs of this kind than available, or two of its segments overlap.
    """
    if problem.previous is None:
        return []
    triplets = {
        service.demand.model: _segments_then(problem.previous, segments, entry, service) for service in services
    }
    gpus: dict[tuple[str, int], _Gpu] = {}
    for service in services:
        for where, place, triplet in triplets[service.demand.model]:
            gpus.setdefault(where, _Gpu()).placed.append((place, service, triplet))
    order = [(node.name, gpu.index) for node in problem.previous.nodes for gpu in node.gpus]
    old_gpus = [gpus[where] for where in order if where in gpus]
    legal = all(is_legal(entry.device, [place for place, _, _ in gpu.placed]) for gpu in old_gpus)
    return old_gpus if legal and (entry.count is None or len(old_gpus) <= entry.count) else []


def _segments_then(
    previous: DeploymentMap, segments: Segments, entry: FleetEntry, service: _Service
) -> list[tuple[tuple[str, int], MigPlacement, _Triplet]]:
    """Return the locations of the service's previous segments; none if it must be reconfigured."""
    demand, old = service.demand, previous.models.get(service.demand.model)
    if old is None or (old.rate_rps, Slo(old.slo_ms, old.percentile)) != (demand.rate_rps, demand.slo):
        return []
    profiles = {profile.name: profile for profile in entry.device.mig_profiles}
    triplets = []
    for node, gpu, partition, replica in previous.places():
        if replica.model != demand.model:
            continue
        profile = profiles.get(partition.mig.profile) if partition.mig is not None else None
        if profile is None or gpu.device != entry.device.name or len(partition.replicas) > 1:
            return []
        workload = Workload(demand.model, replica.batch, share_of(partition, replica), replica.processes)
        segment = segments.make(demand, entry.device, workload)
        if segment is None or workload.share.sm_pct < 100.0 or partition.mig is None:
            return []
        place = MigPlacement(profile, partition.mig.start)
        triplets.append(((node.name, gpu.index), place, _Triplet(segment, profile.compute_slices)))
    capacity_rps = sum(triplet.segment.capacity_rps for _, _, triplet in triplets)
    enough = capacity_rps >= demand.rate_rps * (1.0 - 1e-9) and len(triplets) <= (demand.max_replicas or MOST_REPLICAS)
    return triplets if enough else []


def optimize(entry: FleetEntry, gpus: Sequence[_Gpu], movable: frozenset[str]) -> list[_Gpu]:
    """Empty fragmented GPUs, the last first: Allocation Optimization (Algorithm 2, lines 12 to 32).

    Their services get segments of one or two slices in gaps of earlier GPUs instead. Surplus capacity is credited to
    the service's next segments. GPUs with a service that is not ``movable`` are kept.
    """
    current = list(gpus)
    debt: dict[str, float] = {}  # by model; a negative value is a surplus (freed_rate of Algorithm 2)
    for position in range(len(gpus) - 1, -1, -1):
        if position >= len(current) or not 0 < current[position].slices <= 4:  # Algorithm 2, line 15
            continue
        if any(service.demand.model not in movable for _, service, _ in current[position].placed):
            continue
        broken_up = _broken_up(current[position], debt)
        if broken_up is None:
            continue
        small, now_owed = broken_up
        other_gpus = [*current[:position], *current[position + 1 :]]
        candidate = allocate(entry, small, other_gpus)
        complete = sum(len(gpu.placed) for gpu in candidate) == sum(len(gpu.placed) for gpu in other_gpus) + len(small)
        # More segments than before may take more GPUs: then the GPU stays unchanged.
        if complete and len(candidate) <= len(current):
            current, debt = candidate, now_owed
    return current


def _broken_up(gpu: _Gpu, debt: Mapping[str, float]) -> tuple[list[tuple[_Service, _Triplet]], dict[str, float]] | None:
    """Return small segments that replace those of ``gpu``, and the updated owed rates; None if there are none."""
    now_owed = dict(debt)
    small: list[tuple[_Service, _Triplet]] = []
    for _, service, triplet in gpu.placed:
        model = service.demand.model
        triplets, rest_rps = _small_segments(service, now_owed.get(model, 0.0) + triplet.segment.capacity_rps)
        if triplets is None:
            return None
        now_owed[model] = rest_rps
        small += [(service, t) for t in triplets]
    return small, now_owed


def _small_segments(service: _Service, owed_rps: float) -> tuple[list[_Triplet] | None, float]:
    """Return segments of at most two slices for the rate, and the remaining rate (below zero: a surplus).

    SMALLSEGMENTS (Algorithm 2, line 22) gives no more detail. Here the last segment is the smallest serving the
    rest, as in LASTSEG; with all segments of the most efficient size, ParvaGPU-single would take eight GPUs for the
    paper's scenario 4, as in its Figure 5, and not seven; no other scenario distinguishes the two.
    """
    small = [triplet for triplet in service.triplets if triplet.slices <= 2]  # §III-E2
    if not small or service.demand.max_replicas is not None:
        return None, owed_rps
    triplets = []
    best = service.optimal(small)
    while owed_rps > service.demand.rate_rps * 1e-9:
        enough = [triplet for triplet in small if triplet.segment.capacity_rps >= owed_rps]
        smallest = min(enough, key=lambda t: t.slices) if enough else best
        triplets.append(smallest)
        owed_rps -= smallest.segment.capacity_rps
    return triplets, owed_rps


def _placement(name: str, problem: Problem, segments: Segments, entry: FleetEntry, gpus: Sequence[_Gpu]) -> Placement:
    """Return the placement with rates divided among the placed segments, and unplaced demands named."""
    rates: dict[str, list[PlacedReplica]] = {}
    unplaced = []
    for demand in problem.by_priority():
        of_demand = [triplet.segment for gpu in gpus for _, service, triplet in gpu.placed if service.demand is demand]
        if not of_demand:
            unplaced.append(
                Unplaced(
                    model=demand.model, rate_rps=demand.rate_rps, reason=explain_unplaced(problem, segments, demand)
                )
            )
            continue
        cover = share_out_rate(demand.rate_rps, of_demand)
        rates[demand.model] = [segment.replica(rate) for segment, rate in cover.parts]
        if cover.missing_rps:
            reason = explain_shortfall(problem, demand, demand.rate_rps - cover.missing_rps)
            unplaced.append(Unplaced(model=demand.model, rate_rps=cover.missing_rps, reason=reason))
    placed = []
    for gpu in gpus:
        partitions = [
            PlacedPartition((rates[service.demand.model].pop(0),), place.profile.name, place.start)
            for place, service, _ in gpu.placed
        ]
        if partitions:
            placed.append(PlacedGpu(entry.device.name, tuple(sorted(partitions, key=lambda p: p.start or 0))))
    return Placement(name, tuple(placed), tuple(unplaced))
