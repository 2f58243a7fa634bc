"""What a deployment map predicts for the traffic that ``load`` sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.deployment import DeploymentMap, Replica
from gpuprof.sojourn import Arrivals, BatchServer, QueueModel, Sojourn

_UNCHANGED = 1e-9


@dataclass(frozen=True, slots=True)
class LoadPrediction:
    """Predicted figures of a model at a rate; None where the map does not say enough."""

    goodput_rps: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None


def predict(
    deployment: DeploymentMap, model: str, rate_rps: float, queue: QueueModel, scv: float = 1.0
) -> LoadPrediction:
    """Return what is predicted of ``model`` when it is sent ``rate_rps``.

    At the rate of the map, what the map says; at another one, and for arrivals that are not Poisson, the queueing
    model with the map's batch times, the rate shared among the replicas as in the map.
    """
    asked = deployment.models[model]
    said = asked.predicted
    if said is not None and abs(rate_rps - asked.rate_rps) <= _UNCHANGED * asked.rate_rps and scv == 1.0:
        return LoadPrediction(said.goodput_rps, said.p50_ms, said.p95_ms, said.p99_ms)
    replicas = [replica for _, _, _, replica in deployment.places() if model in replica.rates()]
    planned_rps = sum(replica.rates()[model] for replica in replicas)
    if not planned_rps or any(replica.batch_latency_ms is None for replica in replicas):
        return LoadPrediction()
    weights = [replica.rates()[model] / planned_rps for replica in replicas]
    laws = [
        queue.sojourn(Arrivals(rate_rps * weight + _others_rps(replica, model), scv), _server(replica))
        for replica, weight in zip(replicas, weights, strict=True)
    ]
    return LoadPrediction(
        rate_rps * sum(w * law.fraction_within(asked.slo_ms) for w, law in zip(weights, laws, strict=True)),
        *(_mixed_percentile(laws, weights, percent) for percent in (50.0, 95.0, 99.0)),
    )


def _others_rps(replica: Replica, model: str) -> float:
    """Return the rate of the other models of a merged replica, which wait in the same queue."""
    return sum(rate for name, rate in replica.rates().items() if name != model)


def _server(replica: Replica) -> BatchServer:
    assert replica.batch_latency_ms is not None
    return BatchServer(
        latency_ms=replica.batch_latency_ms,
        batch=replica.batch,
        max_wait_ms=replica.max_wait_ms,
        processes=replica.processes,
        latency_cv=replica.predicted.latency_cv,
    )


def _mixed_percentile(laws: Sequence[Sojourn], weights: Sequence[float], percent: float) -> float:
    """Return the percentile over requests that meet each law with its weight, by bisection."""
    low = min(law.percentile(percent) for law in laws)
    high = max(law.percentile(percent) for law in laws)
    if high == float("inf"):
        return high
    for _ in range(50):
        middle = (low + high) / 2.0
        within = sum(w * law.fraction_within(middle) for w, law in zip(weights, laws, strict=True))
        low, high = (middle, high) if 100.0 * within < percent else (low, middle)
    return high
