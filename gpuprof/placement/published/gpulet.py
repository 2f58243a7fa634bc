"""gpu-lets: at most two partitions on a GPU, of the size with most throughput per share (Choi et al., ATC'22).

With temporal sharing several models take turns in a gpu-let within a duty cycle (ibid.; Shen et al., SOSP'19).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import MOST_REPLICAS
from gpuprof.placement.evidence import MPS_CLIENTS
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

#: Smaller sizes of a gpu-let in percent, as the paper splits a GPU in two.
_SPLITS_PCT = (20.0, 40.0, 50.0)
#: All sizes; 100 is an unsplit GPU.
SIZES_PCT = tuple(sorted({*_SPLITS_PCT, *(100.0 - size for size in _SPLITS_PCT), 100.0}))


@dataclass(slots=True)
class _Gpu:
    entry: FleetEntry
    #: Replicas by gpu-let: a single replica, or several taking turns.
    lets: list[tuple[PlacedReplica, ...]] = field(default_factory=list)
    free_pct: float = 100.0

    @property
    def replicas(self) -> tuple[PlacedReplica, ...]:
        """All replicas on the GPU so far."""
        return tuple(replica for gpulet in self.lets for replica in gpulet)

    @property
    def partition(self) -> PlacedPartition:
        """The whole device with its replicas so far."""
        return PlacedPartition(self.replicas)


@dataclass(frozen=True, slots=True)
class Gpulet:
    """Elastic partitioning of gpulet: GPUs split in two, best fit by falling rate.

    The size of a part is the smaller of the most efficient size and the smallest size that serves the rate. Follows the
    descriptions by iGniter (TPDS'22 §5.1, gpu-lets+) and ParvaGPU (SC'24 §II): a workload goes to the best-fitting free
    part; a GPU is split once, and the second workload gets its whole rest; workloads are placed by falling rate.
    Decided here: the fleet's first kind of device with room is used; among equally free parts, the one opened first;
    the estimator decides whether two workloads can be co-located, in place of the paper's linear model.
    """

    #: True if models may also share a gpu-let in time (`duty_cycle`). A workload takes turns, with its whole rate or
    #: not at all, in the first gpu-let keeping all SLOs: at its present size, else the workload goes to a free part,
    #: else to a gpu-let that also takes the free part of its GPU. Cycles are chosen by times alone; all models must
    #: also keep their SLOs beside the other gpu-let, with their waits for turns.
    temporal: bool = False
    #: False skips the co-location check, as in gpu-lets+ in iGniter's §5, whose throughputs are those of workloads
    #: alone. Its maps need not be sound.
    aware: bool = True

    def place(self, problem: Problem) -> Placement:
        """Return the placement."""
        segments = Segments(problem, capped=False)
        open_gpus = _OpenGpus(problem, segments, self.temporal, self.aware)
        for demand in sorted(problem.by_priority(), key=lambda demand: (-demand.priority, -demand.rate_rps)):
            open_gpus.serve(demand)
        placed = (PlacedGpu(gpu.entry.device.name, (gpu.partition,)) for gpu in open_gpus.gpus)
        return with_unplaced(problem, segments, Placement("gpulet", tuple(placed)))


@dataclass(slots=True)
class _OpenGpus:
    """The GPUs in use; split GPUs with a free part are in ``_halves``, the fullest first."""

    problem: Problem
    segments: Segments
    temporal: bool
    aware: bool
    gpus: list[_Gpu] = field(default_factory=list)
    _halves: dict[str, list[_Gpu]] = field(default_factory=dict)
    _used: Counter[str] = field(default_factory=Counter)

    def serve(self, demand: Demand) -> None:
        """Place gpu-lets until the demand is served or nothing more fits."""
        sizes = {e.device.name: _sizes(self.segments, demand, e) for e in self.problem.fleet.entries}
        missing_rps, count = demand.rate_rps, 0
        most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
        while missing_rps > demand.rate_rps * 1e-9 and count < most:
            served_rps = self._place_one(sizes, missing_rps)
            if not served_rps:
                return
            missing_rps -= served_rps
            count += 1

    def _place_one(self, sizes: Mapping[str, Sequence[Segment]], missing_rps: float) -> float:
        """Place a gpu-let for up to ``missing_rps`` requests/s; return its served rate, 0 without room."""
        for entry in self.problem.fleet.entries:
            segments = sizes[entry.device.name]
            if not segments:
                continue
            model = segments[0].model
            served_rps = (
                self._in_turn(entry, model, missing_rps, larger=False)
                or self._beside(entry, segments, missing_rps)
                or self._in_turn(entry, model, missing_rps, larger=True)
                or self._fresh(entry, _ideal(segments, missing_rps), missing_rps)
            )
            if served_rps:
                return served_rps
        return 0.0

    def _beside(self, entry: FleetEntry, sizes: Sequence[Segment], missing_rps: float) -> float:
        """Give the best-fitting free part to the workload; return its served rate, 0 where nothing fits."""
        halves = self._halves.get(entry.device.name, [])
        least = _ideal(sizes, missing_rps).share.sm_pct
        rests: dict[float, tuple[Segment, PlacedReplica] | None] = {}
        verdicts: dict[tuple[PlacedReplica, ...], bool] = {}  # many devices have equal contents
        for index in range(bisect_left(halves, least - 1e-9, key=_free), len(halves)):
            gpu = halves[index]
            if gpu.free_pct not in rests:
                fit = next((size for size in sizes if abs(size.share.sm_pct - gpu.free_pct) < 1e-9), None)
                rests[gpu.free_pct] = (
                    None if fit is None else (fit, _just_enough(self.segments, entry, fit, missing_rps))
                )
            option = rests[gpu.free_pct]
            if option is None:
                continue
            contents = (*gpu.replicas, option[1])
            if contents not in verdicts:
                verdicts[contents] = self._can_bear(gpu, option[1])
            if verdicts[contents]:
                gpu.lets.append((option[1],))
                gpu.free_pct = 0.0
                del halves[index]
                return min(missing_rps, option[0].capacity_rps)
        return 0.0

    def _in_turn(self, entry: FleetEntry, model: str, missing_rps: float, *, larger: bool) -> float:
        """Let the workload take turns in a gpu-let, enlarged if ``larger``; return its served rate, 0 if impossible."""
        for gpu in self.gpus if self.temporal else ():
            if gpu.entry is not entry or any(replica.model == model for replica in gpu.replicas):
                continue
            for number, gpulet in enumerate(gpu.lets):
                size = gpulet[0].share.sm_pct
                sizes = [pct for pct in SIZES_PCT if size < pct <= size + gpu.free_pct] if larger else [size]
                rates = [*((replica.model, replica.rate_rps) for replica in gpulet), (model, missing_rps)]
                for share in map(Share, sizes):
                    replicas = self._take_turns(gpu, number, share, rates)
                    if replicas is not None:
                        self._replace_let(gpu, number, replicas)
                        return missing_rps
        return 0.0

    def _replace_let(self, gpu: _Gpu, number: int, replicas: tuple[PlacedReplica, ...]) -> None:
        name, grown_pct = gpu.entry.device.name, replicas[0].share.sm_pct - gpu.lets[number][0].share.sm_pct
        gpu.lets[number] = replicas
        if grown_pct:
            self._halves[name] = [candidate for candidate in self._halves.get(name, []) if candidate is not gpu]
            gpu.free_pct -= grown_pct
            if gpu.free_pct > 0.0:
                insort(self._halves[name], gpu, key=_free)

    def _take_turns(
        self, gpu: _Gpu, number: int, share: Share, rates: Sequence[tuple[str, float]]
    ) -> tuple[PlacedReplica, ...] | None:
        """Return the models as replicas taking turns in a gpu-let, None where no cycle keeps all SLOs."""
        device = gpu.entry.device
        turn_demands = [self._turn_demand(device, share, model, rate_rps) for model, rate_rps in rates]
        if not all(demand.latency_ms for demand in turn_demands):
            return None
        other_replicas = [replica for place, gpulet in enumerate(gpu.lets) if place != number for replica in gpulet]
        for cycle in list_duty_cycles(turn_demands):
            replicas = tuple(
                PlacedReplica(model, batch, 1, share, rate_rps, turns=number + 1)
                for (model, rate_rps), batch in zip(rates, cycle.batches, strict=True)
            )
            partition = self.segments.with_memory(device, PlacedPartition((*other_replicas, *replicas)))
            if self._do_all_keep_slos(device, partition):
                return partition.replicas[len(other_replicas) :]
        return None

    def _turn_demand(self, device: Device, share: Share, model: str, rate_rps: float) -> TurnDemand:
        times = {}
        for batch in self.segments.search_space.listed_batches(model, device, share):
            try:
                times[batch] = self.segments.latency_ms(device, Workload(model, batch, share))
            except InputError:
                continue
        return TurnDemand(rate_rps, self.problem.demand(model).slo.latency_ms, times)

    def _do_all_keep_slos(self, device: Device, partition: PlacedPartition) -> bool:
        """Return whether memory suffices and each replica keeps its SLO with its waits for turns."""
        total_bytes = sum(replica.memory_bytes or 0 for replica in partition.replicas)
        if total_bytes > device.dram_bytes or len(partition.replicas) > MPS_CLIENTS:
            return False
        if self.aware:
            return self.segments.keeps_slos(device, partition)
        lets: defaultdict[int, list[PlacedReplica]] = defaultdict(list)
        for position, replica in enumerate(partition.replicas):
            lets[replica.turns or -position].append(replica)
        return all(self.segments.keeps_slos(device, PlacedPartition(tuple(replicas))) for replicas in lets.values())

    def _fresh(self, entry: FleetEntry, segment: Segment, missing_rps: float) -> float:
        name, gpu = entry.device.name, _Gpu(entry)
        if entry.count is not None and self._used[name] >= entry.count:
            return 0.0
        replica = _just_enough(self.segments, entry, segment, missing_rps)
        if not self._can_bear(gpu, replica):
            return 0.0
        gpu.lets.append((replica,))
        gpu.free_pct -= segment.share.sm_pct
        self.gpus.append(gpu)
        self._used[name] += 1
        if gpu.free_pct > 0.0:
            insort(self._halves.setdefault(name, []), gpu, key=_free)
        return min(missing_rps, segment.capacity_rps)

    def _can_bear(self, gpu: _Gpu, replica: PlacedReplica) -> bool:
        """Return whether memory suffices and both workloads keep their SLOs together."""
        replicas = (*gpu.replicas, replica)
        if any(placed.turns for placed in replicas):
            return self._do_all_keep_slos(gpu.entry.device, PlacedPartition(replicas))
        if sum(placed.memory_bytes or 0 for placed in replicas) > gpu.entry.device.dram_bytes:
            return False
        if not self.aware:
            return True
        pairs = ((placed, neighbour) for placed in replicas for neighbour in replicas if placed is not neighbour)
        try:
            return all(self._keeps(gpu.entry.device, first, second) for first, second in pairs)
        except InputError:  # no estimate of a replica beside the other, or a failed run
            return False

    def _keeps(self, device: Device, replica: PlacedReplica, neighbour: PlacedReplica) -> bool:
        """Return whether ``replica`` keeps its SLO beside ``neighbour``; effects of pairs are not cached."""
        workload, beside = replica.workload, (neighbour.workload,)
        estimate = self.problem.estimator.estimate(
            replica.model, device, replica.batch, replica.share, beside, replica.processes
        )
        if estimate.latency_ms == self.segments.estimate(device, workload).latency_ms:
            return True
        demand = self.problem.demand(replica.model)
        if self.problem.options.latency_budget is not None:
            return self.segments.is_within_budget(demand, estimate, replica.rate_rps)
        return self.segments.meets(demand, device, workload, replica.rate_rps, beside)


def _free(gpu: _Gpu) -> float:
    return gpu.free_pct


def _sizes(segments: Segments, demand: Demand, entry: FleetEntry) -> list[Segment]:
    """Return the best segment of each size meeting the SLO at some rate, smallest first."""
    choices = []
    for size in SIZES_PCT:
        try:
            workloads = list(segments.workloads(demand.model, entry.device, Share(size)))
        except InputError:
            continue
        single = sorted((workload for workload in workloads if workload.processes == 1), key=lambda w: w.batch)
        best = segments.largest(demand, entry.device, single)
        if best is not None:
            choices.append(best)
    return choices


def _ideal(sizes: Sequence[Segment], missing_rps: float) -> Segment:
    """Return the smaller of the most efficient size and the least size that serves the remaining rate."""
    efficient = max(sizes, key=lambda size: (size.capacity_rps / size.share.sm_pct, -size.share.sm_pct))
    sufficient = [size for size in sizes if size.capacity_rps >= missing_rps]
    return min([efficient, *sufficient[:1]], key=lambda size: size.share.sm_pct)


def _just_enough(segments: Segments, entry: FleetEntry, segment: Segment, missing_rps: float) -> PlacedReplica:
    """Return the replica with the smallest batch meeting the rate (gpu-lets+, iGniter §5.1)."""
    rate_rps = min(missing_rps, segment.capacity_rps)
    demand, device = segments.problem.demand(segment.model), entry.device
    for batch in segments.search_space.listed_batches(segment.model, device, segment.share):
        workload = Workload(segment.model, batch, segment.share)
        if batch < segment.batch and segments.meets(demand, device, workload, rate_rps):
            memory = segments.memory_bytes(segments.estimate(device, workload))
            return PlacedReplica(segment.model, batch, 1, segment.share, rate_rps, memory_bytes=memory)
    return segment.replica(rate_rps)


@dataclass(frozen=True, slots=True)
class TurnDemand:
    """A model's requirements on a duty cycle."""

    rate_rps: float
    slo_ms: float
    latency_ms: Mapping[int, float]  #: Time of each possible batch size, alone on the device.


