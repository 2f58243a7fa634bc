"""Checks that no device is given more work than it can do in the same time (`gpuprof.domain.estimate`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gpuprof.domain.deployment import DeploymentMap, Gpu
from gpuprof.domain.estimate import MEASURED, board_work
from gpuprof.placement.evidence import Evidence, Violation
from gpuprof.placement.map_workloads import upper_ms

#: Rounding of predicted times, and the excess allowed to estimates beyond the measured batches.
_ROUNDING, _BEYOND_MEASURED = 0.01, 0.25


def check_work(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield each device whose replicas' requests take more than all of its time, by the estimator."""
    if evidence.estimator is None:
        return
    for node in deployment.nodes:
        for gpu in (g for g in node.gpus if g.device in evidence.devices):
            work, slack = _add_work(gpu, evidence)
            if work > 1.0 + slack:
                detail = f"its replicas are given {work:.3g} seconds of the whole device's work a second"
                yield Violation("rate", f"{node.name} gpu {gpu.index}", detail)


def _add_work(gpu: Gpu, evidence: Evidence) -> tuple[float, float]:
    """Return a device's seconds of work per second, and the tolerance; excludes unknown work."""
    assert evidence.estimator is not None
    seconds, slack = [], _ROUNDING
    for partition in gpu.partitions:
        for replica in partition.replicas:
            work = board_work(evidence.estimator, replica.model, evidence.devices[gpu.device])
            if work is not None:
                seconds.append(replica.rate_rps * upper_ms(work, evidence.confidence) / 1e3)
                slack = _BEYOND_MEASURED if work.source == MEASURED else slack
    return math.fsum(seconds), slack
