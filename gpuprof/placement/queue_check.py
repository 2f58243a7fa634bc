"""Checks the queueing predictions of a map: rates, percentiles, goodput and utilisation are recomputed.

By an estimator's times where there is one, else by those that stand in the map, which router and simulator live by.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.domain.model_queues import queue_of
from gpuprof.domain.sojourn import Arrivals, BatchServer, ServedPart, Sojourn
from gpuprof.placement.evidence import Evidence, Violation
from gpuprof.placement.map_queues import map_servers
from gpuprof.rules.host_work import NO_HOST_WORK

#: What queues that are simulated may be off by; and the part of what is beyond a percentile that may be elsewhere,
#: since where batches do not vary the next to nothing decides a percentile.
_SIMULATED = 0.05
_BEYOND = 0.1
#: Of the rate.
_GOODPUT = 0.02
_ABSOLUTE = 1e-6
_MEANS = 0.0
_PERCENTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}

_Member = tuple[str, Replica, BatchServer]


def check_queues(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield wrong figures of the queue of a model's replicas, or of one of them."""
    if evidence.latency_budget is not None:
        for node, gpu, _, replica in deployment.places():
            for message in _check_alone(replica):
                yield Violation("figures", f"{node.name} gpu {gpu.index}", f"{replica.model}: {message}")
        return
    for model, members in _check_pools(deployment, evidence).items():
        servers = [server for _, _, server in members]
        arrivals = Arrivals(math.fsum(replica.rate_rps for _, replica, _ in members))
        if not 0.0 < arrivals.rate_rps < math.fsum(server.capacity_rps for server in servers):
            continue  # told of elsewhere
        queueing = queue_of(evidence.queueing, model)
        pool = queueing.pool(arrivals, servers)
        ends = [queueing.pool(arrivals, scaled) for scaled in _at_ends(members)]
        slo_ms = deployment.models[model].slo_ms
        for number, (where, replica, _) in enumerate(members):
            laws = [end.parts[number].sojourn for end in ends]
            for message in _check_part(replica, pool.parts[number], laws, slo_ms):
                yield Violation("figures", where, f"{model}: {message}")
        yield from _check_law(deployment, model, pool.whole)
    if evidence.host == NO_HOST_WORK:  # else what the machine does for the others was added at its worst
        yield from _check_merged(deployment, evidence)


