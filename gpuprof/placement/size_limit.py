"""Limits the size of a plan, so that a mistyped rate is an error instead of minutes of planning."""

from __future__ import annotations

import math
from contextlib import suppress

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.errors import InputError
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.problem import Problem
from gpuprof.placement.search_space import SearchSpace

#: Maximum devices of a demand at full load. Policies evaluate replicas with neighbours, so times grow faster.
MOST_DEVICES = 2000
#: Maximum number of MIG instances of a device.
_MOST_INSTANCES = 7
#: Rate below which a demand is not checked: even at 50 requests/s a device it stays below the limit.
_PLAIN_RPS = 50.0 * MOST_DEVICES


def refuse_oversized(problem: Problem) -> None:
    """Refuse demands that need too many devices, even of the fastest kind and with full batches.

    Only devices of unlimited count matter: a fixed count limits the plan itself. Raises `InputError` when a demand
    needs more than `MOST_DEVICES`.
    """
    endless = [entry.device for entry in problem.fleet.entries if entry.count is None or entry.count > MOST_DEVICES]
    search_space = SearchSpace(problem)
    for demand in problem.demands:
        if demand.rate_rps <= _PLAIN_RPS or not endless:
            continue
        most_rps = max(_most_rps(problem, search_space, demand, device) for device in endless)
        if most_rps > 0.0 and demand.rate_rps / most_rps > MOST_DEVICES:
            raise InputError(
                f"{demand.rate_rps:,.0f} requests/s of {demand.model} would take at least "
                f"{math.ceil(demand.rate_rps / most_rps):,} devices, and a plan has at most {MOST_DEVICES:,}",
                "correct rate_rps, name quicker devices with --gpus, or plan a part of the rate several times over",
            )


def _most_rps(problem: Problem, search_space: SearchSpace, demand: Demand, device: Device) -> float:
    """Return the maximum rate of the device with full batches, divided into any one kind of share."""
    most = 0.0
    for share in problem.estimator.shares(demand.model, device):
        copies = 100.0 / share.sm_pct * (1 if share.mig is None else _MOST_INSTANCES)
        for batch in search_space.listed_batches(demand.model, device, share):
            with suppress(InputError):
                estimate = problem.estimator.estimate(demand.model, device, batch, share)
                most = max(most, copies * 1000.0 * batch / planned_ms(estimate.latency_ms, problem.options.confidence))
    return most
