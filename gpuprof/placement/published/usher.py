"""USHER: groups of balanced models with jointly decided replicas and Algorithm 2 (Shubha et al., OSDI'24, §3.3)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Literal

from gpuprof.domain.demand import Demand
from gpuprof.domain.fleet import FleetEntry
from gpuprof.placement.bin import Bin
from gpuprof.placement.placement import TOLERANCE, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.published.milp import CreqMetric, Requirement, require_gpus, require_metric, requirements
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

#: Number of configurations of a group above which dominated options are left out.
_MOST_CONFIGURATIONS = 10_000

Ablation = Literal["", "CM", "WD", "S"]


@dataclass(frozen=True, slots=True)
class Usher:
    """USHER's Algorithms 1 and 2, for elastic fleets (least cost) and fixed fleets (most goodput).

    `balanced_groups` makes the groups (§3.3.1); `_options` lists the configurations of a group (Algorithm 1, line 2)
    and `_best` tries them and keeps the best (lines 3 to 5); `Trial` and `order_models` are Algorithm 2. Where USHER is
    silent, this follows the reading of Elvinger's thesis (§5.2.2): groups by matchings, placed in the order of their
    first demand; among equally good configurations the first, batches and replication degrees ascending; neutral models
    last; a model whose least replication degree exceeds a fixed fleet is not served.
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

    def place(self, problem: Problem) -> Placement:
        """Return the placement.

        Raises `InputError` when no model has a compute requirement by the metric.
        """
        if self.unshared:
            require_gpus("usher", problem)
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
        """Return every {BS, RD} of a model (§3.3.2): RD 1 … 6 times the largest batch's number of replicas."""
        largest = requirements[max(requirements)]
        highest = max(requirement.segment.capacity_rps for requirement in largest.values())
        least = math.ceil(demand.rate_rps / highest * (1 - TOLERANCE))
        is_fixed = not problem.fleet.is_elastic
        most = sum(entry.count or 0 for entry in problem.fleet.entries) if is_fixed else math.inf
        most = min(most, demand.max_replicas or math.inf)
        options = []
        for batch in sorted(requirements):
            for multiple in range(1, 2 if self.without == "WD" else 7):
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
                reachable = round(sum(most[option] for option in configuration), 6)  # as in a rank
                if not reachable or reachable < goodput:
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
        """Return further devices for replicas that break an SLO beside their neighbours, by first fit.

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
    """Return the options; if there are too many, without dominated ones."""
    if math.prod(len(choice) for choice in options) <= _MOST_CONFIGURATIONS:
        return [list(choice) for choice in options]
    efficient = [[o for o in choice if not any(_dominates(option, o) for option in choice)] for choice in options]
    if math.prod(len(choice) for choice in efficient) <= _MOST_CONFIGURATIONS:
        return efficient
    most = max(2, int(_MOST_CONFIGURATIONS ** (1.0 / len(options)) / 2))
    return [_fewer(sorted(choice, key=lambda option: option.replicas * option.total_pct), most) for choice in efficient]


def _fewer(options: Sequence[Option], most: int) -> list[Option]:
    """Return at most ``most`` options: the first that serves everything, and some that serve less."""
    complete = [option for option in options if option.served_rps >= option.demand.rate_rps * (1 - TOLERANCE)]
    partial = [option for option in options if option not in complete]
    cut = max(most - len(complete), min(len(partial), most // 2))
    return complete[: most - cut] + partial[:: max(1, math.ceil(len(partial) / max(1, cut)))][:cut]


def _dominates(first: Option, second: Option) -> bool:
    first_costs = (first.replicas, first.creq_pct, first.mreq_pct, -first.served_rps)
    second_costs = (second.replicas, second.creq_pct, second.mreq_pct, -second.served_rps)
    return first_costs != second_costs and all(a <= b for a, b in zip(first_costs, second_costs, strict=True))


def _by_model(hosts: Sequence[tuple[Option, int]]) -> dict[str, list[tuple[Option, int]]]:
    grouped: dict[str, list[tuple[Option, int]]] = {}
    for option, index in hosts:
        grouped.setdefault(option.demand.model, []).append((option, index))
    return grouped


def balanced_groups(requirements: Mapping[str, tuple[float, float]], most: int) -> tuple[tuple[str, ...], ...]:
    """Group models so that in each group ΣCreq ≈ ΣMreq (OSDI'24 §3.3.1).

    USHER does not describe its variant of k-means; as in Elvinger's thesis (§5.2.2), pairs are formed in rounds by a
    matching of minimum weight among those of maximum cardinality. The weight of a pair of groups is |ΣCreq - ΣMreq|
    over both. The greatest surplus of compute is paired with the greatest of memory, then the next ones: as the weight
    is a convex function of a sum, no matching is lighter.

    ``requirements``: mean Creq and Mreq of each model; ``most``: largest group.

    Returns
    -------
    tuple of tuple of str
        Groups and their models in the order of ``requirements``.
    """
    groups: list[tuple[str, ...]] = [(model,) for model in requirements]
    size = 2
    while size <= most and len(groups) > 1:
        groups = _pair_groups(groups, requirements)
        size *= 2
    position = {model: index for index, model in enumerate(requirements)}
    sorted_groups = [tuple(sorted(group, key=position.__getitem__)) for group in groups]
    return tuple(sorted(sorted_groups, key=lambda group: position[group[0]]))


def _pair_groups(
    groups: Sequence[tuple[str, ...]], requirements: Mapping[str, tuple[float, float]]
) -> list[tuple[str, ...]]:
    surplus = [sum(requirements[model][0] - requirements[model][1] for model in group) for group in groups]
    pairs = pair_opposites(surplus)
    singles = set(range(len(groups))) - {index for pair in pairs for index in pair}
    return [groups[i] + groups[j] for i, j in sorted(pairs)] + [groups[index] for index in sorted(singles)]


def pair_opposites(surplus: Sequence[float]) -> list[tuple[int, int]]:
    """Return a matching of least Σ |surplus + surplus|: least with greatest; of an odd number one group is left out.

    No matching is lighter.
    """
    order = sorted(range(len(surplus)), key=lambda index: (surplus[index], index))
    if len(order) % 2:
        del order[_left_out([surplus[index] for index in order])]
    pairs = [(order[k], order[-1 - k]) for k in range(len(order) // 2)]
    return [(min(pair), max(pair)) for pair in pairs]


def _left_out(surpluses: Sequence[float]) -> int:
    """Return the group to leave out, so that pairing least with greatest surpluses has the least weight.

    Without a position of the lower half, the pairs outside it stay and those inside it shift by one; likewise above.
    """
    last, half = len(surpluses) - 1, len(surpluses) // 2
    outer_sums = [0.0, *accumulate(abs(surpluses[k] + surpluses[last - k]) for k in range(half))]
    low = [0.0, *accumulate(abs(surpluses[k + 1] + surpluses[last - k]) for k in reversed(range(half)))]
    high = [0.0, *accumulate(abs(surpluses[k] + surpluses[last - 1 - k]) for k in reversed(range(half)))]
    below = [(outer_sums[k] + low[half - k], k) for k in range(half + 1)]
    above = [(outer_sums[k] + high[half - k], last - k) for k in range(half)]
    return min(below + above)[1]


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A batch size and a replication degree of a model ({BS, RD} of Algorithm 1, line 2)."""

    demand: Demand
    batch: int
    replicas: int
    by_device: Mapping[str, Requirement]  #: The kinds of device able to host it.
    #: ``creq_pct``, ``mreq_pct``: mean over these kinds.
    creq_pct: float = field(init=False)
    mreq_pct: float = field(init=False)
    goodput_rps: float = field(init=False)  #: Least goodput of a replica over the kinds of devices.

    def __post_init__(self) -> None:
        requirements = list(self.by_device.values())
        object.__setattr__(self, "creq_pct", sum(need.creq_pct for need in requirements) / len(requirements))
        object.__setattr__(self, "mreq_pct", sum(need.mreq_pct for need in requirements) / len(requirements))
        object.__setattr__(self, "goodput_rps", min(need.segment.capacity_rps for need in requirements))

    @property
    def total_pct(self) -> float:
        """Creq + Mreq, the sorting key of models."""
        return self.creq_pct + self.mreq_pct

    @property
    def leaning(self) -> Literal["compute", "memory", ""]:
        """Compute-heavy, memory-heavy or neither (line 7)."""
        heavy = 1.2  # ratio of the requirements (§3.3.2)
        if self.creq_pct >= heavy * self.mreq_pct:
            return "compute"
        return "memory" if self.mreq_pct >= heavy * self.creq_pct else ""

    @property
    def served_rps(self) -> float:
        """Rate of all replicas, at most the demand's."""
        return min(self.demand.rate_rps, self.goodput_rps * self.replicas)


@dataclass(frozen=True, slots=True)
class FreeCapacity:
    """Free percentages of a device, and the models of the current group on it."""

    device: str
    compute_pct: float = 100.0
    memory_pct: float = 100.0
    models: frozenset[str] = frozenset()

    @property
    def free_pct(self) -> float:
        """C-space + M-space."""
        return self.compute_pct + self.memory_pct

    def after(self, model: str, requirement: Requirement) -> FreeCapacity | None:
        """Return the device with another replica, None when it does not fit. A device holds one replica of a model."""
        compute, memory = self.compute_pct - requirement.creq_pct, self.memory_pct - requirement.mreq_pct
        if compute < -TOLERANCE or memory < -TOLERANCE or model in self.models:
            return None
        return FreeCapacity(self.device, compute, memory, self.models | {model})


@dataclass(slots=True)
class OpenedDevices:
    """The devices opened for earlier groups, as the starting point of a group's configurations."""

    entries: Sequence[FleetEntry]  #: Cheapest first.
    spaces: Sequence[FreeCapacity]
    used: Counter[str] = field(init=False)
    _fits: dict[Option, list[tuple[float, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.used = Counter(space.device for space in self.spaces)
        self._fits = {}

    def fits(self, option: Option) -> list[tuple[float, int]]:
        """Return (free percentage afterwards, index) of the devices that could host a replica, fullest first.

        No device holds the model yet, because a model is in a single group.
        """
        if option not in self._fits:
            needs = {name: (need.creq_pct, need.mreq_pct) for name, need in option.by_device.items()}
            fits = []
            for index, space in enumerate(self.spaces):
                if space.device in needs:
                    creq, mreq = needs[space.device]
                    compute, memory = space.compute_pct - creq, space.memory_pct - mreq
                    if compute >= -TOLERANCE and memory >= -TOLERANCE:
                        fits.append((compute + memory, index))
            self._fits[option] = sorted(fits)
        return self._fits[option]

    def count_unopened(self, option: Option) -> float:
        """Return the number of unopened devices that could host the option; infinity on an elastic fleet."""
        able = [entry for entry in self.entries if entry.device.name in option.by_device]
        return sum(math.inf if e.count is None else e.count - self.used[e.device.name] for e in able)

    def most_goodput_rps(self, option: Option) -> float:
        """Return an upper bound on the goodput of every placement of a demand's replicas."""
        hosts = min(option.replicas, len(self.fits(option)) + self.count_unopened(option))
        most = max(requirement.segment.capacity_rps for requirement in option.by_device.values())
        return min(option.demand.rate_rps, hosts * most)

    def least_cost(self, option: Option) -> float:
        """Return the minimum cost of placing all replicas of the option: a device holds one of them."""
        cheapest = min((e.price_per_hour for e in self.entries if e.device.name in option.by_device), default=0.0)
        return max(0, min(option.replicas - len(self.fits(option)), self.count_unopened(option))) * cheapest


@dataclass(slots=True)
class Trial:
    """A configuration of a group being placed (the result of PLACEMENT)."""

    ground: OpenedDevices
    #: Each replica, and the index of its device: opened devices follow those of the ground.
    hosts: list[tuple[Option, int]] = field(default_factory=list)
    #: ``cost``, ``goodput_rps``: cost of the opened devices; goodput of the group's models.
    cost: float = 0.0
    goodput_rps: float = 0.0
    _changed: dict[int, FreeCapacity] = field(default_factory=dict)
    _opened: list[FreeCapacity] = field(default_factory=list)

    def spaces(self) -> list[FreeCapacity]:
        """Return all devices with their free capacity under this configuration."""
        spaces = [self._changed.get(index, space) for index, space in enumerate(self.ground.spaces)]
        return [FreeCapacity(space.device, space.compute_pct, space.memory_pct) for space in (*spaces, *self._opened)]

    def rank(self) -> tuple[float, float]:
        """Return the ranking of configurations: most goodput, then least cost."""
        return round(self.goodput_rps, 6), -self.cost

    def place(self, option: Option) -> None:
        """Place a model (lines 11 to 17)."""
        first = len(self.hosts)
        missing = self._host(option, option.replicas, self._own(option))  # line 11
        missing = self._host(option, missing, self._outside(option, missing))  # line 12
        while missing > 0 and self._initialise(option):  # lines 13 to 15
            missing -= 1
        capacity_rps = sum(option.by_device[self._space(i).device].segment.capacity_rps for _, i in self.hosts[first:])
        self.goodput_rps += min(capacity_rps, option.demand.rate_rps)

    def _space(self, index: int) -> FreeCapacity:
        first = len(self.ground.spaces)
        if index >= first:
            return self._opened[index - first]
        return self._changed.get(index, self.ground.spaces[index])

    def _own(self, option: Option) -> list[tuple[float, int]]:
        """Return the devices opened for this group that can host a replica, fullest first."""
        first = len(self.ground.spaces)
        return sorted(self._taking(option, range(first, first + len(self._opened))))

    def _outside(self, option: Option, most: int) -> list[tuple[float, int]]:
        """Return at most ``most`` devices of earlier groups that can host a replica, fullest first."""
        fits = list(self._taking(option, self._changed))
        for fit in self.ground.fits(option) if most else []:
            if most <= 0:
                break
            if fit[1] not in self._changed:
                fits.append(fit)
                most -= 1
        return sorted(fits)

    def _taking(
        self, option: Option, indices: Iterator[int] | Sequence[int] | Mapping[int, FreeCapacity]
    ) -> Iterator[tuple[float, int]]:
        for index in indices:
            requirement = option.by_device.get(self._space(index).device)
            after = None if requirement is None else self._space(index).after(option.demand.model, requirement)
            if after is not None:
                yield after.free_pct, index

    def _host(self, option: Option, missing: int, fits: Sequence[tuple[float, int]]) -> int:
        """Put replicas on devices in the order of ``fits``; return the number left."""
        for _, index in fits[:missing]:
            space = self._space(index)
            after = space.after(option.demand.model, option.by_device[space.device])
            if after is not None:
                self._put_space(index, after)
                self.hosts.append((option, index))
        return missing - min(missing, len(fits))

    def _put_space(self, index: int, space: FreeCapacity) -> None:
        first = len(self.ground.spaces)
        if index >= first:
            self._opened[index - first] = space
        else:
            self._changed[index] = space

    def _initialise(self, option: Option) -> bool:
        """NEW_LOWEST_COST_GPU_INITIALIZATION: open the cheapest device able to host the model, if available."""
        for entry in self.ground.entries:
            name = entry.device.name
            used_count = self.ground.used[name] + sum(space.device == name for space in self._opened)
            if name in option.by_device and (entry.count is None or used_count < entry.count):
                fresh = FreeCapacity(name).after(option.demand.model, option.by_device[name])
                if fresh is not None:
                    self._opened.append(fresh)
                    self.hosts.append((option, len(self.ground.spaces) + len(self._opened) - 1))
                    self.cost += entry.price_per_hour
                    return True
        return False


def order_models(configuration: Sequence[Option], ablation: Ablation = "") -> list[Option]:
    """Lines 7 to 9: alternate compute- and memory-heavy models, each class by falling Creq + Mreq, neutral models
    last.
    """
    if ablation == "S":
        return list(configuration)
    by_size = sorted(configuration, key=lambda option: -option.total_pct)
    if ablation == "CM":
        return by_size
    compute = [option for option in by_size if option.leaning == "compute"]
    memory = [option for option in by_size if option.leaning == "memory"]
    balanced = [option for option in by_size if option.leaning == ""]
    paired = [option for pair in zip(compute, memory, strict=False) for option in pair]
    shorter = min(len(compute), len(memory))
    return [*paired, *compute[shorter:], *memory[shorter:], *balanced]
