"""Explains why a demand cannot be met, and the nearest feasible demand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import Unplaced
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, queue_of
from gpuprof.errors import InputError
from gpuprof.placement.bin import MOST_REPLICAS
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_limit import NEARLY_IDLE
from gpuprof.placement.segment import Segments

#: Reasons where none is needed, and where a time limit ended the search.
_UNEXPLAINED = "the reason was not looked for"
NO_TIME = "the time limit left no time to look for more than a first place for it"
#: Maximum number of kinds of devices for which all reasons are given; with more, only the first, for a readable line.
_MOST_REASONS = 3


def explain_unplaced(problem: Problem, segments: Segments, demand: Demand, placement: Placement | None = None) -> str:
    """Return why nothing of ``demand`` was placed: memory, its own latency, its neighbours, or a full fleet."""
    if not problem.options.explains:
        return _UNEXPLAINED
    reasons = [
        segments.device_reason(demand, entry.device, partial(_device_reason, segments, demand, entry.device))
        for entry in problem.fleet.entries
    ]
    if None in reasons:
        if any(entry.count is None for entry in problem.fleet.entries):
            word = "planned" if demand.max_replicas is None else "allowed"
            return f"{demand.max_replicas or MOST_REPLICAS} replicas, the most that are {word}, serve too little"
        idle = None if placement is None else _idle_reason(problem, demand, placement, reasons)
        if idle is not None:
            return idle
        fleet = " and ".join(f"{e.count} {e.device.name}" for e in problem.fleet.entries)
        return (
            f"no place was found for it on {fleet}; more devices, or a lower rate of the other models, would make some"
        )
    reasons_given = [reason for reason in reasons if reason]
    if len(reasons_given) <= _MOST_REASONS:
        return "; ".join(reasons_given)
    return f"{reasons_given[0]}; nor can any of the other {len(reasons_given) - 1} kinds of devices serve it"


def explain_shortfall(problem: Problem, demand: Demand, served_rps: float) -> str:
    """Return why only ``served_rps`` of ``demand`` were placed."""
    fleet = " and ".join(f"{e.count} {e.device.name}" for e in problem.fleet.entries if e.count is not None)
    limits = []
    if demand.max_replicas is not None:
        limits.append(f"max_replicas {demand.max_replicas}")
    if fleet:
        limits.append(f"a fleet of {fleet}")
    if not limits:
        limits.append(f"{MOST_REPLICAS} replicas, the most that are planned for one model")
    return (
        f"only {_round_down(served_rps)} of {demand.rate_rps:g} requests/s were placed within {' and '.join(limits)}; "
        f"the largest rate that this policy is known to place is {_round_down(served_rps)} requests/s"
    )


def with_unplaced(problem: Problem, segments: Segments, placement: Placement) -> Placement:
    """Return the placement with all unserved demands named."""
    unplaced = []
    rates = placement.rates_rps()
    for demand in problem.by_priority():
        served_rps = rates.get(demand.model, 0.0)
        if served_rps < demand.rate_rps * (1.0 - 1e-9):
            reason = (
                explain_shortfall(problem, demand, served_rps)
                if served_rps
                else explain_unplaced(problem, segments, demand, placement)
            )
            unplaced.append(Unplaced(model=demand.model, rate_rps=demand.rate_rps - served_rps, reason=reason))
    return replace(placement, unplaced=tuple(unplaced))


def with_reasons(problem: Problem, placement: Placement, limit: Limit) -> Placement:
    """Return the placement with the reasons that were skipped earlier, as far as time allows."""
    if all(shortfall.reason != _UNEXPLAINED for shortfall in placement.unplaced):
        return placement
    segments, unplaced = Segments(problem), list(placement.unplaced)
    for place, entry in enumerate(unplaced):
        if entry.reason == _UNEXPLAINED:
            reason = NO_TIME
            with problem.limits.until(limit), suppress(TimeUpError):
                reason = explain_unplaced(problem, segments, problem.demand(entry.model), placement)
            unplaced[place] = entry.model_copy(update={"reason": reason})
    return replace(placement, unplaced=tuple(unplaced))


def find_least_slo_ms(segments: Segments, demand: Demand, device: Device) -> float:
    """Return the least SLO some batch and share of ``device`` keeps while nearly idle, infinity if none.

    With a latency budget, the least SLO whose budgeted part holds some batch.
    """
    least = math.inf
    for workload in _list_workloads(segments, demand, device):
        if _fits_memory(segments, device, workload):
            least = min(least, _nearly_idle_ms(segments, demand, device, workload))
    return least


def _list_workloads(segments: Segments, demand: Demand, device: Device) -> Iterator[Workload]:
    for share in segments.problem.estimator.shares(demand.model, device):
        yield from segments.workloads(demand.model, device, share)


def _device_reason(segments: Segments, demand: Demand, device: Device) -> str | None:
    """Return why this kind of device can serve none of the demand; None when it could if it were free."""
    if segments.best(demand, device):
        return None
    least = find_least_slo_ms(segments, demand, device)
    if math.isinf(least):
        return _memory_reason(segments, demand, device)
    least_slo = f"the least SLO that works is {_round_up(least)} ms"
    budget = segments.problem.options.latency_budget
    if budget is not None:
        return (
            f"on {device.name} the shortest batch takes {least * budget:.3g} ms, and {budget * 100:.3g}% of the SLO "
            f"are {demand.slo.latency_ms * budget:.3g} ms; {least_slo}"
        )
    return (
        f"on {device.name} a nearly idle replica already takes {least:.3g} ms at percentile {demand.slo.percentile:g}, "
        f"above the SLO of {demand.slo.latency_ms:g} ms; {least_slo}"
    )


def _idle_reason(problem: Problem, demand: Demand, placement: Placement, reasons: Sequence[str | None]) -> str | None:
    """Return a reason if idle devices remain that could serve some of ``demand``; else None.

    ``reasons``: causes against it, by kind of device.
    """
    used_counts = Counter(gpu.device for gpu in placement.gpus)
    left = [
        (entry.count - used_counts[entry.device.name], entry.device.name)
        for entry, reason in zip(problem.fleet.entries, reasons, strict=True)
        if reason is None and entry.count is not None
    ]
    idle = [f"{count} {name}" for count, name in left if count > 0]
    if not idle:
        return None
    text = f"{placement.policy} leaves {' and '.join(idle)} idle, where some of it could be served"
    if demand.min_goodput_rps:
        return f"{text}, if not its min_goodput_rps of {demand.min_goodput_rps:g} requests/s"
    return f"{text}; another policy may place it"


def _memory_reason(segments: Segments, demand: Demand, device: Device) -> str:
    needs, refusals, unfilled_reasons = [], [], []
    for workload in _list_workloads(segments, demand, device):
        try:
            needs.append(segments.memory_bytes(segments.estimate(device, workload)) or 0)
        except InputError as error:
            refusals.append(str(error))
            continue
        if needs[-1] <= device.memory_bytes(workload.share):  # the cause is then an unknown time
            try:
                segments.server(device, workload)
            except InputError as error:
                unfilled_reasons.append(error.message)
    if unfilled_reasons:
        return (
            f"batches of {demand.model} that are not full are not known on {device.name}: {unfilled_reasons[0]} "
            "(a queue needs their times; --latency-budget plans without them)"
        )
    if not needs or (refusals and min(needs) <= device.dram_bytes):
        first = refusals[0] if refusals else _find_refusal(segments, Workload(demand.model, 1, Share()), device)
        return f"no batch of {demand.model} is known to run on {device.name}: {first}"
    return (
        f"it needs {min(needs) / 2**30:.3g} GiB at the least and {device.name} has {device.dram_bytes / 2**30:.3g} GiB"
    )


def _find_refusal(segments: Segments, workload: Workload, device: Device) -> str:
    """Return the estimator's error if it lists no share or batch, because failed runs are not listed either."""
    try:
        segments.estimate(device, workload)
    except InputError as error:
        return str(error)
    return "no batch and no share of it was measured there"


def _nearly_idle_ms(segments: Segments, demand: Demand, device: Device, workload: Workload) -> float:
    try:
        budget = segments.problem.options.latency_budget
        if budget is not None:
            return segments.latency_ms(device, workload) / budget
        server = segments.server(device, workload)
    except InputError:
        return math.inf
    sojourn = queue_of(segments.problem.queueing, demand.model).sojourn(
        Arrivals(min(demand.rate_rps, server.capacity_rps * NEARLY_IDLE)), server
    )
    return sojourn.percentile(demand.slo.percentile)


def _fits_memory(segments: Segments, device: Device, workload: Workload) -> bool:
    try:
        memory = segments.memory_bytes(segments.estimate(device, workload))
    except InputError:
        return False
    return memory is None or memory <= device.memory_bytes(workload.share)


def _round_up(value: float) -> str:
    """Return the value rounded up to three digits."""
    # Rounded to the safe side: the SLO or rate suggested to a user must be feasible.
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step * (1 + 1e-9)) * step:g}"


def _round_down(value: float) -> str:
    """Return the value rounded down to four digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 3)
    return f"{math.floor(value / step * (1 + 1e-9)) * step:g}"
