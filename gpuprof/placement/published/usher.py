"""USHER: groups of balanced models with jointly decided replicas (Shubha et al., OSDI'24, §3.3)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from gpuprof.domain.demand import Demand
from gpuprof.errors import InputError
from gpuprof.placement.bin import Bin
from gpuprof.placement.placement import TOLERANCE, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.published.requirement import CreqMetric, Requirement, require_gpus, require_metric, requirements
from gpuprof.placement.published.usher_groups import balanced_groups
from gpuprof.placement.published.usher_placement import (
    Ablation,
    FreeCapacity,
    OpenedDevices,
    Option,
    Trial,
    order_models,
)
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

#: Maximum multiple of the least replication degree: 1 … 6 times the least serving the rate (§3.3.2).
_MULTIPLES = 6
#: Number of configurations of a group above which dominated options are left out.
_MOST_CONFIGURATIONS = 10_000
#: Tolerance of goodputs above their summation error.
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Usher:
    """USHER's Algorithms 1 and 2, for elastic fleets (least cost) and fixed fleets (most goodput).

    `balanced_groups` makes the groups (§3.3.1); `_options` lists the configurations of a group (Algorithm 1, line 2)
    and `_best` tries them and keeps the best (lines 3 to 5); `Trial` and `order_models` in `usher_placement` are
    Algorithm 2. Where USHER is silent, this follows the reading of Elvinger's thesis (§5.2.2): groups by matchings,
    placed in the order of their first demand; among equally good configurations the first, batches and replication
    degrees ascending; neutral models last; a model whose least replication degree exceeds a fixed fleet is not served.
    Decided here: the batch sizes are the estimator's; with several kinds of devices a model's Creq and Mreq are the
    means over the kinds able to host it; goodput is the largest rate of a replica by the problem's latency rule; among
    configurations of equal goodput the cheapest, on fixed fleets too; a replica whose SLO, or whose neighbours', would
    break in USHER's place, which USHER does not check, gets a further device if available, of the same kind or else of
    the kind serving most of its rate.
    """

    creq: CreqMetric = "max-occupancy"  #: Metric behind Creq (thesis §5.3).
    group_size: int = 4  #: Maximum number of models in a group.
    #: The paper's ablations: "" (none), "CM" (no compute- and memory-heavy classes), "WD" (no workload division), "S"
    #: (no sorting).
    without: Ablation = ""
    #: True if replicas have no MPS shares, each free to use all SMs of its device (thesis, Figure A.1); by default each
    #: gets a share of Creq.
    unshared: bool = False
    #: Number of orders of the demands to try. USHER's result depends on the given order: among equal matchings and
    #: equally good configurations the first is kept. With more than one, the given order comes first, the others are
    #: drawn at random, and the best map is kept; ``found_by`` gives the worst and the best result.
    orders: int = 1

    def place(self, problem: Problem) -> Placement:
        """Return the placement.

        Raises `InputError` when no model has a compute requirement by the metric, or ``orders`` is below one.
        """
        if self.orders < 1:
            raise InputError(f"orders must be at least 1 but got {self.orders}")
        if self.unshared:
            require_gpus("usher", problem)
        if self.orders == 1:
            return self._place_in_order(problem)
        placements = [self._place_in_order(reordered) for reordered in _reorder(problem, self.orders)]
        ranks = [_rank(problem, placement) for placement in placements]
        best, worst = max(ranks), min(ranks)
        range_text = f"{worst[0]:.6g} to {best[0]:.6g} requests/s at {-worst[1]:.4g} to {-best[1]:.4g} an hour"
        summary = f"the best of {len(placements)} orders of the demands, which serve {range_text}"
        return replace(placements[ranks.index(best)], found_by=summary)

    def _place_in_order(self, problem: Problem) -> Placement:
        segments = Segments(problem, capped=False)
        requirements, means = self._know_requirements(problem, segments)
        require_metric(bool(means), self.creq)
        demands = {demand.model: demand for demand in problem.by_priority() if requirements.get(demand.model)}
        entries = sorted(problem.fleet.entries, key=lambda entry: entry.price_per_hour)
        spaces: list[FreeCapacity] = []
        hosts: list[tuple[Option, int]] = []
        for group in balanced_groups({model: means[model] for model in demands}, self.group_size):
            options = [self._options(problem, demands[model], requirements[model]) for model in group]
            trial = self._best(OpenedDevices(entries, spaces), [choice for choice in options if choice])
            if trial is not None:
                spaces = trial.spaces()
                hosts += trial.hosts
        return self._placement(problem, segments, spaces, hosts)

    def _know_requirements(
        self, problem: Problem, segments: Segments
    ) -> tuple[dict[str, dict[int, dict[str, Requirement]]], dict[str, tuple[float, float]]]:
        """Return for each model its requirements by batch and device, and its mean (Creq, Mreq)."""
        result: dict[str, dict[int, dict[str, Requirement]]] = {}
        means = {}
        for demand in problem.by_priority():
            requirements_by_batch: dict[int, dict[str, Requirement]] = {}
            averages = []
            for entry in problem.fleet.entries:
                by_batch, mean = requirements(segments, demand, entry.device, self.creq, self.unshared)
                averages += [] if mean is None else [mean]
                for batch, requirement in by_batch.items():
                    requirements_by_batch.setdefault(batch, {})[entry.device.name] = requirement
            result[demand.model] = requirements_by_batch
            if averages:
                count = len(averages)
                means[demand.model] = (sum(c for c, _ in averages) / count, sum(m for _, m in averages) / count)
        return result, means

    def _options(
        self, problem: Problem, demand: Demand, requirements: Mapping[int, Mapping[str, Requirement]]
    ) -> list[Option]:
        """Return every {BS, RD} of a model (§3.3.2): RD in multiples of the largest batch's number of replicas."""
        largest = requirements[max(requirements)]
        highest = max(requirement.segment.capacity_rps for requirement in largest.values())
        least = math.ceil(demand.rate_rps / highest * (1 - TOLERANCE))
        is_fixed = not problem.fleet.is_elastic
        most = sum(entry.count or 0 for entry in problem.fleet.entries) if is_fixed else math.inf
        most = min(most, demand.max_replicas or math.inf)
        options = []
        for batch in sorted(requirements):
            for multiple in range(1, 2 if self.without == "WD" else _MULTIPLES + 1):
                option = Option(demand, batch, least * multiple, requirements[batch])
                serves = option.replicas * option.goodput_rps >= demand.rate_rps * (1 - TOLERANCE)
                if option.replicas <= most and (is_fixed or serves):
                    options.append(option)
        return options

    def _best(self, devices: OpenedDevices, options: Sequence[Sequence[Option]]) -> Trial | None:
        """Algorithm 1: keep the configuration of most goodput, among these the cheapest, then the first.

        Configurations that cannot beat the best so far, because too few devices can host their replicas, are skipped.
        """
        best: Trial | None = None
        choices = _manageable(options)
        total_rps = round(sum(choice[0].demand.rate_rps for choice in choices if choice), 6)
        most = {option: devices.most_goodput_rps(option) for choice in choices for option in choice}
        least = {option: devices.least_cost(option) for choice in choices for option in choice}
        for configuration in product(*choices):
            if best is not None:
                goodput, negated = best.rank()
                if goodput == total_rps and max(least[option] for option in configuration) >= -negated:
                    continue
                reachable = sum(most[option] for option in configuration)
                if not reachable or reachable < goodput - _ROUNDING:
                    continue
            trial = Trial(devices)
            for option in order_models(configuration, self.without):
                trial.place(option)
            if best is None or trial.rank() > best.rank():
                best = trial
        return best

    def _placement(
        self, problem: Problem, segments: Segments, spaces: Sequence[FreeCapacity], hosts: Sequence[tuple[Option, int]]
    ) -> Placement:
        """Put the replicas on real devices, which may refuse for interference, and name the unplaced demands."""
        bins = [Bin(problem.device(space.device), unshared=self.unshared) for space in spaces]
        rejections: list[tuple[Option, str, float]] = []
        for model, hosted in _by_model(hosts).items():
            demand = problem.demand(model)
            hosts_of_model = [(option, option.by_device[spaces[index].device], index) for option, index in hosted]
            capacity = sum(requirement.segment.capacity_rps for _, requirement, _ in hosts_of_model)
            load = min(1.0, demand.rate_rps / capacity)
            for option, requirement, index in hosts_of_model:
                rate_rps = requirement.segment.capacity_rps * load
                if not bins[index].add(requirement.replica(rate_rps), segments):
                    rejections.append((option, bins[index].device.name, rate_rps))
        bins += self._apart(problem, segments, bins, rejections)
        gpus = tuple(gpu_bin.to_gpu() for gpu_bin in bins if not gpu_bin.is_empty)
        name = f"usher{'/' + self.without if self.without else ''}"
        return with_unplaced(problem, segments, Placement(name, gpus))

    def _apart(
        self, problem: Problem, segments: Segments, bins: Sequence[Bin], rejections: Sequence[tuple[Option, str, float]]
    ) -> list[Bin]:
        """Return further devices for the replicas breaking an SLO with their neighbours, first fit.

        They are of the same kind, else of the kind serving most of the rate, the cheapest among equals.
        """
        used_counts = Counter(gpu_bin.device.name for gpu_bin in bins)
        fresh: list[Bin] = []
        for option, kind, rate_rps in rejections:
            replicas = {
                device: requirement.replica(min(rate_rps, requirement.segment.capacity_rps))
                for device, requirement in option.by_device.items()
            }
            if any(g.device.name in replicas and g.add(replicas[g.device.name], segments) for g in fresh):
                continue
            able = [entry for entry in problem.fleet.entries if entry.device.name in replicas]
            left = [entry for entry in able if entry.count is None or used_counts[entry.device.name] < entry.count]
            if left:
                ranks = [(e.device.name != kind, -replicas[e.device.name].rate_rps, e.price_per_hour) for e in left]
                device = left[ranks.index(min(ranks))].device
                fresh.append(Bin(device, unshared=self.unshared))
                fresh[-1].add(replicas[device.name], segments)
                used_counts[device.name] += 1
        return fresh


