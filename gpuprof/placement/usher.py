"""USHER: groups of balanced models, replicas of each decided together (Shubha et al., OSDI'24, §3.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from gpuprof.demand import Demand
from gpuprof.fleet import FleetEntry
from gpuprof.placement.bin import Bin
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.requirement import CreqMetric, Requirement, require_metric, requirements
from gpuprof.placement.segment import Segments
from gpuprof.placement.usher_groups import balanced_groups
from gpuprof.placement.whynot import with_unplaced

#: A model is heavy in one resource when it needs this many times as much of it as of the other (§3.3.2).
_HEAVY = 1.2
#: Replication degrees tried are 1 … 6 times the least that serves the rate (§3.3.2).
_MULTIPLES = 6
#: Above this many configurations of a group, those that another one is better than in everything are left out.
_MOST_CONFIGURATIONS = 10_000
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class _Option:
    """A batch size and a replication degree of one model."""

    demand: Demand
    batch: int
    replicas: int
    by_device: Mapping[str, Requirement]

    def mean(self) -> tuple[float, float]:
        """Return Creq and Mreq, the mean over the kinds of device."""
        known = list(self.by_device.values())
        return sum(r.creq_pct for r in known) / len(known), sum(r.mreq_pct for r in known) / len(known)

    @property
    def goodput_rps(self) -> float:
        """Of one replica on the kind of device where it is least."""
        return min(requirement.segment.capacity_rps for requirement in self.by_device.values())

    @property
    def served_rps(self) -> float:
        """Of all replicas, as far as it is asked for."""
        return min(self.demand.rate_rps, self.goodput_rps * self.replicas)


@dataclass(frozen=True, slots=True)
class _Space:
    """A device while configurations are tried: what is free, who is there, which group opened it."""

    device: str
    compute_pct: float
    memory_pct: float
    models: frozenset[str]
    group: int

    def after(self, model: str, requirement: Requirement) -> _Space | None:
        """Return the device with one replica more, None when it does not fit. A device holds one replica of a model."""
        compute, memory = self.compute_pct - requirement.creq_pct, self.memory_pct - requirement.mreq_pct
        if compute < -_EPSILON or memory < -_EPSILON or model in self.models:
            return None
        return _Space(self.device, compute, memory, self.models | {model}, self.group)


@dataclass(slots=True)
class _Trial:
    """The outcome of placing a group in one configuration (what PLACEMENT returns)."""

    spaces: list[_Space]
    hosts: list[tuple[_Option, int]] = field(default_factory=list)
    cost: float = 0.0
    goodput_rps: float = 0.0


@dataclass(frozen=True, slots=True)
class Usher:
    """Algorithms 1 and 2, for elastic fleets (least cost) and fixed ones (most goodput).

    Where USHER is silent, this follows the reading of Elvinger's thesis (§5.2.2): groups by `balanced_groups`, placed
    in the order of their first demand; of configurations that are equally good the first, batches and replication
    degrees ascending; neutral models last; a model whose least replication degree exceeds a fixed fleet is not
    served. Decided here: goodput is the largest rate that a replica serves by the problem's latency rule; a device
    on which somebody's SLO would break beside the others is not used, although USHER does not look.

    Attributes
    ----------
    creq : {"max-occupancy", "wao", "wsm"}
        Metric behind Creq (thesis §5.3).
    group_size : int
        Models in a group at most.
    without : {"", "CM", "WD", "S"}
        The paper's ablations: no compute- and memory-heavy classes, no workload division, no sorting.
    """

    creq: CreqMetric = "max-occupancy"
    group_size: int = 4
    without: Literal["", "CM", "WD", "S"] = ""

    def place(self, problem: Problem) -> Placement:
        """Return the placement.

        Raises
        ------
        InputError
            When no model has a compute requirement by the metric.
        """
        segments = Segments(problem, capped=False)
        known, means = self._known(problem, segments)
        require_metric(bool(means), self.creq)
        demands = {demand.model: demand for demand in problem.by_priority() if known.get(demand.model)}
        spaces: list[_Space] = []
        hosts: list[tuple[_Option, int]] = []
        balanced = balanced_groups({model: means[model] for model in demands}, self.group_size)
        for number, group in enumerate(balanced):
            options = [self._options(problem, demands[model], known[model]) for model in group]
            trial = self._best(problem, [choice for choice in options if choice], spaces, number)
            if trial is not None:
                spaces = trial.spaces
                hosts += trial.hosts
        return self._placement(problem, segments, spaces, hosts)

    def _known(
        self, problem: Problem, segments: Segments
    ) -> tuple[dict[str, dict[int, dict[str, Requirement]]], dict[str, tuple[float, float]]]:
        """Return for each model its requirements by batch and device, and its mean (Creq, Mreq)."""
        known: dict[str, dict[int, dict[str, Requirement]]] = {}
        means = {}
        for demand in problem.by_priority():
            found: dict[int, dict[str, Requirement]] = {}
            averages = []
            for entry in problem.fleet.entries:
                by_batch, mean = requirements(segments, demand, entry.device, self.creq)
                averages += [] if mean is None else [mean]
                for batch, requirement in by_batch.items():
                    found.setdefault(batch, {})[entry.device.name] = requirement
            known[demand.model] = found
            if averages:
                count = len(averages)
                means[demand.model] = (sum(c for c, _ in averages) / count, sum(m for _, m in averages) / count)
        return known, means

    def _options(
        self, problem: Problem, demand: Demand, known: Mapping[int, Mapping[str, Requirement]]
    ) -> list[_Option]:
        """Return every {BS, RD} of a model (§3.3.2): RD in multiples of what the largest batch needs."""
        largest = known[max(known)]
        highest = max(requirement.segment.capacity_rps for requirement in largest.values())
        least = math.ceil(demand.rate_rps / highest * (1 - _EPSILON))
        fixed = not problem.fleet.is_elastic
        most = sum(entry.count or 0 for entry in problem.fleet.entries) if fixed else math.inf
        most = min(most, demand.max_replicas or math.inf)
        options = []
        for batch in sorted(known):
            for multiple in range(1, 2 if self.without == "WD" else _MULTIPLES + 1):
                option = _Option(demand, batch, least * multiple, known[batch])
                serves = option.replicas * option.goodput_rps >= demand.rate_rps * (1 - _EPSILON)
                if option.replicas <= most and (fixed or serves):
                    options.append(option)
        return options

    def _best(
        self, problem: Problem, options: Sequence[Sequence[_Option]], spaces: Sequence[_Space], group: int
    ) -> _Trial | None:
        """Algorithm 1: try every configuration and keep the cheapest, on a fixed fleet that of most goodput."""
        best: _Trial | None = None
        for configuration in product(*_manageable(options)):
            trial = self._place_group(problem, configuration, spaces, group)
            if best is None or _rank(trial) > _rank(best):
                best = trial
        return best

    def _place_group(
        self, problem: Problem, configuration: Sequence[_Option], spaces: Sequence[_Space], group: int
    ) -> _Trial:
        """Algorithm 2."""
        trial = _Trial(list(spaces))
        for option in self._ordered(configuration):
            left = option.replicas
            for own in (True, False):  # lines 11 and 12: within the group's devices, then outside
                left = _host(trial, option, left, group, own=own)
            while left > 0 and _initialise(problem.fleet.entries, trial, option, group):  # lines 13 to 15
                left -= 1
            served = sum(
                option.by_device[trial.spaces[index].device].segment.capacity_rps
                for one, index in trial.hosts
                if one is option
            )
            trial.goodput_rps += min(served, option.demand.rate_rps)
        return trial

    def _ordered(self, configuration: Sequence[_Option]) -> list[_Option]:
        """Lines 7 to 9: compute- and memory-heavy models in turn, each class by falling Creq + Mreq."""
        if self.without == "S":
            return list(configuration)
        falling = sorted(configuration, key=lambda option: -sum(option.mean()))
        if self.without == "CM":
            return falling
        compute = [option for option in falling if option.mean()[0] >= _HEAVY * option.mean()[1]]
        memory = [option for option in falling if option.mean()[1] >= _HEAVY * option.mean()[0]]
        neutral = [option for option in falling if option not in compute and option not in memory]
        paired = [option for pair in zip(compute, memory, strict=False) for option in pair]
        shorter = min(len(compute), len(memory))
        return [*paired, *compute[shorter:], *memory[shorter:], *neutral]

    def _placement(
        self, problem: Problem, segments: Segments, spaces: Sequence[_Space], hosts: Sequence[tuple[_Option, int]]
    ) -> Placement:
        """Put the replicas on real devices, which may refuse for interference, and name what is missing."""
        bins = [Bin(problem.device(space.device)) for space in spaces]
        for model, own in _by_model(hosts).items():
            demand = problem.demand(model)
            chosen = [(option.by_device[spaces[index].device], index) for option, index in own]
            capacity = sum(requirement.segment.capacity_rps for requirement, _ in chosen)
            load = min(1.0, demand.rate_rps / capacity)
            for requirement, index in chosen:
                bins[index].add(requirement.segment.replica(requirement.segment.capacity_rps * load), segments)
        gpus = tuple(one.placed() for one in bins if not one.is_empty)
        name = f"usher{'/' + self.without if self.without else ''}"
        return with_unplaced(problem, segments, Placement(name, gpus))


def _rank(trial: _Trial) -> tuple[float, ...]:
    goodput = round(trial.goodput_rps, 6)
    return goodput, -trial.cost


def _manageable(options: Sequence[Sequence[_Option]]) -> list[list[_Option]]:
    """Return the options, without those that another is better than in everything where there are too many."""
    if math.prod(len(choice) for choice in options) <= _MOST_CONFIGURATIONS:
        return [list(choice) for choice in options]
    kept = [[one for one in choice if not any(_dominates(other, one) for other in choice)] for choice in options]
    if math.prod(len(choice) for choice in kept) <= _MOST_CONFIGURATIONS:
        return kept
    most = max(2, int(_MOST_CONFIGURATIONS ** (1.0 / len(options)) / 2))
    return [_fewer(sorted(choice, key=lambda one: one.replicas * sum(one.mean())), most) for choice in kept]


def _fewer(options: Sequence[_Option], most: int) -> list[_Option]:
    """Return at most so many of the options: the first that serve everything, and some of those that serve less."""
    whole = [one for one in options if one.served_rps >= one.demand.rate_rps * (1 - _EPSILON)]
    partial = [one for one in options if one not in whole]
    room = max(most - len(whole), min(len(partial), most // 2))
    return whole[: most - room] + partial[:: max(1, math.ceil(len(partial) / max(1, room)))][:room]


def _dominates(better: _Option, worse: _Option) -> bool:
    ours = (better.replicas, *better.mean(), -better.served_rps)
    theirs = (worse.replicas, *worse.mean(), -worse.served_rps)
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def _host(trial: _Trial, option: _Option, left: int, group: int, *, own: bool) -> int:
    """Put replicas on open devices, fullest first; return how many are left."""
    fits = []
    for index, space in enumerate(trial.spaces):
        requirement = option.by_device.get(space.device)
        if (space.group == group) is own and requirement is not None:
            after = space.after(option.demand.model, requirement)
            if after is not None:
                fits.append((after.compute_pct + after.memory_pct, index, after))
    for _, index, after in sorted(fits, key=lambda fit: fit[:2])[:left]:
        trial.spaces[index] = after
        trial.hosts.append((option, index))
    return left - min(left, len(fits))


def _initialise(entries: Sequence[FleetEntry], trial: _Trial, option: _Option, group: int) -> bool:
    """NEW_LOWEST_COST_GPU_INITIALIZATION: open the cheapest device that can host the model, if there is one."""
    for entry in sorted(entries, key=lambda entry: entry.price_per_hour):
        name = entry.device.name
        used = sum(space.device == name for space in trial.spaces)
        if name in option.by_device and (entry.count is None or used < entry.count):
            fresh = _Space(name, 100.0, 100.0, frozenset(), group).after(option.demand.model, option.by_device[name])
            if fresh is not None:
                trial.spaces.append(fresh)
                trial.hosts.append((option, len(trial.spaces) - 1))
                trial.cost += entry.price_per_hour
                return True
    return False


def _by_model(hosts: Sequence[tuple[_Option, int]]) -> dict[str, list[tuple[_Option, int]]]:
    grouped: dict[str, list[tuple[_Option, int]]] = {}
    for option, index in hosts:
        grouped.setdefault(option.demand.model, []).append((option, index))
    return grouped
