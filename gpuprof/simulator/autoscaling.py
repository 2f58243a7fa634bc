"""Cost and benefit of autoscaling: figures for comparing policies (USHER, OSDI'24, section 5.4)."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprof.simulator.outcome import SimulationOutcome
from gpuprof.simulator.reschedule import Timetable


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """The figures of a policy under a load."""

    policy: str
    #: ``maps``, ``started``: Number of successive maps, and of replicas started for them.
    maps: int
    started: int
    mean_gpus: float  #: Devices of the maps, averaged over time.
    most_gpus: int
    #: ``gpu_hours``, ``held_gpu_hours``: Device hours of the maps; and including the time in which old and new replicas
    #: coexist.
    gpu_hours: float
    held_gpu_hours: float
    cost: float | None  #: Cost of the maps in $; None if a device has no price.
    goodput_rps: float
    in_time_pct: float | None  #: Percentage of requests; None without requests.
    #: Mean time of an answered request before its batch starts, waiting for the batch to fill and for a process.
    wait_ms: float | None
    worst_p99_ms: float | None  #: p99 of the model with the largest ratio of p99 to SLO.


def summarize_autoscaling(policy: str, table: Timetable, outcome: SimulationOutcome) -> Autoscaling:
    """Return the figures of a simulation of ``table``."""
    epochs = table.epoch_outcomes(outcome.duration_s)
    hours = table.gpu_hours(outcome.duration_s)
    prices = [epoch.cost_per_hour for epoch in epochs]
    requests = sum(model.requests for model in outcome.models)
    in_time = sum(model.in_time for model in outcome.models)
    return Autoscaling(
        policy=policy,
        maps=len(epochs),
        started=sum(epoch.started for epoch in epochs),
        mean_gpus=hours * 3600.0 / outcome.duration_s,
        most_gpus=max(epoch.gpus for epoch in epochs),
        gpu_hours=hours,
        held_gpu_hours=table.held_gpu_hours(outcome.duration_s),
        cost=None
        if None in prices
        else sum((epoch.cost_per_hour or 0.0) * (epoch.end_s - epoch.begin_s) / 3600.0 for epoch in epochs),
        goodput_rps=outcome.goodput_rps,
        in_time_pct=100.0 * in_time / requests if requests else None,
        wait_ms=_wait_ms(outcome),
        worst_p99_ms=_worst_p99_ms(outcome),
    )


def _wait_ms(outcome: SimulationOutcome) -> float | None:
    answered = sum(model.answered for model in outcome.models)
    wait_ms = sum(
        model.answered * ((model.stage_mean_ms["batching"] or 0.0) + (model.stage_mean_ms["queue"] or 0.0))
        for model in outcome.models
    )
    return wait_ms / answered if answered else None


def _worst_p99_ms(outcome: SimulationOutcome) -> float | None:
    tails = [(model.p99_ms / model.slo_ms, model.p99_ms) for model in outcome.models if model.p99_ms is not None]
    return max(tails)[1] if tails else None