def _manageable(options: Sequence[Sequence[Option]]) -> list[list[Option]]:
    """Return the options, without dominated options where there are too many."""
    if math.prod(len(choice) for choice in options) <= _MOST_CONFIGURATIONS:
        return [list(choice) for choice in options]
    efficient = [[o for o in choice if not any(_dominates(option, o) for option in choice)] for choice in options]
    if math.prod(len(choice) for choice in efficient) <= _MOST_CONFIGURATIONS:
        return efficient
    most = max(2, int(_MOST_CONFIGURATIONS ** (1.0 / len(options)) / 2))
    return [_fewer(sorted(choice, key=lambda option: option.replicas * option.total_pct), most) for choice in efficient]


def _fewer(options: Sequence[Option], most: int) -> list[Option]:
    """Return at most ``most`` options: the first serving everything, and some serving less."""
    complete = [option for option in options if option.served_rps >= option.demand.rate_rps * (1 - TOLERANCE)]
    partial = [option for option in options if option not in complete]
    cut = max(most - len(complete), min(len(partial), most // 2))
    return complete[: most - cut] + partial[:: max(1, math.ceil(len(partial) / max(1, cut)))][:cut]


def _reorder(problem: Problem, count: int) -> Iterator[Problem]:
    """Yield the problem with its demands in different orders, the given order first."""
    random, orders = Random(problem.options.seed), set[tuple[str, ...]]()
    demands = list(problem.demands)
    for _ in range(count):
        names = tuple(demand.model for demand in demands)
        if names not in orders:
            orders.add(names)
            yield replace(problem, demands=tuple(demands))
        random.shuffle(demands)


def _rank(problem: Problem, placement: Placement) -> tuple[float, float]:
    """Return the ranking of placements: most requests served, then least cost."""
    cost = sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
    return round(sum(placement.rates_rps().values()), 6), -cost


def _dominates(first: Option, second: Option) -> bool:
    first_costs = (first.replicas, first.creq_pct, first.mreq_pct, -first.served_rps)
    second_costs = (second.replicas, second.creq_pct, second.mreq_pct, -second.served_rps)
    return first_costs != second_costs and all(a <= b for a, b in zip(first_costs, second_costs, strict=True))


def _by_model(hosts: Sequence[tuple[Option, int]]) -> dict[str, list[tuple[Option, int]]]:
    grouped: dict[str, list[tuple[Option, int]]] = {}
    for option, index in hosts:
        grouped.setdefault(option.demand.model, []).append((option, index))
    return grouped
