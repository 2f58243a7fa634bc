"""The evidence for checking a deployment map, and its replicas as workloads and as queues, from the map alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import DeploymentMap, Partition, Replica, share_of
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MOST_VARIATION, NOTHING_TRIED, Estimate, Estimator, Figure, TriedRuns, Workload
from gpuprof.domain.host_work import NO_HOST_WORK, HostWork
from gpuprof.domain.number_format import ROUNDING
from gpuprof.domain.sojourn import BatchServer, QueueModel
from gpuprof.errors import InputError
from gpuprof.rules.batching import padded_size
from gpuprof.rules.host_work import disturb_servers
from gpuprof.rules.turns import add_waits, estimate_turn, held_shares, involves_turns, load_replica

#: Relative rounding of a map's figures.
RELATIVE_ROUNDING = 1e-3
#: Maximum number of CUDA MPS clients of a device (CUDA up to 13.0).
MPS_CLIENTS = 48
#: Largest batch whose queue is computed: every size up to it is estimated.
MOST_BATCH = 4096


def is_rounded_to(value: float, true: float) -> bool:
    """Return whether a figure in a map differs from the exact one by no more than rounding.

    Examples
    --------
    >>> is_rounded_to(12.34, 12.341), is_rounded_to(12.3, 12.341)
    (True, False)
    """
    return abs(value - true) <= RELATIVE_ROUNDING * abs(true) + ROUNDING


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule a map breaks."""

    #: ``"geometry"``, ``"share"``, ``"memory"``, ``"failed"``, ``"rate"``, ``"slo"``, ``"time"``, ``"fleet"`` or
    #: ``"figures"``.
    rule: str
    where: str  #: ``"node0 gpu 1"``, or a model.
    message: str  #: The rule and the value that breaks it.

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Data for checking a map."""

    devices: Mapping[str, Device]  #: By name.
    queueing: QueueModel
    estimator: Estimator | None = None  #: None: the times in the map are used unchecked.
    #: ``confidence``, ``latency_budget``: As in `gpuprof.placement.problem.Options`.
    confidence: float | None = None
    latency_budget: float | None = None
    overhead_ms: float = 0.0
    host: HostWork = NO_HOST_WORK  #: Host work, as in `gpuprof.placement.problem.Options`.
    demands: tuple[Demand, ...] | None = None  #: None: the demands in the map itself are used.
    #: Available devices, by name; None or absent: as many as needed.
    counts: Mapping[str, int | None] | None = None
    tried: TriedRuns = NOTHING_TRIED  #: Runs recorded as failed, which override the estimator.

    def __post_init__(self) -> None:
        if self.latency_budget is not None and not 0.0 < self.latency_budget <= 1.0:
            raise InputError(f"a latency budget must be above 0 and at most 1 but got {self.latency_budget:g}")
        if self.confidence is not None and not 0.0 <= self.confidence < 1.0:
            raise InputError(f"a confidence must be at least 0 and below 1 but got {self.confidence:g}")
        if not 0.0 <= self.overhead_ms < 1e9:
            raise InputError(f"an overhead must be at least 0 ms but got {self.overhead_ms:g}")


@dataclass(frozen=True, slots=True)
class Location:
    """A replica of a map in an existing partition of an existing device."""

    where: str  #: ``"node0 gpu 1"``.
    device: Device
    partition: Partition
    replica: Replica


def list_locations(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Location]:
    """Yield the replicas whose device and MIG profile exist, in the order of the map."""
    for node, gpu, partition, replica in deployment.places():
        device = evidence.devices.get(gpu.device)
        if device is None:
            continue
        if partition.mig is None or any(profile.name == partition.mig.profile for profile in device.mig_profiles):
            yield Location(f"{node.name} gpu {gpu.index}", device, partition, replica)


def replica_workload(partition: Partition, replica: Replica, batch: int) -> Workload:
    """Return the workload of a replica with batches of ``batch``."""
    return Workload(replica.model, batch, share_of(partition, replica), replica.processes, replica.turns)


def neighbour_workloads(partition: Partition, replica: Replica) -> tuple[Workload, ...]:
    """Return the workloads of the other replicas of the partition."""
    return tuple(replica_workload(partition, n, n.batch) for n in partition.replicas if n is not replica)


def ask_estimator(
    estimator: Estimator, device: Device, workload: Workload, beside: Sequence[Workload] = ()
) -> Estimate:
    """Return the estimate of a workload of a map.

    Raises `InputError` where the estimator cannot answer, or the share is no part of the device.
    """
    if device.fraction(workload.share) <= 0.0:
        raise InputError(f"a share of {workload.share.sm_pct:g}% is nothing of a device")
    if involves_turns(workload, beside):
        return estimate_turn(partial(ask_estimator, estimator, device), workload, beside)
    return estimator.estimate(
        workload.model, device, workload.batch, workload.share, sorted(beside), workload.processes
    )


def ask_batch_series(
    estimator: Estimator, device: Device, partition: Partition, replica: Replica
) -> tuple[Estimate, ...]:
    """Return the estimates of a replica's batches of 1, 2, … requests, up to the full batch.

    Raises `InputError` where the estimator cannot answer for some batch.
    """
    beside = neighbour_workloads(partition, replica)
    full = ask_estimator(estimator, device, replica_workload(partition, replica, replica.batch), beside)
    sizes = [padded_size(rows, replica.batch, full.padding) for rows in range(1, replica.batch + 1)]
    smaller = {
        size: ask_estimator(estimator, device, replica_workload(partition, replica, size), beside)
        for size in sizes
        if size != replica.batch
    }
    return tuple(smaller.get(size, full) for size in sizes)


def upper_ms(latency: Figure, confidence: float | None) -> float:
    """Return the time that holds at ``confidence``; a figure's interval holds at 90%.

    Without a confidence, an observed figure is used as is, and any other at its upper end.
    """
    if latency.high is None or (confidence is None and latency.is_observed):
        return latency.value
    if confidence is None:
        return latency.high
    quantile = NormalDist().inv_cdf
    return latency.value + (latency.high - latency.value) * quantile(0.5 + confidence / 2.0) / quantile(0.95)


def map_servers(locations: Sequence[Location], evidence: Evidence) -> list[BatchServer | str]:
    """Return every replica as a queue, or the reason why its queue cannot be computed.

    Times hold at the evidence's confidence, and include waits for turns. Where all replicas run on one device, times
    include the host's work for them.
    """
    servers = [_make_server(location, evidence) for location in locations]
    loaded = [
        replace(load_replica(location.replica), server=server)
        for location, server in zip(locations, servers, strict=True)
        if not isinstance(server, str)
    ]
    if len(loaded) < len(locations):
        return servers
    shares = math.fsum(held_shares((replica.share_pct, replica.turns) for replica in loaded))
    if len({location.where for location in locations}) == 1 and shares <= 100.0 * (1.0 + 1e-8):
        disturbed = disturb_servers(evidence.host, loaded, evidence.queueing)
        loaded = [replace(replica, server=server) for replica, server in zip(loaded, disturbed, strict=True)]
    by_partition: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for position, location in enumerate(locations):
        by_partition[location.where, id(location.partition)].append(position)
    for positions in by_partition.values():
        for position, server in zip(positions, add_waits([loaded[p] for p in positions]), strict=True):
            servers[position] = server
    return servers


def _make_server(location: Location, evidence: Evidence) -> BatchServer | str:
    replica = location.replica
    if replica.batch > MOST_BATCH:
        return f"{replica.model} takes batches of {replica.batch}, but no queue is computed above {MOST_BATCH}"
    if evidence.estimator is None:
        predicted = replica.predicted
        if not predicted.latency_ms:
            return f"the map predicts no time for a batch of {replica.model}"
        times = replica.batch_latency_ms or (predicted.latency_ms,) * replica.batch
        if len(times) != replica.batch or min(times) <= 0.0:
            return f"batch_latency_ms of {replica.model} must hold {replica.batch} times above 0"
        latency_cv, pause_factor, pause_cv = predicted.latency_cv, predicted.pause_factor, predicted.pause_cv
        if max(latency_cv, pause_cv or 0.0) > MOST_VARIATION:
            return f"the coefficient of variation of the time of {replica.model} is above {MOST_VARIATION:g}"
    else:
        try:
            estimates = ask_batch_series(evidence.estimator, location.device, location.partition, replica)
        except InputError as error:
            return str(error)
        times = tuple(
            upper_ms(estimate.latency_ms, evidence.confidence) + evidence.host.handover_ms for estimate in estimates
        )
        full = estimates[-1]
        latency_cv, pause_factor, pause_cv = full.latency_cv, full.pause_factor, full.pause_cv
    return BatchServer(
        latency_ms=times,
        batch=replica.batch,
        max_wait_ms=replica.max_wait_ms,
        processes=replica.processes,
        latency_cv=latency_cv,
        pause_factor=pause_factor,
        pause_cv=pause_cv,
        overhead_ms=evidence.overhead_ms,
    )
