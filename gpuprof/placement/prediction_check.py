"""Checks the predictions of a map, which the router and the simulator rely on.

Against an estimator each figure that follows from it is computed anew; without one the figures must follow from one
another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpuprof.domain.deployment import (
    DeploymentMap,
    Gpu,
    ModelPrediction,
    Node,
    Partition,
    Replica,
    ReplicaPrediction,
    share_of,
)
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MOST_VARIATION, Estimate, Estimator, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bound_check import check_bounds
from gpuprof.placement.evidence import Evidence, Violation
from gpuprof.placement.map_queues import upper_ms
from gpuprof.placement.map_workloads import ask_estimator, neighbour_workloads, replica_workload
from gpuprof.placement.queue_check import check_queues

#: What a figure may be off by: rounding, and no more.
_RELATIVE = 1e-3
_ABSOLUTE = 1e-6
#: Loading the next batch while one runs (iGniter, equation 2) at most doubles what the time of a batch says.
_MOST_OVERLAPPED = 0.5
#: What queues that are simulated differ by: a pool's figures and its parts', its busy time and the batches'.
_SIMULATED = 0.05

_MOST_PROCESSES = 4096  # each of which rounds its bytes up

_Place = tuple[Node, Gpu, Partition, Replica]


def check_predictions(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield every prediction of the map that is not what follows from the estimator, or from its other figures.

    Queues and bounds are worked out only where the figures of the replicas are as they must be: they rest on these.
    """
    replicas = tuple(_check_replicas(deployment, evidence))
    yield from replicas
    yield from _model_figures(deployment)
    yield from _map_figures(deployment, evidence)
    if not replicas:
        yield from check_bounds(deployment, evidence)
        yield from check_queues(deployment, evidence)


