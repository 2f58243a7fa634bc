"""Temporal sharing: models take turns on a device within a duty cycle (Choi et al., ATC'22; Shen et al., SOSP'19)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuprof.placement.placement import TOLERANCE


@dataclass(frozen=True, slots=True)
class TurnDemand:
    """Requirements of a model for a cycle."""

    rate_rps: float
    slo_ms: float
    latency_ms: Mapping[int, float]  #: Time of each possible batch size, alone on the device.


@dataclass(frozen=True, slots=True)
class DutyCycle:
    """A cycle in which each model has one turn."""

    cycle_ms: float
    batches: tuple[int, ...]  #: Batches of the models, in the given order.
    busy: float  #: Part of the cycle in which a batch runs, at most 1.


def list_duty_cycles(models: Sequence[TurnDemand]) -> tuple[DutyCycle, ...]:
    """Return the cycles in which all models keep their SLOs, those with most spare time first.

    In a cycle of D, rᵢ·D requests of model i arrive, which form its next batch: bᵢ ≥ rᵢ·D. All batches fit the cycle, Σ
    lⱼ(bⱼ) ≤ D, and a request that has just missed its model's turn is answered after the next turn: D + lᵢ(bᵢ) ≤ SLOᵢ.
    Among the cycles with the same batches, the longest within the SLOs has most spare time.
    """
    cycles = {cycle.batches: cycle for cycle in _find_cycles(models)}
    return tuple(sorted(cycles.values(), key=lambda cycle: (cycle.busy, cycle.cycle_ms)))


def _find_cycles(models: Sequence[TurnDemand]) -> Iterator[DutyCycle]:
    """Yield a cycle for each length at which a batch of some model is just full."""
    for longest in {1000.0 * batch / demand.rate_rps for demand in models for batch in demand.latency_ms}:
        batches = [_smallest_batch(demand, longest) for demand in models]
        usable = [batch for batch in batches if batch is not None]
        if len(usable) < len(models):
            continue
        times = [demand.latency_ms[batch] for demand, batch in zip(models, usable, strict=True)]
        cycle = min(longest, *(demand.slo_ms - time for demand, time in zip(models, times, strict=True)))
        if 0.0 < sum(times) <= cycle * (1.0 + TOLERANCE):
            yield DutyCycle(cycle, tuple(usable), sum(times) / cycle)


def _smallest_batch(demand: TurnDemand, cycle_ms: float) -> int | None:
    """Return the smallest batch holding the arrivals of a cycle, None where the largest does not."""
    least_batch = demand.rate_rps * cycle_ms / 1000.0 * (1.0 - TOLERANCE)
    return min((batch for batch in demand.latency_ms if batch >= least_batch), default=None)
