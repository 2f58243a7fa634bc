"""Predictions of ``gpuprof load``: its exact requests, replayed through the simulator.

The simulator follows the router's own rules, early refusal among them. For maps that cannot be simulated, the map's
planned figures, or at other rates the queueing model, replace the replay, and a note states the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuprof.errors import InputError
from gpuprof.pipeline.result import NoteCallback, say_nothing

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.load.load import LoadOutcome, LoadSettings, RequestStream
    from gpuprof.load.p99_gap import P99Gap
    from gpuprof.load.prediction import LoadPrediction
    from gpuprof.load.traffic import Times
    from gpuprof.simulator.merged_queues import MergedQueues
    from gpuprof.simulator.outcome import ModelOutcome, SimulationOutcome

#: Maximum number of replayed requests, the first of the load: some seconds of simulation.
MOST_REPLAYED = 20_000_000
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class LoadPredictions:
    """Predictions for the requests to be sent, and the map's planned figures at these rates, by model.

    ``p99_gaps``, filled after the measurement, attributes the differences between predicted and measured p99 to
    stages; models without an attribution are absent.
    """

    predicted: Mapping[str, LoadPrediction]
    planned: Mapping[str, LoadPrediction]
    p99_gaps: Mapping[str, P99Gap] = field(default_factory=dict)


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
    from gpuprof.load.prediction import planned_figures

    rates = {stream.model: stream.rate_rps for stream in streams}
    asked = planned_figures(deployment, rates) if settings.arrivals == "poisson" else {}
    recorded = any(stream.times_s is not None for stream in streams)
    predicted: Mapping[str, LoadPrediction]
    try:
        predicted = _replay(_prepare_queues(deployment, rates), streams, settings, most, note)
    except _NotReplayedError as why:
        note(f"not replayed in simulated time: {why.message}")
        predicted = _predict_analytically(deployment, rates, settings)
    return LoadPredictions(predicted, {} if recorded else asked)


def divide_p99_gaps(
    deployment: DeploymentMap, outcome: LoadOutcome, predicted: Mapping[str, LoadPrediction]
) -> dict[str, P99Gap]:
    """Return by model the attribution of the difference between predicted and measured p99, where possible."""
    from gpuprof.load.p99_gap import divide_p99_gap

    gaps = {}
    for result, answered in zip(outcome.results, outcome.answered, strict=False):
        expected_ms = predicted[result.model].p99_ms
        if expected_ms is not None and math.isfinite(expected_ms) and result.p99_ms is not None:
            gaps[result.model] = divide_p99_gap(deployment, result.model, answered, expected_ms, result.p99_ms)
    return {model: gap for model, gap in gaps.items() if gap is not None}


class _NotReplayedError(InputError):
    """The simulator cannot reproduce the server's behaviour."""


def _prepare_queues(deployment: DeploymentMap, rates: Mapping[str, float]) -> MergedQueues:
    from gpuprof.simulator.merged_queues import merged_queues

    for *_, replica in deployment.places():
        if replica.batch_latency_ms is None:
            raise _NotReplayedError(f"the map does not say how long batches of {replica.model} take")
    for merge, told in deployment.merges.items():
        if len({deployment.models[name].slo_ms for name in told.members if name in rates}) > 1:
            raise _NotReplayedError(f"the models of {merge} have objectives of their own, but one queue")
    try:
        return merged_queues(deployment)
    except InputError as why:
        raise _NotReplayedError(why.message) from None


def _replay(
    queues: MergedQueues, streams: list[RequestStream], settings: LoadSettings, most: int | None, note: NoteCallback
) -> dict[str, LoadPrediction]:
    """Return the simulator's predictions for the requests; models that share a queue get the queue's figures."""
    from gpuprof.load.load import send_times
    from gpuprof.rules.host_work import host_work_of_plan

    times = send_times(streams, settings)
    until_s = _find_horizon_s(times, settings, most or MOST_REPLAYED, note)
    by_model = dict(zip((stream.model for stream in streams), times, strict=True))
    outcome = _simulate(queues, by_model, settings, until_s, note)
    model_outcomes = {model.model: model for model in outcome.models}
    handover_ms = host_work_of_plan(queues.deployment.planned_with).handover_ms
    counted = [int((own >= settings.warmup_s).sum()) for own in times]
    return {
        stream.model: _predict_model(
            model_outcomes[queues.queue_of.get(stream.model, stream.model)], count, settings.duration_s, handover_ms
        )
        for stream, count in zip(streams, counted, strict=True)
    }


def _simulate(
    queues: MergedQueues, times_s: Mapping[str, Times], settings: LoadSettings, until_s: float, note: NoteCallback
) -> SimulationOutcome:
    import numpy as np

    from gpuprof.rules.host_work import host_work_of_plan
    from gpuprof.simulator.cluster import SimulationOptions
    from gpuprof.simulator.compilation import stop_compiling
    from gpuprof.simulator.engine import simulate
    from gpuprof.simulator.trace import Trace

    times = {model: np.rint(_NS_PER_S * own).astype(np.int64) for model, own in times_s.items() if len(own)}
    planned_with = queues.deployment.planned_with
    legs = dict.fromkeys(queues.deployment.models, (planned_with.overhead_ms, 0.0))
    host = host_work_of_plan(planned_with).at(sum(map(len, times.values())) / until_s)
    options = SimulationOptions(until_s, settings.warmup_s, settings.seed, legs_ms=legs, host=host)
    try:
        return simulate(queues.deployment, queues.trace(Trace(times, until_s)).arrivals(), options)
    finally:
        stop_compiling()  # compilation would take cores from the workers during the measurement


def _predict_model(seen: ModelOutcome, requests: int, seconds: float, handover_ms: float) -> LoadPrediction:
    """Return the prediction for ``requests`` requests from an outcome of fewer or more simulated requests."""
    from gpuprof.load.prediction import LoadPrediction, PredictionSource

    each = requests / seen.requests if seen.requests else 0.0
    service_ms = seen.stage_mean_ms["service"]
    return LoadPrediction(
        each * seen.in_time / seconds,
        seen.p50_ms,
        seen.p95_ms,
        seen.p99_ms,
        each * seen.missed["refused"],
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


def _predict_analytically(
    deployment: DeploymentMap, rates: Mapping[str, float], settings: LoadSettings
) -> Mapping[str, LoadPrediction]:
    from gpuprof.estimators.queueing.queueing import BatchQueue
    from gpuprof.load.prediction import predict

    scv = {"poisson": 1.0, "constant": 0.0}.get(settings.arrivals, settings.scv)
    return predict(deployment, rates, BatchQueue(), scv)
