"""What a deployment map predicts for the traffic that ``load`` sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuprof.deployment import DeployedModel, DeploymentMap, Replica
from gpuprof.host_work import Running, disturbed, recorded_overhead_ms, recorded_work
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
    deployment: DeploymentMap, rates: Mapping[str, float], queue: QueueModel, scv: float = 1.0
) -> dict[str, LoadPrediction]:
    """Return by model what is predicted when each is sent its rate in requests/s.

    At the rates of the map, what the map says; at others, and for arrivals that are not Poisson, the queueing model
    with the map's batch times and what serving costs, the rates shared among the replicas as in the map.

    Raises
    ------
    InputError
        When the map records a cost of serving that is no number.
    """
    if scv == 1.0 and all(_as_planned(deployment.models[model], rate) for model, rate in rates.items()):
        told = {model: said for model in rates if (said := deployment.models[model].predicted) is not None}
        return {name: LoadPrediction(s.goodput_rps, s.p50_ms, s.p95_ms, s.p99_ms) for name, s in told.items()}
    laws = _laws(deployment, rates, queue, scv)
    return {model: _predicted(deployment.models[model], laws.get(model, []), rate) for model, rate in rates.items()}


def _as_planned(model: DeployedModel, rate_rps: float) -> bool:
    return model.predicted is not None and abs(rate_rps - model.rate_rps) <= _UNCHANGED * model.rate_rps


def _laws(
    deployment: DeploymentMap, rates: Mapping[str, float], queue: QueueModel, scv: float
) -> dict[str, list[tuple[float, Sojourn]]]:
    """Return by model the law of each replica that serves it, and the rate that it gets there."""
    places = list(deployment.places())
    replicas = [replica for *_, replica in places]
    planned: dict[str, float] = {}
    for replica in replicas:
        if replica.batch_latency_ms is None:
            return {}
        for model, rate in replica.rates().items():
            planned[model] = planned.get(model, 0.0) + rate
    sent = [
        {model: rates.get(model, 0.0) * own / (planned[model] or 1.0) for model, own in replica.rates().items()}
        for replica in replicas
    ]
    work, overhead_ms = recorded_work(deployment.inputs), recorded_overhead_ms(deployment.inputs)
    running = [
        Running(_server(replica, overhead_ms), sum(own.values()), replica.sm_share_pct)
        for replica, own in zip(replicas, sent, strict=True)
    ]
    servers = tuple(one.server for one in running)
    if len({(node.name, gpu.index) for node, gpu, *_ in places}) == 1:
        servers = disturbed(work, running, queue)
    laws: dict[str, list[tuple[float, Sojourn]]] = {}
    for one, server, own in zip(running, servers, sent, strict=True):
        law = queue.sojourn(Arrivals(one.rate_rps, scv), server)
        for model, rate in own.items():
            laws.setdefault(model, []).append((rate, law))
    return laws


def _predicted(asked: DeployedModel, laws: Sequence[tuple[float, Sojourn]], rate_rps: float) -> LoadPrediction:
    total = sum(rate for rate, _ in laws)
    if not total:
        return LoadPrediction()
    weights, own = [rate / total for rate, _ in laws], [law for _, law in laws]
    return LoadPrediction(
        rate_rps * sum(w * law.fraction_within(asked.slo_ms) for w, law in zip(weights, own, strict=True)),
        *(_mixed_percentile(own, weights, percent) for percent in (50.0, 95.0, 99.0)),
    )


def _server(replica: Replica, overhead_ms: float) -> BatchServer:
    assert replica.batch_latency_ms is not None
    return BatchServer(
        latency_ms=replica.batch_latency_ms,
        batch=replica.batch,
        max_wait_ms=replica.max_wait_ms,
        processes=replica.processes,
        latency_cv=replica.predicted.latency_cv,
        pause_factor=replica.predicted.pause_factor,
        pause_cv=replica.predicted.pause_cv,
        overhead_ms=overhead_ms,
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
