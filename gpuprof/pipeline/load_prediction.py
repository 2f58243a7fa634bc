"""Predictions of ``gpuprof load``: its exact requests, replayed through the simulator.

The simulator follows the router's own rules, early refusal among them. For maps that cannot be simulated, the map's
planned figures, where they are for these rates, replace the replay, and a note states the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuprof.domain.arrival_process import NS_PER_S
from gpuprof.errors import InputError
from gpuprof.pipeline.result import NoteCallback, say_nothing

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.load.load import LoadSettings, RequestStream
    from gpuprof.load.report import ModelResult
    from gpuprof.load.traffic import Times
    from gpuprof.simulator.outcome import ModelOutcome, SimulationOutcome

#: Maximum number of replayed requests, the first of the load: some seconds of simulation.
MOST_REPLAYED = 20_000_000
#: Relative difference up to which a rate equals the map's.
_UNCHANGED = 1e-9


class PredictionSource(StrEnum):
    """Sources of a prediction."""

    REPLAY = "replay"
    """Replay of the same requests through the simulator on the map."""
    MAP = "map"
    """The map's own predictions, for its own rates."""


@dataclass(frozen=True, slots=True)
class LoadPrediction:
    """Predicted figures of a model at a rate; None where the map lacks the data.

    ``refused``: requests refused after the warm-up because they could not meet their SLO; ``infer_ms``: batch time,
    mean over requests; ``by``: source of all figures.
    """

    goodput_rps: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    refused: float | None = None
    infer_ms: float | None = None
    by: PredictionSource | None = None


@dataclass(frozen=True, slots=True)
class LoadPredictions:
    """Predictions for the requests to be sent, and the map's planned figures at these rates, by model."""

    predicted: Mapping[str, LoadPrediction]
    planned: Mapping[str, LoadPrediction]


def predict_load(
    deployment: DeploymentMap,
    streams: list[RequestStream],
    settings: LoadSettings,
    most: int | None = None,
    note: NoteCallback = say_nothing,
) -> LoadPredictions:
    """Return the predictions for a load, before the load starts: a prediction must not take cores from the workers.

    Parameters
    ----------
    most : int, optional
        Maximum number of replayed requests; None: as many as the simulator processes in some seconds.
    note : callable, optional
        Called with remarks on long steps, omissions, and the reason for a missing replay.
    """
    serving = deployment.entries
    rates: dict[str, float] = {}
    for stream in streams:
        rates[serving[stream.model]] = rates.get(serving[stream.model], 0.0) + stream.rate_rps
    planned_figures = find_planned_figures(deployment, rates) if settings.arrivals == "poisson" else {}
    planned = _share_predictions(deployment, streams, rates, planned_figures)
    recorded = any(stream.times_s is not None for stream in streams)
    predicted: Mapping[str, LoadPrediction]
    try:
        _require_batch_times(deployment)
        predicted = _replay(deployment, streams, settings, most, note)
    except _NotReplayedError as why:
        note(f"not replayed in simulated time: {why.message}")
        predicted = {stream.model: LoadPrediction() for stream in streams} | planned
    return LoadPredictions(predicted, {} if recorded else planned)


def find_planned_figures(deployment: DeploymentMap, rates: Mapping[str, float]) -> dict[str, LoadPrediction]:
    """Return the map's own predictions where every model has its planned rate; else an empty dict."""
    models = {name: deployment.models[name] for name in rates}
    if any(abs(rates[name] - model.rate_rps) > _UNCHANGED * model.rate_rps for name, model in models.items()):
        return {}
    predicted = {name: model.predicted for name, model in models.items() if model.predicted is not None}
    return {
        name: LoadPrediction(row.goodput_rps, row.p50_ms, row.p95_ms, row.p99_ms, by=PredictionSource.MAP)
        for name, row in predicted.items()
    }


class _NotReplayedError(InputError):
    """The simulator cannot reproduce the server's behaviour."""


def _share_predictions(
    deployment: DeploymentMap,
    streams: list[RequestStream],
    rates: Mapping[str, float],
    predicted: Mapping[str, LoadPrediction],
) -> dict[str, LoadPrediction]:
    """Return the predictions by the streams' models: members of a merged model get their part of its goodput."""
    shared = {}
    for stream in streams:
        model = deployment.entries[stream.model]
        if model in predicted and not stream.steps:
            whole = predicted[model]
            goodput_rps = whole.goodput_rps
            if goodput_rps is not None and rates[model] > 0.0:
                goodput_rps *= stream.rate_rps / rates[model]
            shared[stream.model] = replace(whole, goodput_rps=goodput_rps)
    return shared


def _require_batch_times(deployment: DeploymentMap) -> None:
    for *_, replica in deployment.places():
        if replica.batch_latency_ms is None:
            raise _NotReplayedError(f"the map does not say how long batches of {replica.model} take")


