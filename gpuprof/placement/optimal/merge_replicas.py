"""Merges the replicas of a model within a partition: the same work with fewer processes and copies of the weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gpuprof.domain.device import Device
from gpuprof.placement.optimal.candidates import Choices
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments


def merge_replicas(
    problem: Problem, segments: Segments, choices: Choices, gpus: Sequence[PlacedGpu]
) -> tuple[PlacedGpu, ...]:
    """Return the devices with as few replicas in each partition as their shares allow; no share grows."""
    merged: dict[PlacedGpu, PlacedGpu] = {}
    for gpu in gpus:
        if gpu not in merged:
            device = problem.device(gpu.device)
            parts = tuple(_merge_in_partition(device, segments, choices, part) for part in gpu.partitions)
            merged[gpu] = PlacedGpu(gpu.device, parts)
    return tuple(merged[gpu] for gpu in gpus)


def _merge_in_partition(
    device: Device, segments: Segments, choices: Choices, partition: PlacedPartition
) -> PlacedPartition:
    for model, count in Counter(replica.model for replica in partition.replicas).items():
        if count < 2:
            continue
        replicas = [replica for replica in partition.replicas if replica.model == model]
        single = _find_single(device, choices, partition, replicas, segments.problem.demand(model).rate_rps)
        if single is None:
            continue
        other_replicas = tuple(replica for replica in partition.replicas if replica.model != model)
        candidate = replace(partition, replicas=(single, *other_replicas))
        if segments.holds(device, candidate):
            partition = candidate
    return partition


def _find_single(
    device: Device, choices: Choices, partition: PlacedPartition, replicas: Sequence[PlacedReplica], asked_rps: float
) -> PlacedReplica | None:
    """Return a replica that does the work of these, None where no known replica takes as little."""
    rate = math.fsum(replica.rate_rps for replica in replicas)
    if math.isclose(rate, asked_rps, rel_tol=1e-9):
        rate = asked_rps  # the whole demand: parts must not add up to a rounded sum
    most_pct = sum(replica.share.sm_pct for replica in replicas) * (1.0 + 1e-12)
    memory = sum(replica.memory_bytes or 0 for replica in replicas)
    able = [
        segment
        for segment in choices[replicas[0].model]
        if (segment.device, segment.share.mig) == (device.name, partition.mig)
        and segment.share.sm_pct <= min(most_pct, 100.0)
        and segment.capacity_rps >= rate * (1.0 - 1e-12)
        and (segment.memory_bytes or 0) <= memory
    ]
    best = min(able, key=lambda segment: (segment.share.sm_pct, segment.processes), default=None)
    return None if best is None else best.replica(rate)
