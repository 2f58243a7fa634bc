"""Checks the predictions of a map, which the router and the simulator rely on.

Against an estimator each figure that follows from it is recomputed; without one the figures must follow from one
another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpuprof.domain.deployment import DeploymentMap, ModelPrediction, Replica, ReplicaPrediction, share_of
from gpuprof.domain.estimate import MOST_VARIATION
from gpuprof.placement.bound_check import check_bounds
from gpuprof.placement.estimate_check import check_estimates
from gpuprof.placement.evidence import ABSOLUTE_ROUNDING, RELATIVE_ROUNDING, Evidence, Violation, is_rounded_to
from gpuprof.placement.queue_check import check_queues

#: Loading the next batch while one runs (iGniter, equation 2) at most doubles what the time of a batch says.
_MOST_OVERLAPPED = 0.5
#: What queues that are simulated differ by: a pool's figures and its parts', its busy time and the batches'.
_SIMULATED = 0.05

_MOST_PROCESSES = 4096  # each of which rounds its bytes up


def check_predictions(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield every prediction of the map that does not follow from the estimator, or from its other figures.

    Queues and bounds are checked only where the figures of the replicas are right, since they depend on these.
    """
    replicas = tuple(_check_replicas(deployment, evidence))
    yield from replicas
    yield from _check_models(deployment)
    yield from _check_map(deployment, evidence)
    if not replicas:
        yield from check_bounds(deployment, evidence)
        yield from check_queues(deployment, evidence)


