"""gpu-lets: at most two partitions on a GPU, of the size that gives most throughput for it (Choi et al., ATC'22)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuprof.demand import Demand
from gpuprof.errors import InputError
from gpuprof.estimate import Workload
from gpuprof.fleet import FleetEntry
from gpuprof.placement.cover import MOST_REPLICAS
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.whynot import with_unplaced
from gpuprof.share import Share

#: Sizes of a gpu-let in percent, as the paper splits a GPU; 100 is an unsplit one.
SIZES_PCT = (20.0, 40.0, 50.0, 60.0, 80.0, 100.0)


@dataclass(slots=True)
class _Gpu:
    entry: FleetEntry
    replicas: list[PlacedReplica] = field(default_factory=list)
    free_pct: float = 100.0


@dataclass(frozen=True, slots=True)
class Gpulet:
    """Elastic partitioning: the size is the smaller of the most efficient one and the least that serves the rate.

    Follows the descriptions by iGniter (TPDS'22 §5.1, gpu-lets+) and ParvaGPU (SC'24 §II): a workload goes to the
    best-fitting free part; a GPU is split once, and the second workload gets all that is left of it; workloads are
    placed by falling rate. Decided here: the first kind of device of the fleet with room is used; whether two
    workloads bear each other is the estimator's to say, in place of the paper's linear model.
    """

    def place(self, problem: Problem) -> Placement:
        """Return the placement."""
        segments = Segments(problem, capped=False)
        gpus: list[_Gpu] = []
        for demand in sorted(problem.by_priority(), key=lambda demand: (-demand.priority, -demand.rate_rps)):
            _serve(problem, segments, demand, gpus)
        placed = (PlacedGpu(gpu.entry.device.name, (PlacedPartition(tuple(gpu.replicas)),)) for gpu in gpus)
        return with_unplaced(problem, segments, Placement("gpulet", tuple(placed)))


def _serve(problem: Problem, segments: Segments, demand: Demand, gpus: list[_Gpu]) -> None:
    left, count = demand.rate_rps, 0
    most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    while left > demand.rate_rps * 1e-9 and count < most:
        served = _place_one(problem, segments, demand, left, gpus)
        if not served:
            return
        left -= served
        count += 1


def _place_one(problem: Problem, segments: Segments, demand: Demand, left: float, gpus: list[_Gpu]) -> float:
    """Put one gpu-let for up to ``left`` requests/s somewhere; return what it serves, 0 when there is no room."""
    for entry in problem.fleet.entries:
        sizes = _sizes(segments, demand, entry)
        if not sizes:
            continue
        ideal = _ideal(sizes, left)
        remnants = [gpu for gpu in gpus if gpu.entry is entry and ideal.share.sm_pct <= gpu.free_pct + 1e-9]
        for gpu in sorted(remnants, key=lambda gpu: gpu.free_pct):
            whole_rest = next((one for one in sizes if abs(one.share.sm_pct - gpu.free_pct) < 1e-9), None)
            if whole_rest is not None and _add(segments, gpu, whole_rest, left):
                return min(left, whole_rest.capacity_rps)
        used = sum(gpu.entry is entry for gpu in gpus)
        if entry.count is None or used < entry.count:
            fresh = _Gpu(entry)
            if _add(segments, fresh, ideal, left):
                gpus.append(fresh)
                return min(left, ideal.capacity_rps)
    return 0.0


def _sizes(segments: Segments, demand: Demand, entry: FleetEntry) -> list[Segment]:
    """Return the best segment of each size that meets the SLO at some rate, smallest first."""
    found = []
    for size in SIZES_PCT:
        share = Share(size)
        try:
            workloads = list(segments.workloads(demand.model, entry.device, share))
        except InputError:
            continue
        made = [segments.make(demand, entry.device, workload) for workload in workloads if workload.processes == 1]
        meeting = [segment for segment in made if segment is not None]
        if meeting:
            found.append(max(meeting, key=lambda one: (one.capacity_rps, -one.batch)))
    return found


def _ideal(sizes: Sequence[Segment], left: float) -> Segment:
    """Return the smaller of the most efficient size and the least that serves all that is left."""
    efficient = max(sizes, key=lambda one: (one.capacity_rps / one.share.sm_pct, -one.share.sm_pct))
    enough = [one for one in sizes if one.capacity_rps >= left]
    return min([efficient, *enough[:1]], key=lambda one: one.share.sm_pct)


def _add(segments: Segments, gpu: _Gpu, segment: Segment, left: float) -> bool:
    """Put a segment on a GPU with the smallest batch that serves its rate, if both workloads bear it."""
    rate = min(left, segment.capacity_rps)
    replica = _just_enough(segments, gpu, segment, rate)
    together = (*gpu.replicas, replica)
    if sum(one.memory_bytes or 0 for one in together) > gpu.entry.device.dram_bytes:
        return False
    if not segments.holds(gpu.entry.device, PlacedPartition(together)):
        return False
    gpu.replicas.append(replica)
    gpu.free_pct -= segment.share.sm_pct
    return True


def _just_enough(segments: Segments, gpu: _Gpu, segment: Segment, rate_rps: float) -> PlacedReplica:
    """Return the replica with the smallest batch that meets the rate (gpu-lets+, iGniter §5.1)."""
    demand, device = segments.problem.demand(segment.model), gpu.entry.device
    for batch in segments.problem.estimator.batches(segment.model, device, segment.share):
        workload = Workload(segment.model, batch, segment.share)
        if batch < segment.batch and segments.meets(demand, device, workload, rate_rps):
            memory = segments.memory_bytes(segments.estimate(device, workload))
            return PlacedReplica(segment.model, batch, 1, segment.share, rate_rps, memory_bytes=memory)
    return segment.replica(rate_rps)
