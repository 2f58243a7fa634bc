"""The replicas of a deployment map as queues, with times by an estimator or those recorded in the map."""

from __future__ import annotations

import math
from statistics import NormalDist

from gpuprof.domain.deployment import DeploymentMap, Partition, Replica
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MOST_VARIATION, Figure
from gpuprof.domain.sojourn import BatchServer
from gpuprof.errors import InputError
from gpuprof.placement.evidence import Evidence
from gpuprof.placement.map_workloads import ask_batch_series
from gpuprof.rules.host_work import LoadedReplica, disturb_servers
from gpuprof.rules.turns import held_shares

#: Every size up to a replica's batch is looked at; larger ones are not served.
MOST_BATCH = 4096
#: How many times as long as a larger batch one may take: kernels of odd sizes are slow, and a batch can be filled up.
_MOST_LONGER = 10.0
_TOLERANCE = 1e-6


def map_servers(deployment: DeploymentMap, evidence: Evidence) -> list[BatchServer | str]:
    """Return every replica as a queue, or why nothing can be said of it; disturbed where one machine is all there is.

    Where batches are held to a part of the SLO nobody asks. Times are those that hold at the evidence's confidence.
    """
    places = list(deployment.places())
    if evidence.latency_budget is not None:
        return ["not asked"] * len(places)
    servers = [
        _make_server(partition, replica, evidence.devices[gpu.device], evidence)
        for _, gpu, partition, replica in places
    ]
    known = [(place, server) for place, server in zip(places, servers, strict=True) if not isinstance(server, str)]
    one_machine = len({(node.name, gpu.index) for node, gpu, *_ in places}) == 1
    shares = math.fsum(held_shares((replica.sm_share_pct, replica.turns) for *_, replica in places))
    if not one_machine or len(known) < len(places) or shares > 100.0 + _TOLERANCE:
        return servers  # too large a share is reported by another check
    running = [
        LoadedReplica(server, replica.rate_rps, replica.sm_share_pct, replica.turns) for (*_, replica), server in known
    ]
    return list(disturb_servers(evidence.host, running, evidence.queueing))


def _make_server(partition: Partition, replica: Replica, device: Device, evidence: Evidence) -> BatchServer | str:
    """Return the replica as a queue, or why nothing can be said of it."""
    if replica.batch > MOST_BATCH:
        return f"{replica.model} takes batches of {replica.batch}, but no queue is computed above {MOST_BATCH}"
    if evidence.estimator is None:
        if not replica.predicted.latency_ms:
            return f"the map predicts no time for a batch of {replica.model}"
        times = replica.batch_latency_ms or (replica.predicted.latency_ms,) * replica.batch
        if len(times) != replica.batch or min(times) <= 0.0:
            return f"batch_latency_ms of {replica.model} must hold {replica.batch} times above 0"
        least = times[-1]
        for size in range(len(times), 0, -1):
            least = min(least, times[size - 1])
            if times[size - 1] > _MOST_LONGER * least:
                return (
                    f"{size} requests of {replica.model} take {times[size - 1]:.4g} ms, but more of them {least:.4g} ms"
                )
        said = replica.predicted
        if max(said.latency_cv, said.pause_cv or 0.0) > MOST_VARIATION:
            return f"the coefficient of variation of the time of {replica.model} is above {MOST_VARIATION:g}"
        return _make_queue(replica, times, said.latency_cv, (said.pause_factor, said.pause_cv), evidence)
    try:
        estimates = ask_batch_series(evidence.estimator, device, partition, replica)
    except InputError as error:
        return str(error)
    handover_ms = evidence.host.handover_ms
    times = tuple(upper_ms(estimate.latency_ms, evidence.confidence) + handover_ms for estimate in estimates)
    return _make_queue(
        replica, times, estimates[-1].latency_cv, (estimates[-1].pause_factor, estimates[-1].pause_cv), evidence
    )


def _make_queue(
    replica: Replica, times: tuple[float, ...], latency_cv: float, pause: tuple[float, float | None], evidence: Evidence
) -> BatchServer:
    return BatchServer(
        latency_ms=times,
        batch=replica.batch,
        max_wait_ms=replica.max_wait_ms,
        processes=replica.processes,
        latency_cv=latency_cv,
        pause_factor=pause[0],
        pause_cv=pause[1],
        overhead_ms=evidence.overhead_ms,
    )


def upper_ms(latency: Figure, confidence: float | None) -> float:
    """Return the time that holds at ``confidence``; a figure's own interval holds at 90%.

    Unless told otherwise what was observed is believed, and of everything else the upper end.
    """
    if latency.high is None or (confidence is None and latency.is_observed):
        return latency.value
    if confidence is None:
        return latency.high
    quantile = NormalDist().inv_cdf
    return latency.value + (latency.high - latency.value) * quantile(0.5 + confidence / 2.0) / quantile(0.95)
