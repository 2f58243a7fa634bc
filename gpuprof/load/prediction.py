"""Predictions of a deployment map for the traffic of ``load``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpuprof.domain.deployment import DeployedModel, DeploymentMap, Replica
from gpuprof.domain.planned_server import make_planned_server
from gpuprof.domain.sojourn import Arrivals, BatchServer, QueueModel, Sojourn
from gpuprof.rules.host_work import LoadedReplica, disturb_servers, host_work_of_plan

#: Relative difference up to which a rate equals the map's.
_UNCHANGED = 1e-9


class PredictionSource(StrEnum):
    """Sources of a prediction."""

    REPLAY = "replay"
    """Replay of the same requests through the simulator on the map."""
    MAP = "map"
    """The map's own predictions, for its own rates."""
    QUEUEING = "queueing"
    """The queueing model at other rates, from mean rates and their variability; no refusals."""


@dataclass(frozen=True, slots=True)
class LoadPrediction:
    """Predicted figures of a model at a rate; None where the map lacks the data.

    ``refused`` counts requests after the warm-up that are refused because they could not meet their SLO; ``infer_ms``
    is the mean batch time of a request's batch; ``by`` is the source of all figures.
    """

    goodput_rps: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    refused: float | None = None
    infer_ms: float | None = None
    by: PredictionSource | None = None


def predict(
    deployment: DeploymentMap, rates: Mapping[str, float], queue: QueueModel, scv: float = 1.0
) -> dict[str, LoadPrediction]:
    """Return the prediction for each model at its rate in requests/s.

    At the rates of the map, these are the map's own figures; at other rates, and for arrivals other than Poisson,
    they come from the queueing model with the map's batch times and the overhead of serving. All replicas of a model
    form one queue.
    """
    planned = planned_figures(deployment, rates) if scv == 1.0 else {}
    if len(planned) == len(rates):
        return planned
    laws = _laws(deployment, rates, queue, scv)
    return {
        name: planned.get(name) or _predict_model(deployment.models[name], laws.get(name, []), rate)
        for name, rate in rates.items()
    }


def planned_figures(deployment: DeploymentMap, rates: Mapping[str, float]) -> dict[str, LoadPrediction]:
    """Return the map's own predictions where every model has its planned rate; else an empty dict."""
    models = {name: deployment.models[name] for name in rates}
    if any(abs(rates[name] - model.rate_rps) > _UNCHANGED * model.rate_rps for name, model in models.items()):
        return {}
    predicted = {name: model.predicted for name, model in models.items() if model.predicted is not None}
    return {
        name: LoadPrediction(one.goodput_rps, one.p50_ms, one.p95_ms, one.p99_ms, by=PredictionSource.MAP)
        for name, one in predicted.items()
    }


def _laws(
    deployment: DeploymentMap, rates: Mapping[str, float], queue: QueueModel, scv: float
) -> dict[str, list[tuple[float, Sojourn]]]:
    """Return for each model the law of each queue that serves it, and the model's rate there.

    Models with a replica of unknown batch time are absent.
    """
    places = list(deployment.places())
    planned: dict[str, float] = {}
    for *_, replica in places:
        for model, rate in replica.rates().items():
            planned[model] = planned.get(model, 0.0) + rate
    known = [replica for *_, replica in places if replica.batch_latency_ms is not None]
    unknown = {model for *_, replica in places if replica.batch_latency_ms is None for model in replica.rates()}
    sent = [
        {model: rates.get(model, 0.0) * own / (planned[model] or 1.0) for model, own in replica.rates().items()}
        for replica in known
    ]
    overhead_ms = deployment.planned_with.overhead_ms
    running = [
        LoadedReplica(make_planned_server(replica, overhead_ms), sum(own.values()), replica.sm_share_pct, replica.turns)
        for replica, own in zip(known, sent, strict=True)
    ]
    servers = tuple(replica.server for replica in running)
    if not unknown and len({(node.name, gpu.index) for node, gpu, *_ in places}) == 1:
        servers = disturb_servers(host_work_of_plan(deployment.planned_with), running, queue)
    laws: dict[str, list[tuple[float, Sojourn]]] = {}
    for model, sojourn, own_rates in _solve_queues(known, servers, sent, queue, scv):
        if model not in unknown:
            laws.setdefault(model, []).append((own_rates[model], sojourn))
    return laws


def _solve_queues(
    replicas: Sequence[Replica],
    servers: Sequence[BatchServer],
    sent: Sequence[Mapping[str, float]],
    queue: QueueModel,
    scv: float,
) -> Iterator[tuple[str, Sojourn, Mapping[str, float]]]:
    """Yield each model of each queue with the queue's law and the rates of the queue's models.

    Replicas that serve the same models, which no other replica serves, form one queue, as in the router. Where a
    model has both a merged replica and its own, each is assumed to have a separate stream.
    """
    serving: dict[str, set[str]] = {}
    for replica in replicas:
        for model in replica.rates():
            serving.setdefault(model, set()).add(replica.model)
    groups: dict[object, list[int]] = {}
    for number, replica in enumerate(replicas):
        alike = all(len(serving[model]) == 1 for model in replica.rates())
        groups.setdefault(replica.model if alike else number, []).append(number)
    for numbers in groups.values():
        own_rates = {model: sum(sent[number][model] for number in numbers) for model in replicas[numbers[0]].rates()}
        law = queue.pool(Arrivals(sum(own_rates.values()), scv), [servers[number] for number in numbers]).whole
        for model in own_rates:
            yield model, law, own_rates


def _predict_model(asked: DeployedModel, laws: Sequence[tuple[float, Sojourn]], rate_rps: float) -> LoadPrediction:
    total = sum(rate for rate, _ in laws)
    if not total:
        return LoadPrediction()
    weights, sojourns = [rate / total for rate, _ in laws], [law for _, law in laws]
    return LoadPrediction(
        rate_rps * sum(w * law.fraction_within(asked.slo_ms) for w, law in zip(weights, sojourns, strict=True)),
        _mixed_percentile(sojourns, weights, 50.0),
        _mixed_percentile(sojourns, weights, 95.0),
        _mixed_percentile(sojourns, weights, 99.0),
        by=PredictionSource.QUEUEING,
    )


def _mixed_percentile(laws: Sequence[Sojourn], weights: Sequence[float], percent: float) -> float:
    """Return the percentile over requests drawn from each law with its weight, by bisection."""
    low = min(law.percentile(percent) for law in laws)
    high = max(law.percentile(percent) for law in laws)
    if high == float("inf"):
        return high
    # 50 halvings leave less of the interval than doubles can tell apart.
    for _ in range(50):
        middle = (low + high) / 2.0
        within = sum(w * law.fraction_within(middle) for w, law in zip(weights, laws, strict=True))
        low, high = (middle, high) if 100.0 * within < percent else (low, middle)
    return high
