"""Sends a deployment map's traffic to a server and measures latency and goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.domain.arrival_process import NS_PER_S, parse_arrivals
from gpuprof.errors import UnavailableError
from gpuprof.load.client import Schedule, run_clients
from gpuprof.load.report import ModelResult, stage_rows, summarize
from gpuprof.load.target import (
    NextStep,
    Target,
    input_shapes,
    match_outputs,
    random_tensors,
    requests_for,
    requests_of_data,
)
from gpuprof.machine.cores import MachineLoad

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from gpuprof.graph.inputs import InputData

    Times = npt.NDArray[np.float64]

#: Load that a single client process sustains with ease: requests/s and bytes/s.
_EASY_RPS = 1500.0
_EASY_BYTES_PER_S = 600e6
#: Stolen part of the CPU time above which the 99th percentile is affected.
_STOLEN_PART = 0.005


@dataclass(frozen=True, slots=True)
class RequestStream:
    """Traffic for a model."""

    model: str
    rate_rps: float  #: Request rate; mean rate of a recording.
    slo_ms: float
    path: str | None = None  #: ONNX file, which determines valid inputs.
    #: A recording: seconds from its start, ascending. Sent after the warm-up, which has its mean rate.
    times_s: tuple[float, ...] | None = None
    #: Sizes of the free dimensions of the requests, or their distribution, as in slo.csv.
    dims: str | None = None
    #: Inputs to send in file order: .npz, or JSON in the format of perf_analyzer; None: random inputs.
    data: Path | None = None
    #: Closed loop: number of requests in flight, regardless of the rate; None: open loop. All streams of a load are of
    #: the same kind.
    concurrency: int | None = None
    #: Steps of a chain: each answer is sent on to the next step, and the last answer counts; empty for a single model.
    steps: tuple[RequestStream, ...] = ()

    @property
    def first(self) -> RequestStream:
        """The stream of the first step; of a single model this stream."""
        return replace(self.steps[0], data=self.data) if self.steps else self


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings of a load: durations, arrivals, clients and time-outs."""

    #: ``duration_s``, ``warmup_s``: Measured time, and the time before, which is not measured.
    duration_s: float = 20.0
    warmup_s: float = 2.0
    seed: int = 0
    arrivals: str = "poisson"  #: As `gpuprof.domain.arrival_process.parse_arrivals` reads it.
    clients: int | None = None  #: Processes; None: as many as the traffic needs.
    patience_s: float = 10.0  #: Time to wait for the last answers.


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """Results by model, in the order of the streams, with the time by stage and the CPU time of the clients."""

    results: list[ModelResult]
    stages: list[dict[str, object]]
    clients: int
    client_cpu_s: float = 0.0
    disturbance: str | None = None  #: Remark on CPU time that the hypervisor gave to other machines meanwhile.


def run_load(
    target: Target, streams: Sequence[RequestStream], settings: LoadSettings, schedules: list[Schedule] | None = None
) -> LoadOutcome:
    """Send all streams concurrently and return the measurements; ``schedules``: of `plan_load`, where it was called.

    Raises `GpuprofError` when no server answers, or the server lacks a model.
    """
    schedules = plan_load(target, streams, settings) if schedules is None else schedules
    before = _statistics(target, streams)
    load = MachineLoad()
    results = run_clients(schedules)
    disturbance = load.describe_disturbance(None, _STOLEN_PART)
    try:
        after = _statistics(target, streams)
    except UnavailableError:  # an overloaded server: the client's figures are valid without the server's
        after = dict.fromkeys(before)
    schedules = [  # of a closed loop with the requests that it has sent
        replace(schedule, times=result.sent_s, models=result.models) if schedule.in_flight else schedule
        for schedule, result in zip(schedules, results, strict=True)
    ]
    span = settings.warmup_s, settings.warmup_s + settings.duration_s
    measured = [
        summarize(schedules, results, position, stream.model, stream.slo_ms, span)
        for position, stream in enumerate(streams)
    ]
    stages = stage_rows(schedules, results, [stream.model for stream in streams], before, after)
    return LoadOutcome(measured, stages, len(schedules), sum(result.cpu_s for result in results), disturbance)


def make_requests(
    target: Target, streams: Sequence[RequestStream], settings: LoadSettings
) -> tuple[tuple[bytes, ...], ...]:
    """Return the requests of each stream, which are sent alternately.

    Raises `GpuprofError` as `gpuprof.load.target.requests_for` does.
    """
    return tuple(
        requests_for(target, stream.model, stream.path, settings.seed, stream.dims)
        if stream.data is None
        else requests_of_data(target, stream.model, read_stream_data(target, stream))
        for stream in (stream.first for stream in streams)
    )


