"""Maps of partition contents, neighbours included.

The content of a partition is a multiset of replicas, each at its full rate beside the others. Branch and bound finds
the content of the greatest worth: replicas are added by falling worth per share, and a branch ends where not even
replicas without neighbours would be worth more. An integer program chooses the configurations of the devices and the
contents of their partitions, generated for its dual prices; then every content that might be in a better map is added.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import fits_device
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.candidates import Choices
from gpuprof.placement.optimal.judge import find_step, list_prices, weigh_priority
from gpuprof.placement.optimal.local_search import MOST_ASKED
from gpuprof.placement.optimal.pattern import DeviceConfiguration, PartitionKind, list_configurations
from gpuprof.placement.optimal.restricted_master import served_column
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT, Program, Solution
from gpuprof.placement.segment import Segment, Segments

_Gpus = tuple[PlacedGpu, ...]
_ByModel = Mapping[str, float]


@dataclass(slots=True)
class Contents:
    """Searches maps of a problem."""

    problem: Problem
    segments: Segments  #: Of the same problem, with a latency budget.
    choices: Choices
    limit: Limit
    _until: Limit = field(default_factory=Limit)  #: Of the generation.
    _asked: int = 0
    _rates_rps: dict[tuple[str, Workload, tuple[Workload, ...]], float] = field(default_factory=dict)
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
        gap, seed = 0.0, self.problem.options.seed
        best: tuple[_Master, Solution] | None = None
        step = 0.0 if is_partial else find_step(list_prices(self.problem.fleet.entries))
        self._until = self.limit.keeping((self.limit.left_s or 0.0) / 4.0)
        while True:
            master = self._make_master(demands, is_partial)
            relaxed = master.program.solve(relaxed=True, time_limit_s=self.limit.left_s, seed=seed)
            if relaxed is None:
                break
            is_extended = self._generate(master, relaxed, gap)
            if is_extended and not gap and not self._is_over:
                continue
            master = self._make_master(demands, is_partial)
            solution = master.program.solve(time_limit_s=self.limit.left_s, seed=seed, least_step=step)
            if solution is not None and (best is None or solution.objective < best[1].objective):
                best = master, solution
            if solution is None or gap or self._is_over:
                break
            # A content that is worth less than its price by more than this is in no better map.
            gap = solution.objective - relaxed.objective
            if gap <= max(step * (1.0 - EXACT), EXACT * abs(relaxed.objective)):
                break
        return start if best is None else tuple(self._read(*best))

    @property
    def _is_over(self) -> bool:
        return self._until.is_over or self._asked >= MOST_ASKED

    def _generate(self, master: _Master, relaxed: Solution, gap: float) -> bool:
        """Add contents worth more than their price minus ``gap``; return whether any were added."""
        prices, count = {model: relaxed.duals[row] for model, row in master.rates.items()}, self._count_generated()
        for kind, row in master.kinds.items():
            self._price_contents(kind, prices, -relaxed.duals[row] - gap, is_every=gap > 0.0)
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
                entries = {master.rates[model]: rate for model, rate in _sum_rates(content).items()}
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

    def _at_full_rates(self, name: str, partition: PlacedPartition) -> PlacedPartition:
        device = self.problem.device(name)
        alike = {replica.workload: replica for replica in partition.replicas}  # they have the same neighbours
        rates_rps = {
            workload: self._find_rate(device, workload, partition.beside(replica))
            for workload, replica in alike.items()
        }
        replicas = (replace(replica, rate_rps=rates_rps[replica.workload]) for replica in partition.replicas)
        return replace(partition, replicas=tuple(replicas))

    def _find_rate(self, device: Device, workload: Workload, beside: Sequence[Workload]) -> float:
        """Return the full rate of a replica beside neighbours, 0.0 if it never keeps its SLO."""
        key = device.name, workload, tuple(sorted(beside))
        if key not in self._rates_rps:
            segment = self.segments.make(self.problem.demand(workload.model), device, workload, key[2])
            self._rates_rps[key] = 0.0 if segment is None else segment.capacity_rps
        return self._rates_rps[key]

    def _price_contents(self, kind: PartitionKind, prices: _ByModel, least: float, *, is_every: bool) -> None:
        """Add contents of a partition with requests worth more than ``least``, each better than the last.

        With ``is_every``, all of them, as far as there is time; ``prices``: the worth of a request, by model.
        """
        device, until, count = self.problem.device(kind[0]), self._asked + MOST_ASKED // 10, self._count_generated()
        options = self._rank_options(device, kind[1], prices)
        least_gain = EXACT * self._find_worth({d.model: d.rate_rps for d in self.problem.demands}, prices)

        def extend(content: tuple[Segment, ...], first: int, alone_rps: Counter[str], width: int) -> bool:
            """Try the contents with more replicas; return whether more than ``width`` replicas were left to add."""
            nonlocal least
            free_pct, tried, is_cut = 100.0 - math.fsum(segment.share.sm_pct for segment in content), 0, False
            potential = self._find_worth(alone_rps, prices)
            for position, (density, segment) in enumerate(options[first:], first):
                if potential + density * free_pct <= least + least_gain or self._asked >= until or self._is_over:
                    break
                if segment.share.sm_pct > free_pct + TOLERANCE or self._is_quota_used(content, segment.model):
                    continue
                if tried == width:
                    return True
                extended = self._make_content(device, kind[1], (*content, segment))
                if extended is None:
                    continue
                tried += 1
                worth = self._find_worth(_sum_rates(extended), prices)
                if worth > least + least_gain:
                    self._generated[kind][extended] = None
                    least = least if is_every else worth
                added = Counter({segment.model: segment.capacity_rps})
                is_cut |= extend((*content, segment), position, alone_rps + added, width)
            return is_cut

        width = 1  # first a content filled greedily, then more and more alternatives of each replica
        while extend((), 0, Counter(), width) and self._asked < until:
            if not is_every and self._count_generated() > count:
                break  # new prices guide better than more alternatives at these
            width *= 2

    def _is_quota_used(self, content: Sequence[Segment], model: str) -> bool:
        most = self.problem.demand(model).max_replicas
        return most is not None and sum(segment.model == model for segment in content) >= most

    def _make_content(self, device: Device, mig: str | None, content: Sequence[Segment]) -> PlacedPartition | None:
        """Return a partition of replicas at their full rates, None where they do not fit together."""
        self._asked += 1
        partition = PlacedPartition(tuple(segment.replica(0.0) for segment in content), mig)
        if not fits_device(device, partition):
            return None
        partition = self._at_full_rates(device.name, partition)
        return partition if all(replica.rate_rps for replica in partition.replicas) else None

    def _find_worth(self, rates_rps: _ByModel, prices: _ByModel) -> float:
        return math.fsum(
            prices[model] * min(rate_rps, self.problem.demand(model).rate_rps) for model, rate_rps in rates_rps.items()
        )

    def _rank_options(self, device: Device, mig: str | None, prices: _ByModel) -> list[tuple[float, Segment]]:
        """Return replicas, best first, with their worth per percent of share; of equivalent demands the most valued."""
        valued: dict[str, str] = {}
        for model in sorted(prices, key=lambda model: prices[model]):
            valued[self.segments.first_alike(model)] = model
        ranking = [
            (prices[model] * segment.capacity_rps / segment.share.sm_pct, segment)
            for model in valued.values()
            for segment in self._list_options(model, device, mig)
        ]
        return sorted(ranking, key=lambda pair: -pair[0])

    def _list_options(self, model: str, device: Device, mig: str | None) -> tuple[Segment, ...]:
        """Return a model's replicas: for each share, the batches that serve at least as much as all smaller ones."""
        key = model, device.name, mig
        if key not in self._options:
            options: list[Segment] = []
            chosen = {c.share: c.workload for c in self.choices[model] if (c.device, c.share.mig) == (device.name, mig)}
            shares = {*chosen, *(share for share in self._list_shares(model, device) if share.mig == mig)}
            for share in sorted(shares, key=lambda share: share.sm_pct):
                listed, most_rps = set(self.segments.workloads(model, device, share)), 0.0
                workloads = listed.union([chosen[share]] if share in chosen else [])
                for workload in sorted(workloads, key=lambda workload: (workload.processes, workload.batch)):
                    demand = self.problem.demand(model)
                    segment = self.segments.make(demand, device, workload, least_rps=most_rps)
                    is_better = segment is not None and segment.capacity_rps >= most_rps
                    if segment is not None and is_better and not self.segments.is_claimed(device, workload):
                        most_rps = segment.capacity_rps
                        options.append(segment)
            self._options[key] = tuple(options)
        return self._options[key]

    def _list_shares(self, model: str, device: Device) -> Sequence[Share]:
        with suppress(InputError):
            return self.problem.estimator.shares(model, device)
        return ()


@dataclass(slots=True)
class _Master:
    """The restricted master program over the contents generated so far."""

    program: Program = field(default_factory=Program)
    rates: dict[str, int] = field(default_factory=dict)  #: Rows, by model.
    kinds: dict[PartitionKind, int] = field(default_factory=dict)  #: Rows.
    configurations: dict[int, DeviceConfiguration] = field(default_factory=dict)  #: By column.
    contents: dict[int, tuple[PartitionKind, PlacedPartition]] = field(default_factory=dict)  #: By column.


def _sum_rates(partition: PlacedPartition) -> Counter[str]:
    rates_rps = Counter[str]()
    for replica in partition.replicas:
        rates_rps[replica.model] += replica.rate_rps  # type: ignore[assignment]
    return rates_rps
