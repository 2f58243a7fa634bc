"""Splits a demand into segments serving it together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuprof.domain.demand import Demand
from gpuprof.placement.placement import PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment

Cost = Callable[[Segment], float]

#: Maximum number of replicas of a model: a larger number means a mistyped rate.
MOST_REPLICAS = 10_000


@dataclass(frozen=True, slots=True)
class Cover:
    """Segments of a demand and the rate that each of them is to serve."""

    parts: tuple[tuple[Segment, float], ...]
    missing_rps: float = 0.0  #: Rate the segments cannot serve.

    def replicas(self) -> tuple[tuple[str, PlacedReplica], ...]:
        """Return (device, replica) for each part."""
        return tuple((segment.device, segment.replica(rate)) for segment, rate in self.parts)


def make_cost(problem: Problem) -> Cost:
    """Return the price per hour of the part of a device that a segment takes."""
    prices = {entry.device.name: entry.price_per_hour for entry in problem.fleet.entries}
    return lambda segment: prices[segment.device] * segment.fraction


def cheapest_cover(demand: Demand, segments: Sequence[Segment], cost: Cost) -> Cover:
    """Return the cover of least cost, made of one kind of segment and a smaller last segment.

    The rate is divided in proportion to the capacities, so that no replica is at its limit while another has spare
    capacity.
    """
    limit = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    covers = (_fill_with(demand, segment, segments, cost, limit) for segment in segments)
    complete = [parts for parts in covers if parts is not None]
    if complete:
        cheapest = min(complete, key=lambda parts: (sum(map(cost, parts)), len(parts)))
        return share_out_rate(demand.rate_rps, cheapest)
    if not segments:
        return Cover((), demand.rate_rps)
    # No cover serves everything within the limit: serve as much as the allowed replicas can, at any cost.
    widest = max(segments, key=lambda segment: (segment.capacity_rps, -cost(segment)))
    return share_out_rate(demand.rate_rps, [widest] * limit)


def share_out_rate(rate_rps: float, segments: Sequence[Segment]) -> Cover:
    """Return the cover in which each segment serves in proportion to its capacity, never above it."""
    total = sum(segment.capacity_rps for segment in segments)
    served_rps = min(rate_rps, total)
    parts = tuple((segment, served_rps * segment.capacity_rps / total) for segment in segments)
    return Cover(parts, rate_rps - served_rps if rate_rps > total * (1 + 1e-9) else 0.0)


def _fill_with(
    demand: Demand, main: Segment, segments: Sequence[Segment], cost: Cost, limit: int
) -> list[Segment] | None:
    """Return as many full segments ``main`` as possible and the cheapest last segment, None beyond ``limit``."""
    # Raised by less than the precision of any rate: a rate of exactly three capacities must not give two and a
    # remainder.
    count = math.floor(demand.rate_rps / main.capacity_rps * (1 + 1e-12))
    rest_rps = demand.rate_rps - count * main.capacity_rps
    last = []
    if rest_rps > demand.rate_rps * 1e-9:
        sufficient = [segment for segment in segments if segment.capacity_rps >= rest_rps]
        last = [min(sufficient or [main], key=lambda segment: (cost(segment), segment.capacity_rps))]
    return [main] * count + last if count + len(last) <= limit else None