def _check_merged(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield wrong figures of a replica that serves several models, by the one queue of all their requests."""
    servers = map_servers(deployment, replace(evidence, confidence=_MEANS))
    serving = Counter(name for *_, replica in deployment.places() for name in replica.rates())
    for (node, gpu, _, replica), server in zip(deployment.places(), servers, strict=True):
        is_told = evidence.estimator is not None or replica.batch_latency_ms is not None
        if not replica.merged or isinstance(server, str) or not is_told:
            continue
        if not 0.0 < replica.rate_rps < server.capacity_rps:
            continue  # told of elsewhere
        law = queue_of(evidence.queueing, replica.model).sojourn(Arrivals(replica.rate_rps), server)
        messages = list(_check_percentiles(law, {name: getattr(replica.predicted, name) for name in _PERCENTILES}))
        messages += _busy(replica.predicted.utilization, law)
        for one in replica.merged:
            in_time = one.rate_rps * law.fraction_within(deployment.models[one.model].slo_ms)
            if abs(one.goodput_rps - in_time) > _GOODPUT * one.rate_rps + _SIMULATED * in_time + _ABSOLUTE:
                messages.append(
                    f"the goodput of {one.model} is {one.goodput_rps:.4g}/s in the map but {in_time:.4g}/s by its queue"
                )
        for message in messages:
            yield Violation("figures", f"{node.name} gpu {gpu.index}", f"{replica.model}: {message}")
        for name in replica.rates():
            if serving[name] == 1:
                yield from _check_law(deployment, name, law)


def _check_alone(replica: Replica) -> Iterator[str]:
    """Yield wrong figures of a replica whose batch time is limited to a part of the SLO."""
    predicted = replica.predicted
    if not predicted.throughput_rps > 0.0:
        return
    busy = replica.rate_rps / predicted.throughput_rps
    if predicted.utilization is not None and abs(predicted.utilization - busy) > _SIMULATED * busy + _ABSOLUTE:
        yield f"its utilization is {predicted.utilization:.4g} in the map but {busy:.4g} by its rate"
    most = min(replica.rate_rps, predicted.throughput_rps)
    if abs(predicted.goodput_rps - most) > _GOODPUT * replica.rate_rps + _ABSOLUTE:
        yield f"its goodput is {predicted.goodput_rps:.4g}/s in the map but {most:.4g}/s by its rate"


def _check_pools(deployment: DeploymentMap, evidence: Evidence) -> Mapping[str, list[_Member]]:
    """Return the replicas of each model that none is merged of, with the mean times of their batches."""
    merged = {one.model for *_, replica in deployment.places() for one in replica.merged}
    places: list[tuple[Node, Gpu, Partition, Replica]] = list(deployment.places())
    servers = map_servers(deployment, replace(evidence, confidence=_MEANS))
    pools: defaultdict[str, list[_Member]] = defaultdict(list)
    unknown = set(merged)
    for (node, gpu, _, replica), server in zip(places, servers, strict=True):
        is_told = evidence.estimator is not None or replica.batch_latency_ms is not None
        if replica.merged or isinstance(server, str) or not is_told:
            unknown.add(replica.model)
        else:
            pools[replica.model].append((f"{node.name} gpu {gpu.index}", replica, server))
    return {model: members for model, members in pools.items() if model not in unknown}


def _at_ends(members: Sequence[_Member]) -> list[list[BatchServer]]:
    """Return the replicas at both ends of what their batches take; none where an end is unknown."""
    scaled = []
    for end in (0, 1):
        servers = []
        for _, replica, server in members:
            predicted = replica.predicted
            if predicted.latency_ms_interval is None or not predicted.latency_ms > 0.0:
                return []
            scale = predicted.latency_ms_interval[end] / predicted.latency_ms
            if not 0.0 < scale < math.inf:
                return []
            servers.append(replace(server, latency_ms=tuple(scale * ms for ms in server.latency_ms)))
        scaled.append(servers)
    return scaled


def _check_part(replica: Replica, part: ServedPart, ends: Sequence[Sojourn], slo_ms: float) -> Iterator[str]:
    predicted, law = replica.predicted, part.sojourn
    if abs(replica.rate_rps - part.rate_rps) > _SIMULATED * max(replica.rate_rps, part.rate_rps) + _ABSOLUTE:
        yield f"it gets {replica.rate_rps:.4g} requests/s in the map but {part.rate_rps:.4g} from the router"
    yield from _check_percentiles(law, {name: getattr(predicted, name) for name in _PERCENTILES})
    in_time = part.rate_rps * law.fraction_within(slo_ms)
    if abs(predicted.goodput_rps - in_time) > _GOODPUT * part.rate_rps + _SIMULATED * in_time + _ABSOLUTE:
        yield f"its goodput is {predicted.goodput_rps:.4g}/s in the map but {in_time:.4g}/s by its queue"
    yield from _busy(predicted.utilization, law)
    if not ends:
        return
    laws = (*ends, law)
    for name, values in (
        ("p99_ms", [one.percentile(99.0) for one in laws]),
        ("goodput_rps", [part.rate_rps * one.fraction_within(slo_ms) for one in laws]),
    ):
        interval, low, high = getattr(predicted, f"{name}_interval"), min(values), max(values)
        if interval is not None and not (_is_about(interval[0], low) and _is_about(interval[1], high)):
            told, true = f"{interval[0]:.4g} to {interval[1]:.4g}", f"{low:.4g} to {high:.4g}"
            yield f"{name}_interval is {told} in the map but {true} by the interval of its batches' time"


def _busy(utilization: float | None, law: Sojourn) -> Iterator[str]:
    if utilization is not None and abs(utilization - law.utilization) > _SIMULATED * law.utilization + _ABSOLUTE:
        yield f"its utilization is {utilization:.4g} in the map but {law.utilization:.4g} by its queue"


def _check_law(deployment: DeploymentMap, model: str, law: Sojourn) -> Iterator[Violation]:
    predicted = deployment.models[model].predicted
    if predicted is not None:
        for message in _check_percentiles(law, {name: getattr(predicted, name) for name in _PERCENTILES}):
            yield Violation("figures", model, message)


def _check_percentiles(law: Sojourn, predicted: Mapping[str, float | None]) -> Iterator[str]:
    for name, value in predicted.items():
        if value is None:
            continue
        part = _PERCENTILES[name]
        little = _BEYOND * (1.0 - part)
        below, above = law.fraction_within(value * (1.0 - _SIMULATED)), law.fraction_within(value * (1.0 + _SIMULATED))
        if above < part - little or below > part + little:
            yield f"{name} is {value:.4g} in the map but {law.percentile(100.0 * part):.4g} by its queue"


def _is_about(value: float, true: float) -> bool:
    return abs(value - true) <= 2.0 * _SIMULATED * abs(true) + _ABSOLUTE
