"""Checks a map's bounds: neither the map, nor a part of it, nor a plan recorded in it may contradict them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from gpuprof.domain.deployment import DeploymentMap, Gpu, PlanAtEnds, Replica
from gpuprof.domain.model_queues import queue_of
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.placement.evidence import Evidence, Violation
from gpuprof.placement.map_queues import map_servers
from gpuprof.rules.host_work import NO_HOST_WORK

_RELATIVE = 1e-3
_ABSOLUTE = 1e-6
#: Of the rates; what is left unplaced below that is rounding.
_LITTLE = 1e-6
#: So many devices that differ are left out in turn.
_MOST_TRIED = 12
_CLEARLY = 0.98  # of the SLO
_OF_INTERVALS = 0.9  # what the intervals in a map hold


def check_bounds(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield each bound of a map that the map, a part of it, or a plan recorded in it contradicts."""
    predicted = deployment.predicted
    rate_rps = math.fsum(replica.rate_rps for *_, replica in deployment.places())
    most = predicted.upper_bound_goodput_rps
    if most is not None and rate_rps > most * (1.0 + _RELATIVE) + _ABSOLUTE:
        yield _make_violation(
            f"its bound is {most:.4g} requests/s served by any map, but this one serves {rate_rps:.4g}"
        )
    if not _serves_all(deployment):
        return
    used = sum(any(part.replicas for part in gpu.partitions) for node in deployment.nodes for gpu in node.gpus)
    if predicted.lower_bound_gpus is not None and predicted.lower_bound_gpus > used:
        yield _make_violation(f"the lower bound of {predicted.lower_bound_gpus} GPUs is above the {used} used")
    least, cost = predicted.lower_bound_cost_per_hour, _sum_cost(deployment, evidence)
    if least is not None and cost is not None and least > cost * (1.0 + _RELATIVE) + _ABSOLUTE:
        yield _make_violation(f"its lower bound is {least:.4g} $/h for any map, but this one costs {cost:.4g}")
    yield from _check_interval_ends(deployment, used)
    if evidence.demands is None and not deployment.merges:
        yield from _check_without_one(deployment, evidence, used)


def _sum_cost(deployment: DeploymentMap, evidence: Evidence) -> float | None:
    """Return what the devices used cost an hour, which the map need not say; None where one has no price."""
    if deployment.predicted.cost_per_hour is not None:
        return deployment.predicted.cost_per_hour  # compared with the prices elsewhere
    prices = [
        evidence.devices[gpu.device].price_per_hour
        for node in deployment.nodes
        for gpu in node.gpus
        if any(part.replicas for part in gpu.partitions)
    ]
    return None if None in prices else math.fsum(price for price in prices if price is not None)


def _serves_all(deployment: DeploymentMap) -> bool:
    asked = math.fsum(model.rate_rps for model in deployment.models.values())
    return math.fsum(one.rate_rps for one in deployment.unplaced) <= _LITTLE * asked


def _check_interval_ends(deployment: DeploymentMap, used: int) -> Iterator[Violation]:
    """Yield bounds that a plan for slower batches exceeds: what suffices there suffices here."""
    said, low, high = deployment.predicted, deployment.predicted.at_lower_ends, deployment.predicted.at_upper_ends
    asked = math.fsum(model.rate_rps for model in deployment.models.values())
    bounds = [("", said.lower_bound_gpus), ("at_lower_ends", None if low is None else low.lower_bound_gpus)]
    plans: list[tuple[str, int | None]] = [("", used)]
    if isinstance(high, PlanAtEnds) and high.served_rps >= asked * (1.0 - _LITTLE):
        plans.append(("at_upper_ends", high.gpus))
    for name, bound in bounds:
        for of, gpus in plans:
            if bound is not None and gpus is not None and bound > gpus and (name or of):
                yield _make_violation(
                    f"{name or 'the map'} needs at least {bound} devices, but {of or 'the map'} has {gpus}"
                )


