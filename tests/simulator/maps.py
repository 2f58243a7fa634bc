"""Small deployment maps, and recorded arrivals."""

from collections.abc import Sequence

import numpy as np

from gpuprof.domain.arrival_process import RecordedArrivals
from gpuprof.domain.deployment import (
    DeployedModel,
    DeploymentMap,
    Gpu,
    MapPrediction,
    Node,
    Partition,
    Replica,
    ReplicaPrediction,
)


def at(*milliseconds: float) -> RecordedArrivals:
    """Requests at these times."""
    return RecordedArrivals(np.array([round(t * 1e6) for t in milliseconds], np.int64), 1.0)


def replica(
    model: str,
    latency_ms: Sequence[float],
    *,
    processes: int = 1,
    max_wait_ms: float = 0.0,
    cv: float = 0.0,
    rate_rps: float = 1.0,
) -> Replica:
    """A replica whose batches of 1, 2, … take ``latency_ms``."""
    rate = 1000.0 * len(latency_ms) * processes / max(latency_ms[-1], 1e-9)
    return Replica(
        model=model,
        batch=len(latency_ms),
        processes=processes,
        max_wait_ms=max_wait_ms,
        rate_rps=rate_rps,
        batch_latency_ms=tuple(latency_ms),
        predicted=ReplicaPrediction(
            latency_ms=latency_ms[-1], latency_cv=cv, throughput_rps=rate, goodput_rps=rate_rps
        ),
    )


def make_map(gpus: Sequence[Sequence[Replica]], slo_ms: float = 1e6, rate_rps: float = 1.0) -> DeploymentMap:
    """A map with these replicas on each GPU; all models have the same SLO."""
    models = {part.model: DeployedModel(rate_rps=rate_rps, slo_ms=slo_ms) for gpu in gpus for part in gpu}
    devices = tuple(
        Gpu(index=i, device="a100-80", partitions=(Partition(replicas=tuple(parts)),)) for i, parts in enumerate(gpus)
    )
    predicted = MapPrediction(gpus=len(gpus), goodput_rps=0.0)
    return DeploymentMap(policy="test", models=models, nodes=(Node(name="node0", gpus=devices),), predicted=predicted)