def _check_replicas(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    for place in deployment.places():
        node, gpu, _, replica = place
        where = f"{node.name} gpu {gpu.index}"
        for message in (
            *_consistency(replica, evidence),
            *_replica_bounds(deployment, replica),
            *_against_estimator(place, evidence),
        ):
            yield Violation("figures", where, f"{replica.model}: {message}")


def _consistency(replica: Replica, evidence: Evidence) -> Iterator[str]:
    """Yield where a replica's figures do not follow from one another."""
    predicted = replica.predicted
    if not predicted.latency_ms > 0.0:
        yield "no time is predicted for a batch"
        return
    each_ms = predicted.latency_ms - predicted.overlapped_ms
    if predicted.overlapped_ms > _MOST_OVERLAPPED * predicted.latency_ms:
        yield f"{predicted.overlapped_ms:.4g} of {predicted.latency_ms:.4g} ms of a batch are said to overlap another"
    elif not _is_near(predicted.throughput_rps, 1000.0 * replica.batch * replica.processes / each_ms):
        throughput, latency = f"{predicted.throughput_rps:.4g}/s", f"{each_ms:.4g} ms"
        yield f"a throughput of {throughput} does not follow from {latency} a batch of {replica.batch}"
    if predicted.goodput_rps > replica.rate_rps * (1.0 + _RELATIVE) + _ABSOLUTE:
        yield f"a goodput of {predicted.goodput_rps:.4g}/s is more than the rate of {replica.rate_rps:.4g}/s"
    if max(predicted.latency_cv, predicted.pause_cv or 0.0) > MOST_VARIATION:
        yield f"its time is said to vary by {max(predicted.latency_cv, predicted.pause_cv or 0.0):.4g} times itself"
    times = replica.batch_latency_ms
    yield from _utilization(replica)
    if times is not None:
        if len(times) != replica.batch or min(times) <= 0.0:
            yield f"batch_latency_ms must hold {replica.batch} times above 0"
        elif not _is_near(times[-1], predicted.latency_ms + evidence.host.handover_ms):
            yield f"batch_latency_ms ends at {times[-1]:.4g} ms and a batch takes {predicted.latency_ms:.4g} ms"
    percentiles = [value for value in (predicted.p50_ms, predicted.p95_ms, predicted.p99_ms) if value is not None]
    if percentiles != sorted(percentiles):
        yield "its percentiles fall"
    limit, held = replica.memory_limit_bytes, predicted.memory_bytes
    if limit is not None and held is not None and limit < held * (1.0 - _RELATIVE):
        yield f"it may hold {limit / 2**30:.4g} GiB and is said to hold {held / 2**30:.4g} GiB"
    creq = predicted.creq
    if creq is not None and creq.interval_pct is not None:
        low, high = creq.interval_pct
        if not low * (1.0 - _RELATIVE) - _ABSOLUTE <= creq.pct <= high * (1.0 + _RELATIVE) + _ABSOLUTE:
            yield f"a compute requirement of {creq.pct:.4g}% is outside of its interval"
    mreq = predicted.mreq
    if mreq is not None and mreq.interval_bytes is not None:
        low, high = mreq.interval_bytes
        if not low * (1.0 - _RELATIVE) - _ABSOLUTE <= mreq.bytes <= high * (1.0 + _RELATIVE) + _ABSOLUTE:
            yield f"a memory requirement of {mreq.bytes:.4g} bytes is outside of its interval"
    yield from _required_memory(predicted)
    yield from _intervals(predicted)


def _required_memory(predicted: ReplicaPrediction) -> Iterator[str]:
    """Yield where the memory that a policy planned by has no source or end, or is not what the replica holds."""
    needed, held = predicted.mreq, predicted.memory_bytes
    if needed is None:
        return
    if not needed.source.strip():
        yield "its memory requirement has no source"
    if needed.interval_bytes is not None and not math.isfinite(needed.interval_bytes[1]):
        yield "its memory requirement has an interval without an end"
    if held is not None and needed.bytes > held * (1.0 + _RELATIVE) + 1.0:
        yield f"it requires {needed.bytes / 2**30:.4g} GiB and is said to hold {held / 2**30:.4g} GiB"
    if held is not None and needed.interval_bytes is None and held > needed.bytes * (1.0 + _RELATIVE) + _MOST_PROCESSES:
        yield f"it is said to hold {held / 2**30:.4g} GiB and requires {needed.bytes / 2**30:.4g} GiB"


def _utilization(replica: Replica) -> Iterator[str]:
    """Yield where a replica is said to be busy for less than its requests take, or for more than all of its time."""
    predicted = replica.predicted
    if predicted.utilization is None or replica.merged or not predicted.throughput_rps > 0.0:
        return
    times = replica.batch_latency_ms or ()
    each_ms = min((ms / size for size, ms in enumerate(times, 1)), default=predicted.latency_ms / replica.batch)
    least = replica.rate_rps * min(each_ms / 1000.0 / replica.processes, 1.0 / predicted.throughput_rps)
    if not least * (1.0 - _SIMULATED) - _ABSOLUTE <= predicted.utilization <= 1.0 + _SIMULATED:
        busy = f"{predicted.utilization:.4g}"
        yield f"it is said to be busy for {busy} of its time, and its requests take {least:.4g} of it"


def _intervals(predicted: ReplicaPrediction) -> Iterator[str]:
    for name in ("latency_ms", "p99_ms", "throughput_rps", "goodput_rps"):
        interval, value = getattr(predicted, f"{name}_interval"), getattr(predicted, name)
        if interval is None:
            continue
        low, high = interval
        relative = _SIMULATED if name in ("p99_ms", "goodput_rps") else _RELATIVE
        if not (math.isfinite(low) and math.isfinite(high) and 0.0 <= low <= high):
            yield f"{name}_interval is none: {low:g} to {high:g}"
        elif value is not None and not low * (1.0 - relative) <= value <= high * (1.0 + relative) + _ABSOLUTE:
            yield f"{name} of {value:.4g} is outside of its interval"


def _replica_bounds(deployment: DeploymentMap, replica: Replica) -> Iterator[str]:
    slos = [deployment.models[name].slo_ms for name in replica.rates() if name in deployment.models]
    if slos and replica.max_wait_ms > min(slos):
        yield f"requests wait {replica.max_wait_ms:.4g} ms for their batch, of {min(slos):g} ms that they may take"
    for one in replica.merged:
        if one.goodput_rps > one.rate_rps * (1.0 + _RELATIVE) + _ABSOLUTE:
            yield f"a goodput of {one.goodput_rps:.4g}/s of {one.model} is more than its rate"


def _against_estimator(place: _Place, evidence: Evidence) -> Iterator[str]:
    """Yield where a replica's figures are not the estimator's."""
    _, gpu, partition, replica = place
    if evidence.estimator is None:
        return
    device, beside = evidence.devices[gpu.device], neighbour_workloads(partition, replica)

    def ask(batch: int) -> Estimate | None:
        workload = replica_workload(partition, replica, batch)
        try:
            return ask_estimator(evidence.estimator, device, workload, beside) if evidence.estimator else None
        except InputError:
            return None  # told of where the times are needed

    known = ask(replica.batch)
    if known is None:
        return
    predicted = replica.predicted
    for name, value, true in (
        ("latency_ms", predicted.latency_ms, known.latency_ms.value),
        ("throughput_rps", predicted.throughput_rps, known.throughput_rps.value),
        ("overlapped_ms", predicted.overlapped_ms, known.overlapped_ms),
        ("latency_cv", predicted.latency_cv, known.latency_cv),
        ("pause_factor", predicted.pause_factor, known.pause_factor),
        ("pause_cv", predicted.pause_cv, known.latency_cv if known.pause_cv is None else known.pause_cv),
    ):
        if value is not None and true is not None and not _is_near(value, true):
            yield f"{name} is {value:.4g} in the map and {true:.4g} by the estimator"
    yield from _told_turn(replica, replica_workload(partition, replica, replica.batch), beside, device, evidence)
    yield from _told_intervals(predicted, known, merged=bool(replica.merged))
    yield from _told_memory(replica, known, evidence)
    yield from _told_compute(replica, device, evidence.estimator)
    if predicted.source and predicted.source != known.latency_ms.source:
        yield f"its time is called {predicted.source!r} and is {known.latency_ms.source!r}"
    if replica.batch_latency_ms is None:
        return
    for size, value in enumerate(replica.batch_latency_ms[: replica.batch], 1):
        smaller = ask(size)
        if smaller is not None and not _is_near(value, smaller.latency_ms.value + evidence.host.handover_ms):
            true = smaller.latency_ms.value
            yield f"batch_latency_ms of {size} is {value:.4g} ms in the map and {true:.4g} ms by the estimator"
            return


def _told_turn(
    replica: Replica, workload: Workload, beside: Sequence[Workload], device: Device, evidence: Evidence
) -> Iterator[str]:
    """Yield a time of a turn that is not the estimator's beside what runs at once with it."""
    if not replica.turns or replica.turn_ms is None or evidence.estimator is None:
        return
    at_once = [one for one in beside if one.turns != replica.turns]
    true_ms = ask_estimator(evidence.estimator, device, workload, at_once).latency_ms.value
    if not _is_near(replica.turn_ms, true_ms):
        yield f"turn_ms is {replica.turn_ms:.4g} in the map and {true_ms:.4g} by the estimator"


def _told_intervals(predicted: ReplicaPrediction, known: Estimate, *, merged: bool) -> Iterator[str]:
    for name, interval, figure in (
        ("latency_ms", predicted.latency_ms_interval, known.latency_ms),
        ("throughput_rps", predicted.throughput_rps_interval, known.throughput_rps),
    ):
        if interval is None:
            if figure.low is not None and figure.high is not None and not merged:
                yield f"{name}_interval is not said, and is {figure.low:.4g} to {figure.high:.4g} by the estimator"
        elif figure.low is None or figure.high is None:
            yield f"{name}_interval is said, and nothing is known of its error"
        elif not (_is_near(interval[0], figure.low) and _is_near(interval[1], figure.high)):
            told, true = f"{interval[0]:.4g} to {interval[1]:.4g}", f"{figure.low:.4g} to {figure.high:.4g}"
            yield f"{name}_interval is {told} in the map and {true} by the estimator"


def _told_memory(replica: Replica, known: Estimate, evidence: Evidence) -> Iterator[str]:
    """Yield a memory that is not the estimator's, at the end of its interval that is planned on."""
    predicted, memory = replica.predicted, known.memory_bytes
    held_bytes, needed = predicted.memory_bytes, predicted.mreq
    if memory is None:
        if held_bytes is not None or needed is not None:
            yield "a memory is said, and nothing is known of it by the estimator"
        return
    planned = upper_ms(memory, evidence.confidence) * replica.processes
    if held_bytes is not None and abs(held_bytes - planned) > _RELATIVE * planned + replica.processes:
        yield f"it is said to hold {held_bytes / 2**30:.4g} GiB, and holds {planned / 2**30:.4g} GiB by the estimator"
    if needed is not None and not _is_near(needed.bytes, memory.value * replica.processes):
        told, true = needed.bytes / 2**30, memory.value * replica.processes / 2**30
        yield f"it is said to require {told:.4g} GiB, and requires {true:.4g} GiB by the estimator"


def _told_compute(replica: Replica, device: Device, estimator: Estimator) -> Iterator[str]:
    """Yield a compute requirement that is not the estimator's, which it has of a process that is alone on a device."""
    creq = replica.predicted.creq
    if creq is None:
        return
    try:
        alone = ask_estimator(estimator, device, Workload(replica.model, replica.batch, Share()))
    except InputError:
        return
    known = alone.creq(creq.metric)
    if known is not None and not _is_near(creq.pct, known.value):
        yield f"a compute requirement of {creq.pct:.4g}% is said, and it is {known.value:.4g}% by the estimator"
    elif known is not None and creq.source != known.source:
        yield f"its compute requirement is called {creq.source!r} and is {known.source!r}"


def _model_figures(deployment: DeploymentMap) -> Iterator[Violation]:
    own: defaultdict[str, list[Replica]] = defaultdict(list)
    for *_, replica in deployment.places():
        for name in dict.fromkeys((*replica.goodputs(), *replica.rates())):
            own[name].append(replica)
    for name, model in deployment.models.items():
        predicted = model.predicted
        if predicted is None:
            continue
        served = math.fsum(replica.goodputs().get(name, 0.0) for replica in own[name])
        if not _is_near(predicted.goodput_rps, served):
            yield Violation(
                "figures", name, f"goodput {predicted.goodput_rps:.4g}/s is said and its replicas' is {served:.4g}/s"
            )
        percentiles = [value for value in (predicted.p50_ms, predicted.p95_ms, predicted.p99_ms) if value is not None]
        if percentiles != sorted(percentiles):
            yield Violation("figures", name, "its percentiles fall")
        yield from _model_percentiles([one for one in own[name] if name in one.rates()], name, predicted)


def _model_percentiles(replicas: Sequence[Replica], name: str, predicted: ModelPrediction) -> Iterator[Violation]:
    """Yield the percentiles over all requests of a model that lie beyond those of each of its replicas."""
    if any(replica.merged for replica in replicas):
        return
    for label in ("p50_ms", "p95_ms", "p99_ms"):
        value = getattr(predicted, label)
        parts = [one for one in (getattr(replica.predicted, label) for replica in replicas) if one is not None]
        if value is None or not parts or len(parts) < len(replicas):
            continue
        if not min(parts) * (1.0 - _SIMULATED) <= value <= max(parts) * (1.0 + _SIMULATED):
            message = f"{label} is said to be {value:.4g} and is {min(parts):.4g} to {max(parts):.4g} of its replicas"
            yield Violation("figures", name, message)


def _map_figures(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    predicted = deployment.predicted
    replicas = [replica for *_, replica in deployment.places()]
    goodput = math.fsum(replica.predicted.goodput_rps for replica in replicas)
    if not _is_near(predicted.goodput_rps, goodput):
        yield _wrong(f"goodput {predicted.goodput_rps:.4g}/s is said and the replicas' is {goodput:.4g}/s")
    for name, value in (
        ("internal_slack", predicted.internal_slack),
        ("outside shares", predicted.external_fragmentation),
    ):
        if value is not None and value > 1.0 + _RELATIVE:
            yield _wrong(f"{name} is {value:g}, more than all")
    if predicted.moves is not None and predicted.moves > len(replicas):
        yield _wrong(f"{predicted.moves} replicas are said to move, and there are {len(replicas)}")
    yield from _cost(deployment, evidence)
    yield from _ends(deployment, evidence)
    if predicted.external_fragmentation is not None:
        left = _unused_part(deployment, evidence)
        if abs(predicted.external_fragmentation - left) > _ABSOLUTE:
            yield _wrong(f"{predicted.external_fragmentation:.3g} is said to be outside shares, and {left:.3g} is")
    if predicted.internal_slack is not None:
        idle = _idle_part(deployment, evidence)
        if abs(predicted.internal_slack - idle) > _SIMULATED:
            yield _wrong(
                f"shares are said to be idle for {predicted.internal_slack:.3g} of their time, and are for {idle:.3g}"
            )


def _cost(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield a cost that is not the sum of the prices, or that is said where a device has none."""
    cost = deployment.predicted.cost_per_hour
    used = [
        gpu.device for node in deployment.nodes for gpu in node.gpus if any(part.replicas for part in gpu.partitions)
    ]
    prices = [evidence.devices[name].price_per_hour for name in used]
    known = [price for price in prices if price is not None]
    if cost is None:
        return
    if len(known) < len(prices):
        yield _wrong(f"a cost of {cost:.4g} $/h is said, and a device of the map has no price")
    elif not _is_near(cost, math.fsum(known)):
        yield _wrong(f"a cost of {cost:.4g} $/h is said, and the devices cost {math.fsum(known):.4g} $/h")


def _ends(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield what no plan can come to at an end of the estimates."""
    counts = list((evidence.counts or {"": None}).values())
    most = math.inf if None in counts else math.fsum(count for count in counts if count is not None)
    asked = math.fsum(model.rate_rps for model in deployment.models.values())
    for name in ("at_lower_ends", "at_upper_ends"):
        plan = getattr(deployment.predicted, name)
        if plan is None:
            continue
        if plan.served_rps > asked * (1.0 + _RELATIVE):
            yield _wrong(f"{name} serves {plan.served_rps:.4g} requests/s, and {asked:.4g} are asked for")
        if plan.gpus is not None and plan.gpus > most:
            yield _wrong(f"{name} has {plan.gpus} devices, and the fleet has {most:g}")
        if plan.gpus == 0 and plan.served_rps > 0.0:
            yield _wrong(f"{name} serves {plan.served_rps:.4g} requests/s by no device")
        if plan.gpus is not None and plan.lower_bound_gpus is not None and plan.lower_bound_gpus > plan.gpus:
            yield _wrong(f"{name} needs at least {plan.lower_bound_gpus} devices and has {plan.gpus}")


def _unused_part(deployment: DeploymentMap, evidence: Evidence) -> float:
    """Return what of the devices used belongs to no share."""
    units, every = 0.0, 0.0
    for node in deployment.nodes:
        for gpu in node.gpus:
            held = {
                (number, one.turns or -place): share_of(part, one)  # those who take turns have one share together
                for number, part in enumerate(gpu.partitions)
                for place, one in enumerate(part.replicas)
            }
            device = evidence.devices[gpu.device]
            every += device.compute_units if held else 0
            units += sum(device.fraction(share) * device.compute_units for share in held.values())
    return max(0.0, 1.0 - units / every) if every else 0.0


def _idle_part(deployment: DeploymentMap, evidence: Evidence) -> float:
    """Return the part of their time for which shares are idle, by what their replicas are said to be busy for."""
    units, busy = 0.0, 0.0
    for _, gpu, partition, replica in deployment.places():
        device, predicted = evidence.devices[gpu.device], replica.predicted
        units_held = device.fraction(share_of(partition, replica)) * device.compute_units
        part = predicted.utilization
        if part is None:
            part = replica.rate_rps / predicted.throughput_rps if predicted.throughput_rps else 0.0
        if replica.turn_ms is not None and predicted.latency_ms > 0.0:
            units_held *= replica.turn_ms / predicted.latency_ms  # of a cycle it has the share for its own turn
        units += units_held
        busy += units_held * min(1.0, part)
    return 1.0 - busy / units if units else 0.0


def _wrong(message: str) -> Violation:
    return Violation("figures", "predicted", message)


def _is_near(value: float, true: float) -> bool:
    return abs(value - true) <= _RELATIVE * abs(true) + _ABSOLUTE
