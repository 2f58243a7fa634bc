"""Maps of partition contents, neighbours included.

The content of a partition is a multiset of replicas, each at its full rate beside the others. Branch and bound finds
the content of the greatest worth: replicas are added by falling worth per share, and a branch ends where not even
replicas without neighbours would be worth more. An integer program chooses the configurations of the devices and the
contents of their partitions, generated for its dual prices; then every content that might be in a better map is added.
A refill replaces one content after another by the best for what the others leave.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.errors import InputError
from gpuprof.placement.bin import MOST_REPLICAS, fits_device
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.candidates import Choices
from gpuprof.placement.optimal.judge import find_step, list_prices, weigh_priority
from gpuprof.placement.optimal.local_search import MOST_ASKED, used_price
from gpuprof.placement.optimal.pattern import DeviceConfiguration, PartitionKind, list_configurations
from gpuprof.placement.optimal.restricted_master import served_column
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT, Program, Solution
from gpuprof.placement.segment import PooledSegments, Segment, Segments

_Gpus = tuple[PlacedGpu, ...]
_ByModel = Mapping[str, float]


@dataclass(slots=True)
class Contents:
    """Searches maps of a problem."""

    problem: Problem
    segments: Segments  #: Of the same problem, with the rates of pools under the queueing model.
    choices: Choices
    limit: Limit
    _asked: int = 0
    _rates_rps: dict[tuple[str, Workload, tuple[Workload, ...]], float] = field(default_factory=dict)
    _slowed_rps: dict[tuple[str, Workload, float], float] = field(default_factory=dict)
    _options: dict[tuple[str, str, str | None], tuple[Segment, ...]] = field(default_factory=dict)
    _generated: defaultdict[PartitionKind, dict[PlacedPartition, None]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def place(self, demands: Sequence[Demand], start: _Gpus, *, is_partial: bool) -> _Gpus:
        """Return the cheapest map of all demands, or with ``is_partial`` the map that serves most.

        Best of the contents that are generated in time; ``start``: a map whose contents are among them.
        """
        for gpu in start:
            for partition in gpu.partitions:
                content = self._at_full_rates(gpu.device, replace(partition, start=None))
                self._generated[gpu.device, partition.mig][content] = None
        gap, solution, seed = 0.0, None, self.problem.options.seed
        step = 0.0 if is_partial else find_step(list_prices(self.problem.fleet.entries))
        while not self._is_over:
            master = self._make_master(demands, is_partial)
            relaxed = master.program.solve(relaxed=True, time_limit_s=self.limit.left_s, seed=seed)
            if relaxed is None:
                break
            is_extended = self._generate(master, relaxed, gap)
            if is_extended and not gap:
                continue
            master = self._make_master(demands, is_partial)
            solution = master.program.solve(time_limit_s=self.limit.left_s, seed=seed, least_step=step)
            if solution is None or gap or not is_improvable(solution.objective, relaxed.objective, step):
                break
            # A content that is worth less than its price by more than this is in no better map.
            gap = solution.objective - relaxed.objective
        return start if solution is None else tuple(self._read(master, solution))

    def list_refilled(self, placement: Placement) -> Iterator[_Gpus]:
        """Yield maps that may serve more, or as much without a device, dropping the emptiest and cheapest first."""
        gpus = placement.gpus
        if placement.unplaced:
            yield self._refill((*gpus, *self._list_unused(gpus)))
            return
        for gpu in sorted(dict.fromkeys(gpus), key=lambda gpu: used_price(self.problem, gpu)):
            index = gpus.index(gpu)
            refilled = self._refill((*gpus[:index], *gpus[index + 1 :]))
            rates_rps = Placement("", refilled).rates_rps()
            if all(rates_rps.get(d.model, 0.0) >= d.rate_rps * (1.0 - EXACT) for d in self.problem.demands):
                yield refilled

    @property
    def _is_over(self) -> bool:
        return self.limit.is_over or self._asked >= MOST_ASKED

    def _generate(self, master: _Master, relaxed: Solution, gap: float) -> bool:
        """Add contents that are worth more than their price less ``gap``; return whether there were any."""
        prices, count = {model: relaxed.duals[row] for model, row in master.rates.items()}, self._count_generated()
        for kind, row in master.kinds.items():
            empty, price = PlacedPartition((), kind[1]), -relaxed.duals[row]
            self._find_content(kind[0], empty, (), prices, price - gap, is_every=gap > 0.0)
        return self._count_generated() > count

    def _count_generated(self) -> int:
        return sum(map(len, self._generated.values()))

    def _make_master(self, demands: Sequence[Demand], is_partial: bool) -> _Master:
        master, program = _Master(), Program()
        master.program, costs = program, dict[int, float]()
        for demand in demands:
            master.rates[demand.model] = row = program.row(low=0.0 if is_partial else demand.rate_rps)
            if is_partial:
                costs[served_column(program, demand, row)] = -weigh_priority(self.problem, demand)
        quotas = {d.model: program.row(high=float(d.max_replicas)) for d in demands if d.max_replicas is not None}
        shares = {segment.share for segments in self.choices.values() for segment in segments}
        for entry in self.problem.fleet.entries:
            count = program.row(high=math.inf if entry.count is None else float(entry.count))
            for configuration in list_configurations(entry.device, shares):
                entries = {count: 1.0}
                for kind, number in configuration.partitions().items():
                    if kind not in master.kinds:
                        master.kinds[kind] = program.row(high=0.0)
                    entries[master.kinds[kind]] = -float(number)
                column = program.column(0.0, entries)
                master.configurations[column] = configuration
                costs[column] = 0.0 if is_partial else entry.price_per_hour
        for kind, row in master.kinds.items():
            for content in self._generated[kind]:
                entries = {master.rates[model]: rate for model, rate in _sum_rates([content]).items()}
                replicas = Counter(replica.model for replica in content.replicas)
                entries |= {quotas[model]: float(count) for model, count in replicas.items() if model in quotas}
                master.contents[program.column(0.0, {**entries, row: 1.0})] = kind, content
        program.recost(costs)
        return master

    def _read(self, master: _Master, solution: Solution) -> Iterator[PlacedGpu]:
        queues: defaultdict[PartitionKind, list[PlacedPartition]] = defaultdict(list)
        for column, (kind, content) in master.contents.items():
            queues[kind] += [content] * round(solution.values[column])
        for column, configuration in master.configurations.items():
            instances: list[tuple[str | None, int | None]] = [(i.profile.name, i.start) for i in configuration.layout]
            for _ in range(round(solution.values[column])):
                filled = [
                    replace(queues[configuration.device, mig].pop(), start=start)
                    for mig, start in instances or [(None, None)]
                    if queues[configuration.device, mig]
                ]
                if filled:
                    yield PlacedGpu(configuration.device, tuple(filled))

    def _list_unused(self, gpus: Sequence[PlacedGpu]) -> Iterator[PlacedGpu]:
        """Yield the devices of the fleet that the map leaves out, empty."""
        used = Counter(gpu.device for gpu in gpus)
        for entry in self.problem.fleet.entries:
            for _ in range((entry.count or 0) - used[entry.device.name]):
                yield PlacedGpu(entry.device.name, (PlacedPartition(()),))

    def _refill(self, gpus: _Gpus) -> _Gpus:
        """Return the devices with their partitions refilled until none serves more, each replica at its full rate."""
        parts = [(gpu.device, self._at_full_rates(gpu.device, part)) for gpu in gpus for part in gpu.partitions]
        weights = {demand.model: weigh_priority(self.problem, demand) for demand in self.problem.demands}
        tried, number = set[tuple[str, PlacedPartition]](), 0
        while number < len(parts) and not self._is_over:
            device, partition = parts[number]
            content = None
            if parts[number] not in tried:
                tried.add(parts[number])
                others = [part for _, part in (*parts[:number], *parts[number + 1 :])]
                worth = self._find_worth(_sum_rates([*others, partition]), weights)
                content = self._find_content(device, partition, others, weights, worth)
            if content is None:
                number += 1
            else:
                parts[number], number = (device, content), 0
                tried.clear()
        return _with_partitions(gpus, [partition for _, partition in parts])

    def _at_full_rates(self, name: str, partition: PlacedPartition) -> PlacedPartition:
        device = self.problem.device(name)
        replicas = (
            replace(replica, rate_rps=self._find_rate(device, replica.workload, partition.beside(replica)))
            for replica in partition.replicas
        )
        return replace(partition, replicas=tuple(replicas))

    def _find_rate(self, device: Device, workload: Workload, beside: Sequence[Workload]) -> float:
        """Return the full rate of a replica beside neighbours, 0.0 where it keeps its SLO at no rate."""
        key = device.name, workload, tuple(sorted(beside))
        if key not in self._rates_rps:
            with suppress(InputError):
                self._rates_rps[key] = self._solve_rate(device, workload, key[2])
        return self._rates_rps.setdefault(key, 0.0)

    def _solve_rate(self, device: Device, workload: Workload, beside: Sequence[Workload]) -> float:
        """Return the full rate of a replica; in a pool, as if neighbours slowed all of its batches equally.

        The times of all batches beside each set of neighbours would be too many; the map is verified with them.
        """
        demand, segments = self.problem.demand(workload.model), self.segments
        if not isinstance(segments, PooledSegments):
            segment = segments.make(demand, device, workload, beside)
            return 0.0 if segment is None else segment.capacity_rps
        slowdown = segments.latency_ms(device, workload, beside) / segments.latency_ms(device, workload)
        key = device.name, workload, round(slowdown, 2)
        if key not in self._slowed_rps:
            server = segments.server(device, workload)
            slowed = replace(server, latency_ms=tuple(ms * key[2] for ms in server.latency_ms))
            self._slowed_rps[key] = segments.find_rate(demand, slowed)
        return self._slowed_rps[key]

    def _find_content(
        self,
        name: str,
        partition: PlacedPartition,
        others: Sequence[PlacedPartition],
        weights: _ByModel,
        worth: float,
        *,
        is_every: bool = False,
    ) -> PlacedPartition | None:
        """Return the content of a partition that is worth most beside other partitions.

        None where no content found in time is worth more than ``worth``; ``weights``: the worth of a request, by model.
        """
        device, others_rps, until = self.problem.device(name), _sum_rates(others), self._asked + MOST_ASKED // 10
        quotas = Counter({demand.model: demand.max_replicas or MOST_REPLICAS for demand in self.problem.demands})
        quotas.subtract(replica.model for part in others for replica in part.replicas)
        options = self._rank_options(device, partition.mig, others_rps, weights)
        least_gain = EXACT * math.fsum(weights[demand.model] * demand.rate_rps for demand in self.problem.demands)
        best: PlacedPartition | None = None

        def extend(content: tuple[Segment, ...], first: int, alone_rps: Counter[str], width: int) -> bool:
            """Try the contents with more replicas; return whether more than ``width`` replicas were left to add."""
            nonlocal best, worth
            free_pct, tried, is_cut = 100.0 - math.fsum(segment.share.sm_pct for segment in content), 0, False
            potential = self._find_worth(alone_rps, weights)
            for position, (density, segment) in enumerate(options[first:], first):
                if potential + density * free_pct <= worth + least_gain or self._asked >= until or self.limit.is_over:
                    break
                count = sum(other.model == segment.model for other in content)
                if segment.share.sm_pct > free_pct + TOLERANCE or count >= quotas[segment.model]:
                    continue
                if tried == width:
                    return True
                extended = self._make_content(device, partition, (*content, segment))
                if extended is None:
                    continue
                served, tried = self._find_worth(others_rps + _sum_rates([extended]), weights), tried + 1
                if served > worth + least_gain:
                    best, worth = extended, worth if is_every else served
                    self._generated[name, partition.mig][replace(extended, start=None)] = None
                added = Counter({segment.model: segment.capacity_rps})
                is_cut |= extend((*content, segment), position, alone_rps + added, width)
            return is_cut

        width = 1  # first a content filled greedily, then more and more alternatives of each replica
        while extend((), 0, others_rps, width) and self._asked < until:
            width *= 2
        return best

    def _make_content(
        self, device: Device, partition: PlacedPartition, content: Sequence[Segment]
    ) -> PlacedPartition | None:
        """Return the partition with other replicas at their full rates, None where they do not fit together."""
        self._asked += 1
        filled = replace(partition, replicas=tuple(segment.replica(0.0) for segment in content))
        if not fits_device(device, filled):
            return None
        filled = self._at_full_rates(device.name, filled)
        return filled if all(replica.rate_rps for replica in filled.replicas) else None

    def _find_worth(self, rates_rps: _ByModel, weights: _ByModel) -> float:
        return math.fsum(
            weights[model] * min(rate_rps, self.problem.demand(model).rate_rps) for model, rate_rps in rates_rps.items()
        )

    def _rank_options(
        self, device: Device, mig: str | None, others_rps: _ByModel, weights: _ByModel
    ) -> list[tuple[float, Segment]]:
        """Return replicas of unserved demands with their worth per percent, best first; of alike demands, of one."""
        missing: dict[str, tuple[float, str]] = {}
        for demand in self.problem.demands:
            first = self.segments.first_alike(demand.model)
            rate_rps = demand.rate_rps - others_rps.get(demand.model, 0.0)
            if rate_rps > EXACT * demand.rate_rps:
                missing[first] = max(missing.get(first, (0.0, "")), (rate_rps, demand.model))
        ranking = [
            (weights[model] * min(segment.capacity_rps, rate_rps) / segment.share.sm_pct, segment)
            for rate_rps, model in missing.values()
            for segment in self._list_options(model, device, mig)
        ]
        return sorted(ranking, key=lambda pair: -pair[0])

    def _list_options(self, model: str, device: Device, mig: str | None) -> tuple[Segment, ...]:
        """Return the replicas of a model: of each share, batches that serve no less than all smaller ones."""
        key = model, device.name, mig
        if key not in self._options:
            options: list[Segment] = []
            demand, listed = self.problem.demand(model), self.problem.estimator.shares(model, device)
            chosen = {c.share: c.workload for c in self.choices[model] if (c.device, c.share.mig) == (device.name, mig)}
            for share in sorted({*chosen, *(share for share in listed if share.mig == mig)}, key=lambda s: s.sm_pct):
                most_rps = 0.0
                workloads = {
                    *self.segments.workloads(model, device, share),
                    *([chosen[share]] if share in chosen else []),
                }
                for workload in sorted(workloads, key=lambda workload: (workload.processes, workload.batch)):
                    segment = self.segments.make(demand, device, workload, least_rps=most_rps)
                    is_better = segment is not None and segment.capacity_rps >= most_rps
                    if segment is not None and is_better and not self.segments.is_claimed(device, workload):
                        most_rps = segment.capacity_rps
                        options.append(segment)
            self._options[key] = tuple(options)
        return self._options[key]


@dataclass(slots=True)
class _Master:
    """The program over the contents so far, with its rows and columns."""

    program: Program = field(default_factory=Program)
    rates: dict[str, int] = field(default_factory=dict)  #: Rows, by model.
    kinds: dict[PartitionKind, int] = field(default_factory=dict)  #: Rows.
    configurations: dict[int, DeviceConfiguration] = field(default_factory=dict)  #: By column.
    contents: dict[int, tuple[PartitionKind, PlacedPartition]] = field(default_factory=dict)  #: By column.


def is_improvable(objective: float, bound: float, step: float) -> bool:
    """Return whether an objective may be lower by a step, at a bound on all objectives."""
    return objective - bound > max(step * (1.0 - EXACT), EXACT * abs(bound))


def _with_partitions(gpus: _Gpus, partitions: Iterable[PlacedPartition]) -> _Gpus:
    queue = iter(partitions)
    return tuple(replace(gpu, partitions=tuple(next(queue) for _ in gpu.partitions)) for gpu in gpus)


def _sum_rates(partitions: Iterable[PlacedPartition]) -> Counter[str]:
    rates_rps = Counter[str]()
    for partition in partitions:
        for replica in partition.replicas:
            rates_rps[replica.model] += replica.rate_rps  # type: ignore[assignment]
    return rates_rps
