"""What ``gpuprof load`` sends: the map's rates or those of the command line, or the requests of a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import InputError, unknown_name

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.serving.load.load import RequestStream
    from gpuprof.simulator.trace import Trace

_NS_PER_S = 1e9


def streams_at_rates(
    deployment: DeploymentMap | None, map_file: Path | None, rates: list[str], scale: float
) -> list[RequestStream]:
    """Return the traffic of the models of a map, or without one of those that ``rates`` names.

    Raises
    ------
    InputError
        When nothing says what to send, or a model is not in the map.
    """
    from gpuprof.serving.load.load import RequestStream

    given = dict(_rate(text) for text in rates)
    if deployment is None:
        if not given:
            raise InputError(
                "nothing says what to send", "give --map map.json, --rate MODEL=REQUESTS_PER_S, or --trace"
            )
        return [RequestStream(model, scale * rate, float("inf")) for model, rate in given.items()]
    if unknown := [model for model in given if model not in deployment.models]:
        raise unknown_name("model", unknown[0], list(deployment.models))
    assert map_file is not None
    base = map_file.absolute().parent
    placed = {model for _, _, _, replica in deployment.places() for model in replica.rates()}
    return [
        RequestStream(name, scale * given.get(name, asked.rate_rps), asked.slo_ms, _file(asked.path, base))
        for name, asked in deployment.models.items()
        if name in placed
    ]


def streams_of_trace(deployment: DeploymentMap | None, map_file: Path | None, trace: Trace) -> list[RequestStream]:
    """Return the traffic of a trace; one that names no model is for the map's only one.

    Raises
    ------
    InputError
        When it names a model that the map lacks, or none where the map has several or there is no map.
    """
    from gpuprof.serving.load.load import RequestStream
    from gpuprof.simulator.load import arrivals_of_trace

    if deployment is None:
        if "" in trace.times:
            raise InputError("the trace names no model", "add a column model to it, or give --map")
        asked = [RequestStream(name, 0.0, float("inf")) for name in trace.times]
        times = dict(trace.times)
    else:
        named = arrivals_of_trace(deployment, trace)
        times = {model: trace.times[model if model in trace.times else ""] for model in named}
        asked = [stream for stream in streams_at_rates(deployment, map_file, [], 1.0) if stream.model in times]
        if lost := sorted(set(times) - {stream.model for stream in asked}):
            raise InputError(f"the trace names {lost[0]!r}, which the map does not place")
    return [
        replace(stream, rate_rps=len(own) / trace.duration_s, times_s=tuple((own / _NS_PER_S).tolist()))
        for stream in asked
        if len(own := times[stream.model])
    ]


def _file(path: str | None, base: Path) -> str | None:
    if path is None:
        return None
    return next((str(file) for file in (base / path, Path(path)) if file.is_file()), None)


def _rate(text: str) -> tuple[str, float]:
    model, _, value = text.rpartition("=")
    try:
        rate = float(value)
    except ValueError:
        rate = -1.0
    if not model or not 0.0 < rate < 1e7:
        raise InputError(f"cannot read the rate {text!r}", "write MODEL=REQUESTS_PER_S, such as resnet50=20")
    return model, rate