def _check_replicas(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    for location in deployment.places():
        node, gpu, _, replica = location
        where = f"{node.name} gpu {gpu.index}"
        for message in (
            *_check_consistency(replica, evidence),
            *_check_limits(deployment, replica),
            *check_estimates(location, evidence),
        ):
            yield Violation("figures", where, f"{replica.model}: {message}")


def _check_consistency(replica: Replica, evidence: Evidence) -> Iterator[str]:
    """Yield where a replica's figures do not follow from one another."""
    predicted = replica.predicted
    if not predicted.latency_ms > 0.0:
        yield "no time is predicted for a batch"
        return
    each_ms = predicted.latency_ms - predicted.overlapped_ms
    if predicted.overlapped_ms > _MOST_OVERLAPPED * predicted.latency_ms:
        yield f"{predicted.overlapped_ms:.4g} of {predicted.latency_ms:.4g} ms of a batch overlap another in the map"
    elif not is_rounded_to(predicted.throughput_rps, 1000.0 * replica.batch * replica.processes / each_ms):
        throughput, latency = f"{predicted.throughput_rps:.4g}/s", f"{each_ms:.4g} ms"
        yield f"a throughput of {throughput} does not follow from {latency} for a batch of {replica.batch}"
    if predicted.goodput_rps > replica.rate_rps * (1.0 + RELATIVE_ROUNDING) + ABSOLUTE_ROUNDING:
        yield f"a goodput of {predicted.goodput_rps:.4g}/s is more than the rate of {replica.rate_rps:.4g}/s"
    if max(predicted.latency_cv, predicted.pause_cv or 0.0) > MOST_VARIATION:
        yield f"its time has a coefficient of variation of {max(predicted.latency_cv, predicted.pause_cv or 0.0):.4g}"
    times = replica.batch_latency_ms
    yield from _check_utilization(replica)
    if times is not None:
        if len(times) != replica.batch or min(times) <= 0.0:
            yield f"batch_latency_ms must hold {replica.batch} times above 0"
        elif not is_rounded_to(times[-1], predicted.latency_ms + evidence.host.handover_ms):
            yield f"batch_latency_ms ends at {times[-1]:.4g} ms but a batch takes {predicted.latency_ms:.4g} ms"
    percentiles = [value for value in (predicted.p50_ms, predicted.p95_ms, predicted.p99_ms) if value is not None]
    if percentiles != sorted(percentiles):
        yield "its percentiles fall"
    limit, held = replica.memory_limit_bytes, predicted.memory_bytes
    if limit is not None and held is not None and limit < held * (1.0 - RELATIVE_ROUNDING):
        yield f"it may hold {limit / 2**30:.4g} GiB but holds {held / 2**30:.4g} GiB"
    creq, mreq = predicted.creq, predicted.mreq
    if creq is not None and creq.interval_pct is not None and not _is_within(creq.pct, creq.interval_pct):
        yield f"a compute requirement of {creq.pct:.4g}% lies outside its interval"
    if mreq is not None and mreq.interval_bytes is not None and not _is_within(mreq.bytes, mreq.interval_bytes):
        yield f"a memory requirement of {mreq.bytes:.4g} bytes lies outside its interval"
    yield from _check_required_memory(predicted)
    yield from _check_intervals(predicted)


def _is_within(value: float, interval: tuple[float, float]) -> bool:
    low, high = interval
    return (
        low * (1.0 - RELATIVE_ROUNDING) - ABSOLUTE_ROUNDING
        <= value
        <= high * (1.0 + RELATIVE_ROUNDING) + ABSOLUTE_ROUNDING
    )


def _check_required_memory(predicted: ReplicaPrediction) -> Iterator[str]:
    """Yield where the memory that a policy planned by has no source or end, or is not what the replica holds."""
    needed, held = predicted.mreq, predicted.memory_bytes
    if needed is None:
        return
    if not needed.source.strip():
        yield "its memory requirement has no source"
    if needed.interval_bytes is not None and not math.isfinite(needed.interval_bytes[1]):
        yield "its memory requirement has an interval without an end"
    if held is not None and needed.bytes > held * (1.0 + RELATIVE_ROUNDING) + 1.0:
        yield f"it requires {needed.bytes / 2**30:.4g} GiB but holds {held / 2**30:.4g} GiB"
    if (
        held is not None
        and needed.interval_bytes is None
        and held > needed.bytes * (1.0 + RELATIVE_ROUNDING) + _MOST_PROCESSES
    ):
        yield f"it holds {held / 2**30:.4g} GiB but requires {needed.bytes / 2**30:.4g} GiB"


def _check_utilization(replica: Replica) -> Iterator[str]:
    """Yield a utilisation below what the requests take, or above 1."""
    predicted = replica.predicted
    if predicted.utilization is None or replica.merged or not predicted.throughput_rps > 0.0:
        return
    times = replica.batch_latency_ms or ()
    each_ms = min((ms / size for size, ms in enumerate(times, 1)), default=predicted.latency_ms / replica.batch)
    least = replica.rate_rps * min(each_ms / 1000.0 / replica.processes, 1.0 / predicted.throughput_rps)
    if not least * (1.0 - _SIMULATED) - ABSOLUTE_ROUNDING <= predicted.utilization <= 1.0 + _SIMULATED:
        busy = f"{predicted.utilization:.4g}"
        yield f"its utilization is {busy} in the map, but its requests alone make it {least:.4g}"


def _check_intervals(predicted: ReplicaPrediction) -> Iterator[str]:
    for name in ("latency_ms", "p99_ms", "throughput_rps", "goodput_rps"):
        interval, value = getattr(predicted, f"{name}_interval"), getattr(predicted, name)
        if interval is None:
            continue
        low, high = interval
        relative = _SIMULATED if name in ("p99_ms", "goodput_rps") else RELATIVE_ROUNDING
        if not (math.isfinite(low) and math.isfinite(high) and 0.0 <= low <= high):
            yield f"{name}_interval is none: {low:g} to {high:g}"
        elif value is not None and not low * (1.0 - relative) <= value <= high * (1.0 + relative) + ABSOLUTE_ROUNDING:
            yield f"{name} of {value:.4g} lies outside its interval"


def _check_limits(deployment: DeploymentMap, replica: Replica) -> Iterator[str]:
    slos = [deployment.models[name].slo_ms for name in replica.rates() if name in deployment.models]
    if slos and replica.max_wait_ms > min(slos):
        yield f"requests wait {replica.max_wait_ms:.4g} ms for their batch, of {min(slos):g} ms that they may take"
    for one in replica.merged:
        if one.goodput_rps > one.rate_rps * (1.0 + RELATIVE_ROUNDING) + ABSOLUTE_ROUNDING:
            yield f"a goodput of {one.goodput_rps:.4g}/s of {one.model} is more than its rate"


def _check_models(deployment: DeploymentMap) -> Iterator[Violation]:
    own: defaultdict[str, list[Replica]] = defaultdict(list)
    for *_, replica in deployment.places():
        for name in dict.fromkeys((*replica.goodputs(), *replica.rates())):
            own[name].append(replica)
    for name, model in deployment.models.items():
        predicted = model.predicted
        if predicted is None:
            continue
        served = math.fsum(replica.goodputs().get(name, 0.0) for replica in own[name])
        if not is_rounded_to(predicted.goodput_rps, served):
            yield Violation(
                "figures",
                name,
                f"its goodput is {predicted.goodput_rps:.4g}/s in the map but {served:.4g}/s over its replicas",
            )
        percentiles = [value for value in (predicted.p50_ms, predicted.p95_ms, predicted.p99_ms) if value is not None]
        if percentiles != sorted(percentiles):
            yield Violation("figures", name, "its percentiles fall")
        yield from _check_model_percentiles([one for one in own[name] if name in one.rates()], name, predicted)


def _check_model_percentiles(replicas: Sequence[Replica], name: str, predicted: ModelPrediction) -> Iterator[Violation]:
    """Yield the percentiles over all requests of a model that lie beyond those of each of its replicas."""
    if any(replica.merged for replica in replicas):
        return
    for label in ("p50_ms", "p95_ms", "p99_ms"):
        value = getattr(predicted, label)
        parts = [one for one in (getattr(replica.predicted, label) for replica in replicas) if one is not None]
        if value is None or not parts or len(parts) < len(replicas):
            continue
        if not min(parts) * (1.0 - _SIMULATED) <= value <= max(parts) * (1.0 + _SIMULATED):
            message = f"{label} is {value:.4g} in the map but {min(parts):.4g} to {max(parts):.4g} of its replicas"
            yield Violation("figures", name, message)


def _check_map(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    predicted = deployment.predicted
    replicas = [replica for *_, replica in deployment.places()]
    goodput = math.fsum(replica.predicted.goodput_rps for replica in replicas)
    if not is_rounded_to(predicted.goodput_rps, goodput):
        yield _make_violation(
            f"goodput is {predicted.goodput_rps:.4g}/s in the map but {goodput:.4g}/s over its replicas"
        )
    for name, value in (
        ("internal_slack", predicted.internal_slack),
        ("outside shares", predicted.external_fragmentation),
    ):
        if value is not None and value > 1.0 + RELATIVE_ROUNDING:
            yield _make_violation(f"{name} is {value:g}, more than all")
    if predicted.moves is not None and predicted.moves > len(replicas):
        yield _make_violation(f"{predicted.moves} replicas move, but there are {len(replicas)}")
    yield from _check_cost(deployment, evidence)
    yield from _check_interval_ends(deployment, evidence)
    if predicted.external_fragmentation is not None:
        left = _compute_unused_part(deployment, evidence)
        if abs(predicted.external_fragmentation - left) > ABSOLUTE_ROUNDING:
            yield _make_violation(
                f"{predicted.external_fragmentation:.3g} is outside shares in the map but {left:.3g} by its partitions"
            )
    if predicted.internal_slack is not None:
        idle = _compute_idle_part(deployment, evidence)
        if abs(predicted.internal_slack - idle) > _SIMULATED:
            yield _make_violation(
                f"internal slack is {predicted.internal_slack:.3g} in the map but {idle:.3g} by its replicas"
            )


def _check_cost(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield a cost that is not the sum of the prices, or that is given although a device has no price."""
    cost = deployment.predicted.cost_per_hour
    used = [
        gpu.device for node in deployment.nodes for gpu in node.gpus if any(part.replicas for part in gpu.partitions)
    ]
    prices = [evidence.devices[name].price_per_hour for name in used]
    known = [price for price in prices if price is not None]
    if cost is None:
        return
    if len(known) < len(prices):
        yield _make_violation(f"the map gives a cost of {cost:.4g} $/h, but one of its devices has no price")
    elif not is_rounded_to(cost, math.fsum(known)):
        yield _make_violation(f"the cost is {cost:.4g} $/h in the map but {math.fsum(known):.4g} $/h over its devices")


def _check_interval_ends(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield what no plan can come to at an end of the estimates."""
    counts = list((evidence.counts or {"": None}).values())
    most = math.inf if None in counts else math.fsum(count for count in counts if count is not None)
    asked = math.fsum(model.rate_rps for model in deployment.models.values())
    for name in ("at_lower_ends", "at_upper_ends"):
        plan = getattr(deployment.predicted, name)
        if plan is None:
            continue
        if plan.served_rps > asked * (1.0 + RELATIVE_ROUNDING):
            yield _make_violation(f"{name} serves {plan.served_rps:.4g} requests/s, but {asked:.4g} are asked for")
        if plan.gpus is not None and plan.gpus > most:
            yield _make_violation(f"{name} has {plan.gpus} devices, but the fleet has {most:g}")
        if plan.gpus == 0 and plan.served_rps > 0.0:
            yield _make_violation(f"{name} serves {plan.served_rps:.4g} requests/s by no device")
        if plan.gpus is not None and plan.lower_bound_gpus is not None and plan.lower_bound_gpus > plan.gpus:
            yield _make_violation(f"{name} needs at least {plan.lower_bound_gpus} devices but has {plan.gpus}")


def _compute_unused_part(deployment: DeploymentMap, evidence: Evidence) -> float:
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


def _compute_idle_part(deployment: DeploymentMap, evidence: Evidence) -> float:
    """Return the fraction of time for which shares are idle, by the utilisation of their replicas."""
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


def _make_violation(message: str) -> Violation:
    return Violation("figures", "predicted", message)
