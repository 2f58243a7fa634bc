"""Recomputes the times of a map's replicas by another estimator."""

from __future__ import annotations

from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition, Replica
from gpuprof.domain.estimate import Estimator
from gpuprof.errors import InputError
from gpuprof.placement.evidence import Evidence
from gpuprof.placement.map_workloads import (
    ask_batch_series,
    ask_estimator,
    neighbour_workloads,
    replica_workload,
)
from gpuprof.placement.predict import batch_figures


def retime_map(deployment: DeploymentMap, evidence: Evidence, name: str) -> DeploymentMap:
    """Return the map with the times of its replicas by the estimator of ``evidence``, called ``name``.

    Percentiles are left out: they follow from the queue of these times. Raises `InputError` without an estimator, or
    where a replica has no estimate.
    """
    if evidence.estimator is None:
        raise InputError(f"the estimator {name!r} needs a kernel database", "give --db DATABASE")
    nodes = []
    for node in deployment.nodes:
        gpus = tuple(_retime_gpu(gpu, evidence, evidence.estimator) for gpu in node.gpus)
        nodes.append(node.model_copy(update={"gpus": gpus}))
    planned_with = deployment.planned_with.model_copy(update={"estimator": name})
    return deployment.model_copy(update={"nodes": tuple(nodes), "planned_with": planned_with})


def _retime_gpu(gpu: Gpu, evidence: Evidence, estimator: Estimator) -> Gpu:
    partitions = []
    for partition in gpu.partitions:
        replicas = tuple(_retime_replica(gpu, partition, r, evidence, estimator) for r in partition.replicas)
        partitions.append(partition.model_copy(update={"replicas": replicas}))
    return gpu.model_copy(update={"partitions": tuple(partitions)})


def _retime_replica(
    gpu: Gpu, partition: Partition, replica: Replica, evidence: Evidence, estimator: Estimator
) -> Replica:
    device = evidence.devices.get(gpu.device)
    if device is None:
        raise InputError(f"unknown device {gpu.device!r}")
    if replica.batch_latency_ms is not None:
        estimates = ask_batch_series(estimator, device, partition, replica)
    else:
        workload, beside = replica_workload(partition, replica, replica.batch), neighbour_workloads(partition, replica)
        estimates = (ask_estimator(estimator, device, workload, beside),)
    full = estimates[-1]
    predicted = replica.predicted.model_copy(
        update={
            **batch_figures(full),
            "utilization": replica.rate_rps / full.throughput_rps.value,
            # Percentiles of the old times would be wrong beside the new times.
            **dict.fromkeys(("p50_ms", "p95_ms", "p99_ms", "p99_ms_interval", "goodput_rps_interval")),
        }
    )
    handover_ms = evidence.host.handover_ms
    times = None if replica.batch_latency_ms is None else tuple(e.latency_ms.value + handover_ms for e in estimates)
    return replica.model_copy(update={"predicted": predicted, "batch_latency_ms": times})