def _replay(
    deployment: DeploymentMap,
    streams: list[RequestStream],
    settings: LoadSettings,
    most: int | None,
    note: NoteCallback,
) -> dict[str, LoadPrediction]:
    """Return the simulator's predictions for the requests; members of a merged model get its figures."""
    from gpuprof.load.load import send_times
    from gpuprof.rules.host_work import host_work_of_plan

    times = send_times(streams, settings)
    until_s = _find_horizon_s(times, settings, most or MOST_REPLAYED, note)
    by_model = dict(zip((stream.model for stream in streams), times, strict=True))
    outcome = _simulate(deployment, by_model, settings, until_s, note)
    outcomes = {model.model: model for model in outcome.clients}
    serving = deployment.serving | {name: name for name in deployment.chains}
    handover_ms = host_work_of_plan(deployment.planned_with).handover_ms
    counts = [int((time >= settings.warmup_s).sum()) for time in times]
    return {
        stream.model: _predict_model(outcomes[serving[stream.model]], count, settings.duration_s, handover_ms)
        for stream, count in zip(streams, counts, strict=True)
    }


def _simulate(
    deployment: DeploymentMap, times_s: Mapping[str, Times], settings: LoadSettings, until_s: float, note: NoteCallback
) -> SimulationOutcome:
    import numpy as np

    from gpuprof.rules.host_work import host_work_of_plan
    from gpuprof.simulator.cluster import SimulationOptions
    from gpuprof.simulator.compilation import stop_compiling
    from gpuprof.simulator.engine import simulate
    from gpuprof.simulator.trace import Trace

    times = {model: np.rint(NS_PER_S * at_s).astype(np.int64) for model, at_s in times_s.items() if len(at_s)}
    planned_with = deployment.planned_with
    legs = dict.fromkeys(deployment.models, (planned_with.overhead_ms, 0.0))
    host = host_work_of_plan(planned_with).at(sum(map(len, times.values())) / until_s)
    options = SimulationOptions(until_s, settings.warmup_s, settings.seed, legs_ms=legs, host=host)
    try:
        return simulate(deployment, Trace(times, until_s).join(deployment.entries).arrivals(), options)
    finally:
        stop_compiling()  # compilation would take cores from the workers during the measurement


def _predict_model(outcome: ModelOutcome, requests: int, seconds: float, handover_ms: float) -> LoadPrediction:
    """Return the prediction for ``requests`` requests from an outcome of fewer or more simulated requests."""
    each = requests / outcome.requests if outcome.requests else 0.0
    service_ms = outcome.stage_mean_ms["service"]
    return LoadPrediction(
        each * outcome.in_time / seconds,
        outcome.p50_ms,
        outcome.p95_ms,
        outcome.p99_ms,
        each * outcome.missed["refused"],
        None if service_ms is None else max(0.0, service_ms - handover_ms),
        PredictionSource.REPLAY,
    )


def _find_horizon_s(times_s: list[Times], settings: LoadSettings, most: int, note: NoteCallback) -> float:
    """Return until when requests are replayed, seconds from the start of the warm-up."""
    import numpy as np

    whole_s = settings.warmup_s + settings.duration_s
    if sum(map(len, times_s)) <= most:
        return whole_s
    # Arrival time of the first request beyond the limit, found without sorting all requests.
    until_s = float(np.partition(np.concatenate(times_s), most)[most])
    if until_s <= settings.warmup_s:
        raise _NotReplayedError(f"the warm-up alone has more than {most:,} requests")
    note(f"replaying the first {until_s:.4g} of {whole_s:.4g} s in simulated time: {most:,} requests")
    return until_s


def report_row(
    result: ModelResult,
    predicted: LoadPrediction | None,
    planned: LoadPrediction | None = None,
) -> dict[str, object]:
    """Return measured and predicted figures side by side with the relative errors (measured against predicted).

    ``predicted_by`` names the source of the prediction. ``planned`` holds the map's own figures at these rates.
    """
    row: dict[str, object] = asdict(result)
    row["client_is_limit"] = result.client_is_limit
    row["predicted_by"] = None if predicted is None or predicted.by is None else predicted.by.value
    row["predicted_refused"] = None if predicted is None else predicted.refused
    row["planned_goodput_rps"] = None if planned is None else planned.goodput_rps
    row["planned_p99_ms"] = None if planned is None else planned.p99_ms
    for key in ("goodput_rps", "p50_ms", "p95_ms", "p99_ms"):
        expected = None if predicted is None else getattr(predicted, key)
        got = getattr(result, key)
        row[f"predicted_{key}"] = expected
        is_comparable = expected is not None and 0.0 < expected < float("inf") and got is not None
        row[f"{key}_error"] = (got - expected) / expected if is_comparable else None
    return row


def beside_prediction(stages: Mapping[str, object], predicted: LoadPrediction | None) -> dict[str, object]:
    """Return a `stage_row` with the predicted time of the model, and the error relative to the prediction."""
    got, expected = stages.get("infer_ms"), None if predicted is None else predicted.infer_ms
    error = (got - expected) / expected if isinstance(got, float) and expected else None
    return {**stages, "predicted_infer_ms": expected, "infer_ms_error": error}
