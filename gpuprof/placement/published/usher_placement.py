"""USHER's Algorithm 2: devices for the replicas of a group of models in a configuration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpuprof.domain.demand import Demand
from gpuprof.domain.fleet import FleetEntry
from gpuprof.placement.placement import TOLERANCE
from gpuprof.placement.published.requirement import Requirement

#: Ratio of a model's requirements from which it is heavy in a resource (§3.3.2).
HEAVY = 1.2

Ablation = Literal["", "CM", "WD", "S"]


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
        if self.creq_pct >= HEAVY * self.mreq_pct:
            return "compute"
        return "memory" if self.mreq_pct >= HEAVY * self.creq_pct else ""

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
        """Return an upper bound on the goodput of every placement of the option."""
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
        """Return the group's devices able to host a replica, fullest first."""
        first = len(self.ground.spaces)
        return sorted(self._taking(option, range(first, first + len(self._opened))))

    def _outside(self, option: Option, most: int) -> list[tuple[float, int]]:
        """Return at most ``most`` of the other groups' devices able to host a replica, fullest first."""
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
        """Put replicas on devices in this order; return the number left."""
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
