"""The segments the optimal policy chooses from, and optimistic guesses of segments not yet evaluated.

An estimator lists shares worth considering, and may give estimates for others too: parts of a MIG instance, and
percentages between the listed ones. Some of these are offered at once, and the rest as guesses: segments with only an
upper bound on their capacity. Where a bound on the cost rests on a guess, the guess is evaluated. Irrelevant segments
are thus seldom computed, and the bound holds for every share a policy might use.

The segment of largest capacity is offered for each share. Where the best segments together may exceed the memory,
segments with less memory and less capacity are offered too: memory and batch are then decided by the program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.optimal.memory_grid import is_binding
from gpuprof.placement.optimal.pattern import SPACE, PartitionKind, share_units
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_limit import RATE_PRECISION
from gpuprof.placement.search_space import PARTS
from gpuprof.placement.segment import Segment, Segments

#: Maximum number of demands for which parts of MIG instances and all shares met by bisection are offered.
_MOST_DEMANDS = 40
#: Maximum number of devices of a demand with guesses: for larger demands a part of a device is negligible.
_MOST_DEVICES = 100
#: Part of a demand below which a segment serves nothing. Beside a slow batch of great variation, the queueing model
#: bounds the rate in time by 1e-40 requests/s, and no program can count that many segments.
_NOTHING = 1e-15

Choices = Mapping[str, tuple[Segment, ...]]
_Place = tuple[str, str, Share]


@dataclass(slots=True)
class CandidateSegments:
    """The segments of every demand on every device of the fleet."""

    problem: Problem
    segments: Segments
    _sure: dict[str, list[Segment]] = field(default_factory=dict)
    _guesses: dict[str, dict[tuple[str, Share], Segment]] = field(default_factory=dict)
    _lean: dict[tuple[str, str, Share], int] = field(default_factory=dict)
    _by_memory: dict[_Place, tuple[Segment, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        few = len(self.problem.demands) <= _MOST_DEMANDS
        demands = [one for one in self.problem.demands if self.segments.first_alike(one.model) == one.model]
        for demand in demands:
            sure: list[Segment] = []
            for entry in self.problem.fleet.entries:
                segments = list(self.segments.best(demand, entry.device))
                if few:
                    segments += self._parts(demand, entry.device, tuple(segments))
                if self._is_guessed(demand, entry.device, segments):
                    steps = self.segments.search_space.steps(demand.model, entry.device, None)
                    segments += self._between(demand, entry.device, steps, tuple(segments))
                sure += segments
            self._sure[demand.model] = sure
        binding = self._offer_leaner()
        for demand in demands:
            self._guesses[demand.model] = {}
            for entry in self.problem.fleet.entries:
                segments = [one for one in self._sure[demand.model] if one.device == entry.device.name]
                if self._is_guessed(demand, entry.device, segments):
                    self._guesses[demand.model] |= self._make_guesses(demand, entry.device, segments, binding)

    def _is_guessed(self, demand: Demand, device: Device, known: Sequence[Segment]) -> bool:
        """Return whether unlisted shares matter: they do not for demands that fill many devices, nor on CPUs."""
        most = max((one.capacity_rps for one in known), default=0.0)
        return demand.rate_rps < _MOST_DEVICES * most and device.kind == "gpu"

    def _offer_leaner(self) -> frozenset[PartitionKind]:
        """Offer segments with less memory in partitions whose memory may not suffice, and return those partitions.

        Under the queueing model, none are offered for many demands: their bounds then rest on the least memory of each
        share.
        """
        by_kind: defaultdict[PartitionKind, list[Segment]] = defaultdict(list)
        for one in chain.from_iterable(self._sure.values()):
            by_kind[one.device, one.share.mig].append(one)
        binding = frozenset(kind for kind, own in by_kind.items() if self._is_memory_binding(kind, own))
        if self.problem.options.latency_budget is None and len(self.problem.demands) > _MOST_DEMANDS:
            return binding
        for model, sure in self._sure.items():
            for best in tuple(sure):
                place = (model, best.device, best.share)
                if (best.device, best.share.mig) in binding and place not in self._by_memory:
                    demand, device = self.problem.demand(model), self.problem.device(best.device)
                    leaner = tuple(self.segments.leaner(demand, device, best))
                    sure += leaner
                    self._by_memory[place] = self._bound_by_memory(demand, device, best, leaner)
        return binding

    def _is_memory_binding(self, kind: PartitionKind, known: Sequence[Segment]) -> bool:
        held: defaultdict[Share, int] = defaultdict(int)
        for one in known:
            held[one.share] = max(held[one.share], one.memory_bytes or 0)
        capacity = self.problem.device(kind[0]).memory_bytes(Share(100.0, kind[1]))
        return is_binding([share_units(share) for share in held], list(held.values()), SPACE, capacity)

    def _bound_by_memory(
        self, demand: Demand, device: Device, best: Segment, leaner: Sequence[Segment]
    ) -> tuple[Segment, ...]:
        """Return segments that bound the capacity of every batch under the share of ``best`` by its memory."""
        if not self.segments.search_space.is_dense(demand.model, device, best.share):
            return (*leaner, best)
        segments = []
        for workload, larger in self._pair_with_next_batch(demand.model, device, best.share, dense=True):
            with suppress(InputError):
                memory = self.segments.memory_bytes(self.segments.estimate(device, workload))
                reach = self.segments.most_between_rps(demand, device, workload, max(larger, workload.batch + 1))
                most = min(reach, best.capacity_rps)
                if most > 0.0:
                    segments.append(replace(best, capacity_rps=most, memory_bytes=memory))
        return _drop_dominated(segments)

    def known_segments(self) -> Choices:
        """Return the evaluated segments, by model."""
        return self._for_all_alike({model: _drop_dominated(found) for model, found in self._sure.items()})

    def _for_all_alike(self, choices: Choices) -> Choices:
        """Return the segments of each class's first demand, for all demands of the class."""
        every = {}
        for demand in self.problem.demands:
            first = self.segments.first_alike(demand.model)
            if first in choices:
                segments = choices[first]
                every[demand.model] = (
                    segments if first == demand.model else tuple(replace(s, model=demand.model) for s in segments)
                )
        return every

    def listed_segments(self) -> Choices:
        """Return the segments under the shares the estimator lists, and parts of instances, by model."""
        kept = {}
        for model, sure in self._sure.items():
            shares = {
                (entry.device.name, share)
                for entry in self.problem.fleet.entries
                for share in self.problem.estimator.shares(model, entry.device)
            }
            own = (s for s in sure if s.share.mig is not None or (s.device, s.share) in shares)
            kept[model] = _drop_dominated(tuple(own))
        return self._for_all_alike(kept)

    def optimistic_segments(self, demands: Sequence[Demand], *, guessing: bool = True) -> Choices:
        """Return the segments at their best: with the highest capacities and least memory that are not excluded.

        With ``guessing`` the segments not yet evaluated are included.
        """
        rates = {demand.model: demand.rate_rps for demand in demands}
        return self._for_all_alike(
            {
                model: _drop_dominated(
                    tuple(
                        self._optimistic_segment(one, rates[model])
                        for one in self._list_optimistic(model, guessing=guessing)
                        if one.capacity_rps > _NOTHING * rates[model]
                    )
                )
                for model in self._sure
                if model in rates
            }
        )

    def _list_optimistic(self, model: str, *, guessing: bool) -> Iterator[Segment]:
        """Yield segments that bound all others under their shares, and the guesses."""
        for place in dict.fromkeys((model, one.device, one.share) for one in self._sure[model]):
            if place in self._by_memory:
                yield from self._by_memory[place]
            else:
                same = (one for one in self._sure[model] if (model, one.device, one.share) == place)
                yield from (replace(one, memory_bytes=self._least_memory(one)) for one in same)
        if guessing:
            yield from self._guesses[model].values()

    def resolve_guesses(self, used: Mapping[str, Sequence[tuple[str, Share]]]) -> bool:
        """Evaluate the guesses among the used (device, share); return whether there were any."""
        worked = False
        for model, places in used.items():
            if model not in self._sure:
                continue  # the first demand of its class is among them
            demand = self.problem.demand(model)
            for device, share in places:
                if self._guesses[model].pop((device, share), None) is None:
                    continue
                worked = True
                segment = self.segments.best_of(demand, self.problem.device(device), share)
                if segment is not None:
                    self._sure[model].append(segment)
        if worked:
            self._offer_leaner()
        return worked

    def resolve_all_guesses(self) -> bool:
        """Evaluate all guesses; return whether there were any."""
        return self.resolve_guesses({model: tuple(guesses) for model, guesses in self._guesses.items()})

    def _optimistic_segment(self, segment: Segment, rate_rps: float) -> Segment:
        wider = segment.capacity_rps
        if self.problem.options.latency_budget is None and not self.segments.bounds_any_map:
            wider = min(max(rate_rps, wider), wider * (1.0 + RATE_PRECISION))
        return replace(segment, capacity_rps=wider)

    def _least_memory(self, segment: Segment) -> int | None:
        """Return the memory of a replica under this share at the smallest batch."""
        key = (segment.model, segment.device, segment.share)
        if segment.memory_bytes is None:
            return None
        if key not in self._lean:
            device = self.problem.device(segment.device)
            held = list(self._memories(segment.model, device, segment.share))
            self._lean[key] = min(held, default=segment.memory_bytes)
        return min(self._lean[key], segment.memory_bytes)

    def _memories(self, model: str, device: Device, share: Share) -> Iterator[int]:
        search_space = self.segments.search_space
        for batch in {
            *search_space.listed_batches(model, device, share),
            *search_space.sizes(model, device, share)[:1],
        }:
            try:
                estimate = self.segments.estimate(device, Workload(model, batch, share))
            except InputError:
                continue
            yield self.segments.memory_bytes(estimate) or 0

    def _parts(self, demand: Demand, device: Device, listed: Sequence[Segment]) -> Iterator[Segment]:
        """Yield the smallest part of each instance serving the whole demand: it can share the instance.

        Instances that do not serve the whole demand are skipped: demands that fill instances do not need parts of them.
        """
        known = {one.share for one in listed}
        for segment in listed:
            mig = segment.share.mig
            whole = segment.share.sm_pct == 100.0 and segment.capacity_rps >= demand.rate_rps
            if mig is None or not whole or any(one.mig == mig and one.sm_pct < 100.0 for one in known):
                continue
            low, high, smallest = 0, len(PARTS), None
            while low < high:
                middle = (low + high) // 2
                part = self._find_serving(demand, device, Share(PARTS[middle], mig))
                if part is None:
                    low = middle + 1
                else:
                    high, smallest = middle, part
            if smallest is not None:
                yield smallest

    def _find_serving(self, demand: Demand, device: Device, share: Share) -> Segment | None:
        """Return the segment under ``share`` if it serves the whole demand."""
        if self.problem.options.latency_budget is None:
            return self.segments.serving_all(demand, device, share)
        segment = self.segments.best_of(demand, device, share)
        return segment if segment is not None and segment.capacity_rps >= demand.rate_rps else None

    def _between(
        self, demand: Demand, device: Device, steps: Sequence[float], listed: Sequence[Segment]
    ) -> Iterator[Segment]:
        """Yield the segments met by bisection for the smallest share serving the remainder of large shares.

        The remainder is the whole demand where a single replica can serve it; else the rate left by whole replicas of
        the best listed shares.
        """
        whole = {one.share.sm_pct: one.capacity_rps for one in listed if one.share.mig is None}
        if not whole:
            return
        best = {max(whole), max(whole, key=lambda pct: whole[pct] / pct)}
        rests = {demand.rate_rps - whole[pct] * math.floor(demand.rate_rps / whole[pct] * (1.0 - 1e-9)) for pct in best}
        met = dict(whole)
        for rest in sorted(rests):
            enough = min((pct for pct, rps in met.items() if rps >= rest), default=max(met))
            inside = [pct for pct in steps if max((p for p in whole if whole[p] < rest), default=0.0) < pct < enough]
            low, high = 0, len(inside)
            while low < high:
                middle = (low + high) // 2
                percent = inside[middle]
                if percent not in met:
                    segment = self._evaluate_segment(demand, device, Share(percent), rest)
                    met[percent] = 0.0 if segment is None else segment.capacity_rps
                    if segment is not None:
                        yield segment
                if met[percent] >= rest:
                    high = middle
                else:
                    low = middle + 1

    def _evaluate_segment(self, demand: Demand, device: Device, share: Share, rest_rps: float) -> Segment | None:
        """Return the segment under ``share``; with many demands only if it serves the remainder, which is quicker."""
        if len(self.problem.demands) > _MOST_DEMANDS and self.problem.options.latency_budget is None:
            rest = replace(demand, rate_rps=rest_rps)
            workloads = self.segments.workloads(demand.model, device, share)
            if not any(self.segments.meets(rest, device, one, rest_rps) for one in workloads):
                return None
        return self.segments.best_of(demand, device, share)

    def _make_guesses(
        self, demand: Demand, device: Device, known: Sequence[Segment], binding: frozenset[PartitionKind]
    ) -> dict[tuple[str, Share], Segment]:
        """Return a guess for every step of the whole device and of its instances without a known segment.

        Steps above the smallest share serving everything are useful only where memory binds: the same share with
        smaller batches.
        """
        guesses = {}
        for mig in dict.fromkeys(one.share.mig for one in known):
            whole = {one.share.sm_pct: one for one in known if one.share.mig == mig}
            enough = min((pct for pct, one in whole.items() if one.capacity_rps >= demand.rate_rps), default=100.0)
            for percent in self.segments.search_space.steps(demand.model, device, mig):
                # A guess needs a larger known share, which alone bounds its capacity.
                larger = min((pct for pct in whole if pct > percent), default=None)
                useless = percent >= enough and (device.name, mig) not in binding
                if useless or percent in whole or larger is None:
                    continue
                guess = self._guess(demand, device, Share(percent, mig), whole[larger])
                if guess is not None:
                    guesses[device.name, guess.share] = guess
        return guesses

    def _pair_with_next_batch(
        self, model: str, device: Device, share: Share, *, dense: bool
    ) -> Iterator[tuple[Workload, int]]:
        """Yield the workloads, each with the next larger batch where the batches between may run too, else its own."""
        for workload in self.segments.workloads(model, device, share):
            sizes = self.segments.search_space.listed_batches(model, device, share)
            larger = [size for size in sizes if size > workload.batch] if dense else []
            yield workload, min(larger, default=workload.batch)
            if dense and workload.batch == sizes[0] > 1:
                yield replace(workload, batch=1), sizes[0]

    def _guess(self, demand: Demand, device: Device, share: Share, larger: Segment) -> Segment | None:
        """Return the upper bound of a share: full batches within the SLO, and less than the next larger share.

        Where every batch takes k times as long as under the larger share, queues serve at most 1 / k of its rate: with
        time measured in k-ths, the arrivals would be the same and the SLO tighter. Batches between two listed ones
        serve at most the rate they would have at the time of the smaller of the two.
        """
        options = self.problem.options
        limit = demand.slo.latency_ms * (options.latency_budget or 1.0)
        dense = self.segments.search_space.is_dense(demand.model, device, share)
        most, memory, slower = 0.0, [], 1.0 if dense else math.inf
        for workload, next_batch in self._pair_with_next_batch(demand.model, device, share, dense=dense):
            shortest = workload if options.latency_budget else replace(workload, batch=1)
            try:
                beyond = self.segments.latency_ms(device, replace(workload, share=larger.share))
                slower = min(slower, self.segments.latency_ms(device, workload) / beyond)
                if self.segments.latency_ms(device, shortest) < limit:
                    throughput = self.segments.throughput_rps(device, workload)
                    most = max(most, throughput * max(1.0, (next_batch - 1) / workload.batch))
                    memory.append(self.segments.memory_bytes(self.segments.estimate(device, workload)))
            except InputError:
                continue
        if not most:
            return None
        if larger.capacity_rps < demand.rate_rps and not self.segments.bounds_any_map:
            most = min(most, larger.capacity_rps * (1.0 + RATE_PRECISION) / max(1.0, slower))
        least = None if None in memory else min(one for one in memory if one is not None)
        rate = min(demand.rate_rps, most)
        return Segment(demand.model, device.name, share, 1, 1, rate, device.fraction(share), least, limit)


def _drop_dominated(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Drop segments that another segment of no larger share dominates in capacity and memory; keep the order."""
    kept: list[Segment] = []
    order = sorted(segments, key=lambda one: (one.share.sm_pct, one.memory_bytes or 0, -one.capacity_rps))
    for segment in order:
        rivals = (other for other in kept if (other.device, other.share.mig) == (segment.device, segment.share.mig))
        if not any(
            other.capacity_rps >= segment.capacity_rps and (other.memory_bytes or 0) <= (segment.memory_bytes or 0)
            for other in rivals
        ):
            kept.append(segment)
    chosen = {id(one) for one in kept}
    return tuple(one for one in segments if id(one) in chosen)