@dataclass(frozen=True, slots=True)
class DutyCycle:
    """A cycle in which each model has one turn."""

    cycle_ms: float
    batches: tuple[int, ...]  #: Batches of the models, in the given order.
    busy: float  #: Part of the cycle in which a batch runs, at most 1.


def list_duty_cycles(models: Sequence[TurnDemand]) -> tuple[DutyCycle, ...]:
    """Return the cycles in which all models keep their SLOs, those with most spare time first.

    In a cycle of D, rᵢ·D requests of model i arrive, which form its next batch: bᵢ ≥ rᵢ·D. All batches fit the cycle, Σ
    lⱼ(bⱼ) ≤ D, and a request that has just missed its model's turn is answered after the next turn: D + lᵢ(bᵢ) ≤ SLOᵢ.
    Among the cycles with the same batches, the longest within the SLOs has most spare time.
    """
    cycles = {cycle.batches: cycle for cycle in _find_cycles(models)}
    return tuple(sorted(cycles.values(), key=lambda cycle: (cycle.busy, cycle.cycle_ms)))


def _find_cycles(models: Sequence[TurnDemand]) -> Iterator[DutyCycle]:
    """Yield a cycle for each length at which a batch of some model is just full."""
    for longest in {1000.0 * batch / demand.rate_rps for demand in models for batch in demand.latency_ms}:
        batches = [_smallest_batch(demand, longest) for demand in models]
        usable = [batch for batch in batches if batch is not None]
        if len(usable) < len(models):
            continue
        times = [demand.latency_ms[batch] for demand, batch in zip(models, usable, strict=True)]
        cycle = min(longest, *(demand.slo_ms - time for demand, time in zip(models, times, strict=True)))
        if 0.0 < sum(times) <= cycle * (1.0 + TOLERANCE):
            yield DutyCycle(cycle, tuple(usable), sum(times) / cycle)


def _smallest_batch(demand: TurnDemand, cycle_ms: float) -> int | None:
    """Return the smallest batch holding the arrivals of a cycle, None where the largest does not."""
    least_batch = demand.rate_rps * cycle_ms / 1000.0 * (1.0 - TOLERANCE)
    return min((batch for batch in demand.latency_ms if batch >= least_batch), default=None)