def _check_without_one(deployment: DeploymentMap, evidence: Evidence, used: int) -> Iterator[Violation]:
    """Yield the bound that the map without one of its devices refutes, where it serves everything without."""
    predicted, tried = deployment.predicted, set()
    least, cost = predicted.lower_bound_cost_per_hour, _sum_cost(deployment, evidence)
    for number, node in enumerate(deployment.nodes):
        for gpu in node.gpus:
            price = evidence.devices[gpu.device].price_per_hour
            few = predicted.lower_bound_gpus is not None and predicted.lower_bound_gpus >= used
            cheap = None not in (least, cost, price) and (least or 0.0) > (cost or 0.0) - 0.5 * (price or 0.0)
            kind = json.dumps([gpu.device, [part.model_dump(mode="json") for part in gpu.partitions]])
            if kind in tried or not (few or cheap) or not any(part.replicas for part in gpu.partitions):
                continue
            tried.add(kind)
            if len(tried) > _MOST_TRIED:
                return
            if _is_sufficient(_remove_device(deployment, number, gpu), evidence):
                where = f"{node.name} gpu {gpu.index}"
                yield _make_violation(
                    f"the lower bound allows no fewer devices, but without {where} the others serve everything"
                )
                return


def _remove_device(deployment: DeploymentMap, number: int, removed: Gpu) -> DeploymentMap:
    node = deployment.nodes[number]
    rest = node.model_copy(update={"gpus": tuple(gpu for gpu in node.gpus if gpu.index != removed.index)})
    return deployment.model_copy(update={"nodes": (*deployment.nodes[:number], rest, *deployment.nodes[number + 1 :])})


def _is_sufficient(deployment: DeploymentMap, evidence: Evidence) -> bool:
    """Whether the replicas of each model answer all of its requests within the SLO, and clearly so.

    Where there is no estimator the map's times count at their upper ends: it may have been planned there, and its bound
    is one for such times.
    """
    if evidence.host != NO_HOST_WORK or (evidence.estimator is None and (evidence.confidence or 0.0) > _OF_INTERVALS):
        return False  # what the machine does for the others would grow with their requests
    if evidence.latency_budget is not None:  # each batch keeps to its part of the SLO, with more requests, too
        most: defaultdict[str, float] = defaultdict(float)
        for *_, replica in deployment.places():
            said = replica.predicted  # which may have been planned at the upper end of its time
            slowest_ms = said.latency_ms if said.latency_ms_interval is None else said.latency_ms_interval[1]
            most[replica.model] += said.throughput_rps * said.latency_ms / max(slowest_ms, said.latency_ms)
        return all(most[name] >= model.rate_rps for name, model in deployment.models.items())
    pools: defaultdict[str, list[BatchServer]] = defaultdict(list)
    for (*_, replica), server in zip(deployment.places(), map_servers(deployment, evidence), strict=True):
        if isinstance(server, str):
            return False
        pools[replica.model].append(server if evidence.estimator is not None else _slow_to_upper_end(replica, server))
    for name, model in deployment.models.items():
        if model.rate_rps >= math.fsum(server.capacity_rps for server in pools[name]):
            return False
    for name, model in deployment.models.items():
        whole = queue_of(evidence.queueing, name).pool(Arrivals(model.rate_rps), pools[name]).whole
        if not whole.percentile(model.percentile) <= _CLEARLY * model.slo_ms:
            return False
    return True


def _slow_to_upper_end(replica: Replica, server: BatchServer) -> BatchServer:
    predicted = replica.predicted
    if predicted.latency_ms_interval is None or not predicted.latency_ms > 0.0:
        return server
    scale = max(1.0, predicted.latency_ms_interval[1] / predicted.latency_ms)
    return replace(server, latency_ms=tuple(scale * ms for ms in server.latency_ms))


def _make_violation(message: str) -> Violation:
    return Violation("figures", "predicted", message)
