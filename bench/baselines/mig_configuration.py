"""GPU configurations of MIG-serving: a layout with a service in each instance, and which are the most useful."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuprof.domain.mig import Layout
from gpuprof.placement.bin import MOST_REPLICAS
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment

#: A service is complete when this part of its rate is served.
COMPLETE = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class FilledInstance:
    """A segment in the instance that starts at a memory slice."""

    segment: Segment
    start: int

    @property
    def key(self) -> str:
        """What it adds to a deployment: ``model/profile``."""
        return f"{self.segment.model}/{self.segment.share.mig}"


@dataclass(frozen=True, slots=True)
class MigConfiguration:
    """What one GPU holds; ``score`` is what it added when it was chosen."""

    instances: tuple[FilledInstance, ...]
    score: float = field(default=0.0, compare=False)

    def __iter__(self) -> Iterator[FilledInstance]:
        return iter(self.instances)

    @property
    def keys(self) -> tuple[str, ...]:
        """What its instances add to a deployment."""
        return tuple(instance.key for instance in self.instances)

    def exchange(
        self, index: int, other: MigConfiguration, other_index: int
    ) -> tuple[MigConfiguration, MigConfiguration]:
        """Return both with the services of two instances exchanged."""
        ours, theirs = list(self.instances), list(other.instances)
        ours[index], theirs[other_index] = (
            FilledInstance(theirs[other_index].segment, ours[index].start),
            FilledInstance(ours[index].segment, theirs[other_index].start),
        )
        return MigConfiguration(tuple(ours)), MigConfiguration(tuple(theirs))


@dataclass(frozen=True, slots=True)
class Services:
    """What may stand in an instance: of each service the best segment by MIG profile, and the rate asked for."""

    problem: Problem
    best: Mapping[str, Mapping[str, Segment]]
    rates: Mapping[str, float] = field(init=False)
    _capacity: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        rates = {demand.model: demand.rate_rps for demand in self.problem.demands if self.best.get(demand.model)}
        capacity = {
            f"{model}/{profile}": segment.capacity_rps
            for model, segments in self.best.items()
            for profile, segment in segments.items()
        }
        object.__setattr__(self, "rates", rates)
        object.__setattr__(self, "_capacity", capacity)

    def rps(self, held: Counter[str], model: str) -> float:
        """Return the rate of a model that these numbers of instances by ``model/profile`` serve."""
        return math.fsum(
            self._capacity[f"{model}/{profile}"] * held[f"{model}/{profile}"] for profile in self.best[model]
        )

    def count(self, held: Counter[str], model: str) -> int:
        """Return how many instances a model has."""
        return sum(held[f"{model}/{profile}"] for profile in self.best[model])

    def most_replicas(self, model: str) -> int:
        """Return how many instances a model may have."""
        return min(self.problem.demand(model).max_replicas or MOST_REPLICAS, MOST_REPLICAS)


def rank_configurations(
    services: Services, layouts: Sequence[Layout], completion: Mapping[str, float], replicas: Mapping[str, int]
) -> list[MigConfiguration]:
    """Return each layout filled as is most useful now, the most useful first; those that add nothing are left out.

    ``completion``: part of each service's rate that is served already; ``replicas``: instances that each service has.
    """
    distinct: dict[tuple[str, ...], MigConfiguration] = {}
    for layout in layouts:
        configuration = _fill(services, layout, completion, replicas)
        if configuration.score > 0.0:
            distinct.setdefault(tuple(sorted(configuration.keys)), configuration)
    return sorted(distinct.values(), key=lambda candidate: -candidate.score)


def _fill(
    services: Services, layout: Layout, completion: Mapping[str, float], replicas: Mapping[str, int]
) -> MigConfiguration:
    """Return a layout filled greedily, the largest instance first, with what adds most to the score."""
    served, count, score = dict(completion), dict(replicas), 0.0
    chosen = []
    for item in sorted(layout, key=lambda item: -item.profile.compute_slices):
        options = []
        for model, missing in ((model, 1.0 - part) for model, part in served.items() if part < COMPLETE):
            segment = services.best[model].get(item.profile.name)
            if segment is not None and count[model] < services.most_replicas(model):
                options.append((missing * segment.capacity_rps / services.rates[model], segment))
        if options:
            gain, segment = max(options, key=lambda option: option[0])
            score += gain
            served[segment.model] += segment.capacity_rps / services.rates[segment.model]
            count[segment.model] += 1
            chosen.append(FilledInstance(segment, item.start))
    return MigConfiguration(tuple(chosen), score)
