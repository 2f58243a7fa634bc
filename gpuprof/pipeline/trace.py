"""``trace``: make traces of requests, and look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuprof.domain.arrival_process import parse_arrivals
from gpuprof.domain.validation import NotNegative, Positive, Seed
from gpuprof.errors import InputError
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.result import Result
from gpuprof.simulator.state import WINDOWS
from gpuprof.simulator.trace import Trace, read_azure, read_trace, record_arrivals, write_trace


@dataclass(frozen=True, kw_only=True)
class TraceResult(Result):
    """A trace."""

    trace: Trace

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Return a record for each model: requests, rate, peak, burstiness, longest gap, requests in each part."""
        statistics = self.trace.statistics(self.trace.duration_s / WINDOWS)
        counts = self.trace.counts(WINDOWS).values()
        return [{**row, "counts": bins.tolist()} for row, bins in zip(statistics, counts, strict=True)]

    def write(self, path: PathArgument) -> None:
        """Write the trace as a CSV of ``time_s,model``.

        Raises `InputError` when the file cannot be written.
        """
        write_trace(self.trace, Path(path))


def record_trace(
    rates_rps: Mapping[str, NotNegative], *, arrivals: str = "poisson", duration_s: Positive = 60.0, seed: Seed = 0
) -> TraceResult:
    """Return a trace of an arrival process.

    Raises `InputError` when the process cannot be read, or the trace would hold no request or too many.

    Parameters
    ----------
    rates_rps : mapping of str to float
        Requests per second by model; the single name ``""`` for a trace without model names.
    arrivals : str
        ``"constant"``, ``"poisson"``, ``"gamma:SCV"``, ``"bursts:RATIO,BURST,CALM"``, ``"diurnal:PEAK,PERIOD"``: as
        `gpuprof.domain.arrival_process.parse_arrivals` reads it.
    seed : int
        Same seed, same trace.

    Examples
    --------
    >>> from gpuprof.pipeline.trace import record_trace
    >>> record_trace({"net": 10.0}, arrivals="constant", duration_s=2.0).to_frame()[["model", "requests"]]
      model  requests
    0   net        19
    """
    processes = {model: parse_arrivals(arrivals, rate) for model, rate in rates_rps.items()}
    return _check_trace(record_arrivals(processes, duration_s, seed))


def read_azure_trace(path: PathArgument, names: Sequence[str], *, seed: Seed = 0) -> TraceResult:
    """Return the requests of the busiest functions of a day of Azure Functions, 2019 or 2021.

    Raises `InputError` when the file cannot be read, or has fewer functions than names.

    Parameters
    ----------
    names : sequence of str
        Names of models for the functions, the busiest first.
    seed : int
        Seed of the arrival times within a minute, where only the number of requests is recorded.
    """
    trace = read_azure(Path(path), len(names), seed)
    if len(trace.times) < len(names):
        message = f"{path} has {len(trace.times)} functions that are called but {len(names)} names are given"
        raise InputError(message, "give fewer names")
    return _check_trace(Trace(dict(zip(names, trace.times.values(), strict=True)), trace.duration_s))


def show_trace(path: PathArgument) -> TraceResult:
    """Return a trace from a file, for its statistics.

    Raises `InputError` when the file holds no trace.

    Examples
    --------
    >>> from gpuprof.pipeline.trace import record_trace, show_trace
    >>> file = "trace.csv"
    >>> record_trace({"net": 10.0}, arrivals="constant", duration_s=2.0).write(file)
    >>> show_trace(file).rows()[0]["requests"]
    19
    """
    return TraceResult(trace=read_trace(Path(path)))


def _check_trace(trace: Trace) -> TraceResult:
    if not trace.requests:
        raise InputError("the trace would hold no request", "ask for a longer duration or a higher rate")
    return TraceResult(trace=trace)