def make_next_steps(target: Target, stream: RequestStream, seed: int) -> tuple[NextStep, ...]:
    """Return the later steps of a chain. Raises `GpuprofError` as `gpuprof.load.target.requests_for` does."""
    return tuple(
        NextStep(
            target,
            step.model,
            random_tensors(target, step.model, step.path, seed, step.dims),
            match_outputs(target.model_outputs(before.model), target.model_inputs(step.model)),
        )
        for before, step in zip(stream.steps, stream.steps[1:], strict=False)
    )


def read_stream_data(target: Target, stream: RequestStream) -> InputData:
    """Return the samples of a stream's file, checked against the model's inputs.

    Raises `GpuprofError` when the samples do not fit, or the server lacks the model.
    """
    from gpuprof.graph.inputs import model_inputs, read_input_data

    file = None if stream.path is None else Path(stream.path)
    shapes = input_shapes(target, stream.model) if file is None or not file.is_file() else model_inputs(file)
    return read_input_data(stream.data or Path(), shapes)


def plan_load(target: Target, streams: Sequence[RequestStream], settings: LoadSettings) -> list[Schedule]:
    """Return what each client process sends, and when.

    Raises `GpuprofError` when no server answers, or the server lacks a model.
    """
    return make_schedules(target, streams, make_requests(target, streams, settings), settings)


def make_schedules(
    target: Target, streams: Sequence[RequestStream], requests: tuple[tuple[bytes, ...], ...], settings: LoadSettings
) -> list[Schedule]:
    """Merge the streams by time, and distribute their requests, or those in flight, over the clients."""
    import numpy as np

    whole = Schedule(
        target.host,
        target.port,
        requests,
        (),
        (),
        settings.patience_s,
        target if target.is_encrypted else None,
        until_s=settings.warmup_s + settings.duration_s,
        steps=tuple(make_next_steps(target, stream, settings.seed) for stream in streams),
    )
    if any(stream.concurrency for stream in streams):
        clients = settings.clients or 1
        shares = [
            tuple(len(range(first, stream.concurrency or 0, clients)) for stream in streams) for first in range(clients)
        ]
        return [replace(whole, in_flight=share) for share in shares if any(share)]
    all_times = send_times(streams, settings)
    times = np.concatenate(all_times)
    models = np.repeat(np.arange(len(streams)), [len(time) for time in all_times])
    order = np.argsort(times, kind="stable")
    times, models = times[order], models[order]
    clients = settings.clients or _clients_needed(streams, requests)
    return [
        replace(whole, times=times[first::clients].tolist(), models=models[first::clients].tolist())
        for first in range(clients)
    ]


def send_times(streams: Sequence[RequestStream], settings: LoadSettings) -> list[Times]:
    """Return the send times of each stream's requests, over all clients, in seconds from the start of the warm-up."""
    import numpy as np

    total_s, all_times = settings.warmup_s + settings.duration_s, []
    for number, stream in enumerate(streams):
        # 1009: the next seed must not repeat the times of another stream.
        seed, random_s = settings.seed * 1009 + number, total_s if stream.times_s is None else settings.warmup_s
        times = arrival_times(settings.arrivals, stream.rate_rps, random_s, seed)
        recorded = np.asarray(stream.times_s or (), np.float64)
        all_times.append(np.concatenate([times, settings.warmup_s + recorded[recorded < settings.duration_s]]))
    return all_times


def arrival_times(arrivals: str, rate_rps: float, duration_s: float, seed: int) -> Times:
    """Return the arrival times of requests in ``duration_s`` seconds, increasing.

    A Poisson process has a fixed number of arrivals, given by the rate: with a random number, a run of a few hundred
    requests would miss its rate by several percent. Raises `InputError` for an arrival process that cannot be read.
    """
    import numpy as np

    random, count = np.random.default_rng(seed), max(1, round(rate_rps * duration_s))
    if arrivals == "poisson":
        return np.sort(random.uniform(0.0, duration_s, count))
    stream = parse_arrivals(arrivals, rate_rps).stream(random)
    pieces = [stream.take(count)]
    while pieces[-1][-1] < duration_s * NS_PER_S:
        pieces.append(stream.take(count))
    times = np.concatenate(pieces) / NS_PER_S
    return times[times <= duration_s]


def _clients_needed(streams: Sequence[RequestStream], requests: tuple[tuple[bytes, ...], ...]) -> int:
    load = sum(
        stream.rate_rps * max(1.0 / _EASY_RPS, len(bodies[0]) / _EASY_BYTES_PER_S)
        for stream, bodies in zip(streams, requests, strict=True)
    )
    return max(1, -int(-load // 1))


def _statistics(target: Target, streams: Sequence[RequestStream]) -> Mapping[str, dict[str, Any] | None]:
    return {stream.model: target.statistics(stream.model) for stream in streams}
