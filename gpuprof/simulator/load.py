"""The requests of a simulation: at the map's rates, at other rates, or from a trace."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpuprof.domain.arrival_process import ArrivalProcess, ArrivalStream, parse_arrivals
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.validation import collect_distinct
from gpuprof.errors import InputError, unknown_name
from gpuprof.simulator.trace import Trace

_MOST_RPS = 1e9


def arrivals_of_rates(
    deployment: DeploymentMap, rates: Mapping[str, float], total: float | None, scale: float, form: str
) -> dict[str, ArrivalProcess]:
    """Return an arrival process for each model of the map.

    Raises `InputError` for a model that the map lacks, or a form that cannot be read. ``rates``: requests per second of
    some models, by their names for clients, replacing the map's; ``total``: requests per second of all models together,
    in proportion to their rates; ``scale``: factor on the rates; ``form``: see `parse_arrivals`.
    """
    traffic = deployment.traffic
    for model in rates:
        if model not in traffic:
            raise unknown_name("model", model, list(traffic))
    demanded = dict.fromkeys(deployment.models, 0.0)
    for client, requested in traffic.items():
        demanded[deployment.entries[client]] += rates.get(client, requested.rate_rps)
    if total is not None and demanded:
        scale *= total / sum(demanded.values())
    entries = set(deployment.entries.values())
    return {name: parse_arrivals(form, scale * rate) for name, rate in demanded.items() if name in entries}


def arrivals_of_trace(deployment: DeploymentMap, trace: Trace) -> dict[str, ArrivalProcess]:
    """Return the requests of a trace; a trace without model names is for the map's only model.

    Raises `InputError` when the trace names a model that the map lacks, or no model and the map has several.
    """
    return name_requests(deployment, trace).join(deployment.entries).arrivals()


def name_requests(deployment: DeploymentMap, trace: Trace) -> Trace:
    """Return the requests of a trace by the map's names for clients; see `arrivals_of_trace`."""
    clients = list(deployment.traffic)
    names = [name for name, times in trace.times.items() if len(times)]
    if names == [""]:
        if len(clients) != 1:
            raise InputError(f"the trace names no model and the map has {len(clients)}", "add a column model to it")
        return Trace({clients[0]: trace.times[""]}, trace.duration_s)
    for model in names:
        if model not in clients:
            raise unknown_name("model", model, clients)
    return trace


def parse_rates(texts: list[str]) -> tuple[dict[str, float], float | None]:
    """Read ``MODEL=100`` and ``100``; return the rates by model, and the total rate.

    Raises `InputError` for another form, or when the rate of a model or the total is given twice.
    """
    rates: list[tuple[str, float]] = []
    for text in texts:
        model, separator, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if value > _MOST_RPS:
            raise InputError(f"a rate must be at most {_MOST_RPS:,.0f} requests/s but got {text!r}", "correct the rate")
        if not value > 0.0 or (separator and not model):
            raise InputError(f"cannot read the rate {text!r}", "write MODEL=REQUESTS_PER_S, or REQUESTS_PER_S of all")
        rates.append((model, value))
    by_model = collect_distinct("the rate", rates)
    total = by_model.pop("", None)
    return by_model, total


def arrival_streams(
    deployment: DeploymentMap, arrivals: Mapping[str, ArrivalProcess], seed: int
) -> list[ArrivalStream | None]:
    """Return a stream for each model of the map, in its order; None for a model without arrivals."""
    # The second child draws the service times (`gpuprof.simulator.engine`).
    first, _ = np.random.SeedSequence(seed).spawn(2)
    return [
        arrivals[model].stream(np.random.Generator(np.random.PCG64(child))) if model in arrivals else None
        for model, child in zip(deployment.models, first.spawn(len(deployment.models)), strict=True)
    ]


def expected_requests(arrivals: Mapping[str, ArrivalProcess], duration_s: float) -> float:
    """Return the expected number of requests."""
    return duration_s * sum(process.rate_rps for process in arrivals.values())


def thesis_network_ms(payload_bytes: float) -> float:
    """Return the transmission time of a message between the two machines of Elvinger's thesis (section 4.6.2).

    Its measured round trip, and the single fitted value that it prints: 8.7 ms for 9,633,792 bytes, 9.2 Gbit/s.
    """
    return 0.322 + (8.7 - 0.322) * payload_bytes / 9_633_792
