"""The replicas of a deployment map as workloads of an estimator, and its estimates of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gpuprof.domain.deployment import Partition, Replica, share_of
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Workload
from gpuprof.errors import InputError
from gpuprof.rules.turns import estimate_in_turn, involves_turns


def replica_workload(partition: Partition, replica: Replica, batch: int) -> Workload:
    """Return what a replica runs with batches of ``batch``."""
    return Workload(replica.model, batch, share_of(partition, replica), replica.processes, replica.turns)


def neighbour_workloads(partition: Partition, replica: Replica) -> tuple[Workload, ...]:
    """Return what shares the partition with the replica."""
    return tuple(
        replica_workload(partition, other, other.batch) for other in partition.replicas if other is not replica
    )


def ask_estimator(
    estimator: Estimator, device: Device, workload: Workload, beside: Sequence[Workload] = ()
) -> Estimate:
    """Return the estimate of a workload of a map, which may ask for anything.

    Raises `InputError` where nothing can be said of it.
    """
    if device.fraction(workload.share) <= 0.0:
        raise InputError(f"a share of {workload.share.sm_pct:g}% is nothing of a device")
    if involves_turns(workload, beside):
        return estimate_in_turn(partial(ask_estimator, estimator, device), workload, beside)
    return estimator.estimate(
        workload.model, device, workload.batch, workload.share, sorted(beside), workload.processes
    )


def ask_batch_series(
    estimator: Estimator, device: Device, partition: Partition, replica: Replica
) -> tuple[Estimate, ...]:
    """Return the estimates of a replica's batches of 1, 2, … requests, up to a full one, as it runs them.

    Raises `InputError` where nothing can be said of one of them.
    """
    beside = neighbour_workloads(partition, replica)
    full = ask_estimator(estimator, device, replica_workload(partition, replica, replica.batch), beside)
    if full.is_padded:
        return (full,) * replica.batch
    smaller = (replica_workload(partition, replica, size) for size in range(1, replica.batch))
    return (*(ask_estimator(estimator, device, one, beside) for one in smaller), full)
