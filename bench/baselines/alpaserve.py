"""AlpaServe's greedy selection: the model with most unserved requests goes where least is used (Li et al., OSDI'23)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import Workload
from gpuprof.errors import InputError
from gpuprof.placement.bin import MOST_REPLICAS, Bin, Cost, FleetBins, make_cost
from gpuprof.placement.placement import PlacedReplica, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

#: By kind of device, workload and rate the devices, by number, that refused such a replica: they only fill up.
_Refused = defaultdict[tuple[str, Workload, float], set[int]]


@dataclass(frozen=True, slots=True)
class AlpaServe:
    """The fast form of Algorithm 1 (§4.2), without model parallelism: every model here fits a device.

    Again and again the model with the most unserved requests gets a replica on the device that is used least. Decided
    here: models share a device by shares instead of by turns, which is what a map can promise; a replica gets the
    smallest share that serves all that is left of its model, or else the one that serves most for its size; what a
    device is used for is the sum of its shares; all devices of a fixed fleet are there from the start, those of an
    elastic one are opened when no other has room; whether neighbours bear each other is the estimator's to say.
    """

    def place(self, problem: Problem) -> Placement:
        """Return the placement."""
        segments = Segments(problem, capped=False)
        bins, cost = FleetBins(problem, segments), make_cost(problem)
        for entry in problem.fleet.entries:
            for _ in range(entry.count or 0):
                bins.open(entry.device.name)
        choices = {demand.model: _list_choices(problem, segments, demand) for demand in problem.demands}
        missing_rps = {demand.model: demand.rate_rps for demand in problem.demands}
        counts = dict.fromkeys(missing_rps, 0)
        refused: _Refused = defaultdict(set)
        waiting = list(problem.demands)
        while waiting:
            demand = max(waiting, key=lambda candidate: (candidate.priority, missing_rps[candidate.model]))
            served = 0.0
            if counts[demand.model] < min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS):
                left_rps = missing_rps[demand.model]
                served = _add_replica(bins, segments, choices[demand.model], cost, left_rps, refused)
            missing_rps[demand.model] -= served
            counts[demand.model] += 1
            if not served or missing_rps[demand.model] <= demand.rate_rps * 1e-9:
                waiting.remove(demand)
        return with_unplaced(problem, segments, Placement("alpaserve", bins.to_gpus()))


def _list_choices(problem: Problem, segments: Segments, demand: Demand) -> list[Segment]:
    choices: list[Segment] = []
    for entry in problem.fleet.entries:
        with suppress(InputError):
            choices += segments.best(demand, entry.device)
    return choices


def _add_replica(
    bins: FleetBins, segments: Segments, choices: Sequence[Segment], cost: Cost, missing_rps: float, refused: _Refused
) -> float:
    """Put one replica somewhere; return the requests/s that it serves, 0 where there is no room for any.

    ``refused`` is kept up to date.
    """
    enough = sorted((choice for choice in choices if choice.capacity_rps >= missing_rps), key=cost)
    by_efficiency = sorted(choices, key=lambda choice: -choice.capacity_rps / cost(choice))
    for segment in (*enough[:1], *by_efficiency):
        replica = segment.replica(min(missing_rps, segment.capacity_rps))
        full = refused[segment.device, replica.workload, replica.rate_rps]
        left = [n for n, gpu_bin in enumerate(bins.bins) if n not in full and gpu_bin.device.name == segment.device]
        for number in sorted(left, key=lambda n: _used_fraction(bins.bins[n])):
            if bins.bins[number].add(replica, segments):
                return replica.rate_rps
            full.add(number)
        fresh = bins.open(segment.device)
        if fresh is not None and fresh.add(replica, segments):
            return replica.rate_rps
    return 0.0


def _used_fraction(gpu: Bin) -> float:
    replicas: list[PlacedReplica] = [replica for partition in gpu.partitions for replica in partition.replicas]
    return sum(gpu.device.fraction(replica.share) for replica in replicas)
