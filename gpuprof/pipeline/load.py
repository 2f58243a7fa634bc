"""``load``: send traffic to a server and compare its answers with the predictions.

The requests are the map's rates, given rates, those of a trace, or a closed loop. Predictions replay the same requests
through the simulator, which follows the router's own rules, early refusal among them.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from gpuprof.domain.arrival_process import NS_PER_S
from gpuprof.domain.demand import Slo
from gpuprof.domain.sizes import check_size, describe_sizes, require_dimensions
from gpuprof.domain.validation import NotNegative, Positive, Seed
from gpuprof.errors import InputError, unknown_name
from gpuprof.graph.load import read_free_dims
from gpuprof.load.load import (
    LoadOutcome,
    LoadSettings,
    RequestStream,
    plan_load,
    read_stream_data,
    run_load,
    send_times,
)
from gpuprof.load.report import LoadPrediction, ModelResult, compare_figures, explain_result
from gpuprof.load.target import Target, describe_assumed
from gpuprof.machine.cgroup import own_cores
from gpuprof.machine.cores import MachineLoad, allowed_cores, avoiding_cores
from gpuprof.pipeline.arguments import (
    MapArgument,
    PathArgument,
    locate_files,
    map_folder,
    optional_path,
    require_planned_files,
    resolve_map,
)
from gpuprof.pipeline.recorded_problem import time_map_by
from gpuprof.pipeline.result import NoteCallback, NoteList, Progress, ProgressCallback, say_nothing
from gpuprof.pipeline.settings import ARRIVALS, READ_RATES, DataFiles, Dims, Settings, by_model, option
from gpuprof.pipeline.verdicts import JudgedResult, SloVerdict, keeps_objective
from gpuprof.rules.cpu_slices import plan_shared_slices
from gpuprof.serving.transport.security import read_token
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate, stop_compiling
from gpuprof.simulator.trace import Trace, client_rates, name_requests, read_trace

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap, RequestedModel
    from gpuprof.simulator.outcome import ModelOutcome

#: Default address of a server.
DEFAULT_URL = "http://127.0.0.1:8000"
#: Part of the cores' time taken by other programs, over a time in seconds, that is normal background activity.
_BUSY_PART, _WATCH_S = 0.125, 0.5
#: A rate below the capability of no machine.
_Rate = Annotated[float, Field(gt=0.0, lt=1e7)]
#: Each concurrent request needs a connection, and systems often allow a process 1024 open files.
_Concurrency = Annotated[int, Field(ge=1, le=800)]
_Duration = Annotated[float, Field(ge=0.1)]


def _parse_concurrency(text: str) -> tuple[str, int]:
    model, separator, count = text.rpartition("=")
    if not count.isdecimal() or (separator and not model):
        raise InputError(f"cannot read the concurrency {text!r}", "write REQUESTS or MODEL=REQUESTS, such as 4")
    return model, int(count)


class LoadTraffic(Settings):
    """Requests of a load test, and its length.

    ``concurrency``: requests in flight by model, ``""`` for all other models; replaces rates.
    """

    title: ClassVar[str] = "Traffic"

    duration_s: _Duration | None = option(
        None, "Measured time, such as 60s or 5m; default: 20s, or the length of the trace.", "--duration", unit="s"
    )
    dims: Dims = option(
        {}, "Size of a free dimension of requests; may be repeated.", "--dim", metavar="NAME=SIZE", repeated=True
    )
    input_data: DataFiles = option(
        {},
        "Input data: .npz, or JSON as perf_analyzer's; default: random. May be repeated.",
        metavar="[MODEL=]FILE",
        repeated=True,
    )
    rates_rps: Annotated[Mapping[str, _Rate], READ_RATES] = option(
        {}, "Rate as MODEL=REQUESTS_PER_S, or one rate for all; default: the map's.", "--rate", repeated=True
    )
    rate_scale: Positive = option(1.0, "Factor on all rates.")
    trace: Path | None = option(None, "Trace to replay: a CSV file of time_s,model.")
    arrivals: str = option("poisson", ARRIVALS)
    concurrency: Annotated[Mapping[str, _Concurrency], by_model("the concurrency", _parse_concurrency)] = option(
        {},
        "Closed loop: number of requests in flight for each model, in place of rates. May be repeated.",
        metavar="[MODEL=]REQUESTS",
        repeated=True,
    )
    warmup_s: NotNegative = option(2.0, "Time before the measured time.", "--warmup", unit="s")
    allow_changed: bool = option(False, "Accept model files that changed since the map was planned.")
    seed: Seed = option(0, "Seed of the traffic.")

    def make_streams(self, deployment: DeploymentMap | None, folder: Path) -> tuple[list[RequestStream], LoadSettings]:
        """Return the request stream of each model of the map, or without a map of each named model, and the settings.

        Raises `InputError` when no traffic is specified, a model is not in the map, a trace cannot be read, or both a
        trace and rates are given.
        """
        duration_s = self.duration_s or LoadSettings().duration_s
        if self.concurrency:
            streams = self._make_closed(deployment, folder)
        elif self.trace is None:
            streams = make_rate_streams(deployment, folder, self.rates_rps, self.rate_scale)
        elif self.rates_rps or self.rate_scale != 1.0:
            raise InputError("--trace says when requests come: --rate and --rate-scale cannot change that")
        else:
            recorded = read_trace(Path(self.trace))
            streams = make_trace_streams(deployment, folder, recorded)
            duration_s = min(self.duration_s or recorded.span_s, recorded.span_s)
        return self._fill(streams), LoadSettings(duration_s, self.warmup_s, self.seed, self.arrivals)

    def _make_closed(self, deployment: DeploymentMap | None, folder: Path) -> list[RequestStream]:
        """Return the streams of a closed loop: for each model the number of concurrent requests."""
        if self.trace is not None or self.rates_rps or self.rate_scale != 1.0:
            raise InputError(
                "--concurrency sends as answers come: --rate, --rate-scale and --trace cannot be kept", "leave one out"
            )
        if deployment is None:
            streams = [RequestStream(model, 0.0, float("inf")) for model in self.concurrency if model]
            if not streams:
                raise InputError("nothing says what to send", "give --map map.json, or --concurrency MODEL=REQUESTS")
        else:
            streams = make_rate_streams(deployment, folder, {}, 1.0)
        names = [stream.model for stream in streams]
        if unknown := [model for model in self.concurrency if model and model not in names]:
            raise unknown_name("model", unknown[0], names)
        concurrency = {name: self.concurrency.get(name, self.concurrency.get("")) for name in names}
        return [
            replace(stream, concurrency=concurrency[stream.model], rate_rps=0.0)
            for stream in streams
            if concurrency[stream.model]
        ]

    def _fill(self, streams: Sequence[RequestStream]) -> list[RequestStream]:
        """Return the streams with the content of their requests: sizes of dimensions, or inputs from files."""
        files = {name: Path(file) for name, file in self.input_data.items()}
        if files and self.dims:
            raise InputError("--input-data says how large requests are: --dim cannot change that")
        if unknown := [name for name in files if name and name not in {stream.model for stream in streams}]:
            raise unknown_name("model", unknown[0], [stream.model for stream in streams])
        return [
            replace(stream, data=files.get(stream.model, files.get(""))) for stream in size_streams(streams, self.dims)
        ]


class ServerAccess(Settings):
    """Credentials of a client, and the certificates that it trusts."""

    title: ClassVar[str] = "Authentication and TLS"

    token_file: Path | None = option(None, "File with the server's token; default: GPUPROF_TOKEN.")
    ca_file: Path | None = option(None, "Certificate (PEM) to trust on https; default: those of the system.")

    def reach(self, address: str) -> Target:
        """Return the server at ``address`` after a successful request.

        Raises `InputError` when the address or a file is invalid; `UnavailableError` when no server answers there.
        """
        server = Target.parse(address, read_token(self.token_file), self.ca_file)
        server.get("/v2")  # fail before the predictions when the server is down
        return server


def size_streams(streams: Sequence[RequestStream], dims: Mapping[str, int]) -> list[RequestStream]:
    """Return the streams at sizes ``dims``, each with the dimensions that its model has.

    Raises `InputError` when no model is known to have a given dimension.
    """
    if not dims:
        return list(streams)

    def list_free(stream: RequestStream) -> set[str] | None:
        return None if stream.path is None else {dim.name for dim in read_free_dims(Path(stream.path))}

    free = [list_free(each) for stream in streams for each in stream.steps or (stream,)]
    if None not in free:  # a model without a file may have any
        require_dimensions(dims, (names or () for names in free))

    def size(stream: RequestStream) -> RequestStream:
        if stream.steps:
            return replace(stream, steps=tuple(map(size, stream.steps)))
        names = list_free(stream)
        sizes = [(dim, check_size(dim, size)) for dim, size in dims.items() if names is None or dim in names]
        return replace(stream, dims=describe_sizes(sizes)) if sizes else stream

    return list(map(size, streams))


def make_rate_streams(
    deployment: DeploymentMap | None, folder: Path, rates_rps: Mapping[str, float], scale: float
) -> list[RequestStream]:
    """Return the traffic of the models of a map, or without a map of the models in ``rates_rps``.

    Relative paths of model files start at ``folder``. Raises `InputError` when no traffic is specified, or a model is
    not in the map.
    """
    if deployment is None:
        if not rates_rps or "" in rates_rps:
            raise InputError(
                "nothing says what to send", "give --map map.json, --rate MODEL=REQUESTS_PER_S, or --trace"
            )
        return [RequestStream(model, scale * rate, float("inf")) for model, rate in rates_rps.items()]
    traffic, entries, rates = deployment.traffic, deployment.entries, client_rates(deployment, rates_rps, scale)
    placed = {replica.model for *_, replica in deployment.places()}

    def make_stream(name: str, demand: RequestedModel) -> RequestStream:
        chain = deployment.chains.get(name)
        return RequestStream(
            name,
            rates.get(name, scale * demand.rate_rps),
            demand.slo_ms,
            _find_file(demand.path, folder),
            dims=demand.dims,
            steps=() if chain is None else tuple(make_stream(step, deployment.models[step]) for step in chain.steps),
        )

    return [make_stream(name, demand) for name, demand in traffic.items() if entries[name] in placed]


def make_trace_streams(deployment: DeploymentMap | None, folder: Path, trace: Trace) -> list[RequestStream]:
    """Return the traffic of a trace; a trace without model names is for the map's only model.

    Raises `InputError` when the trace names a model that the map lacks, or no model although the map has several or
    there is no map.
    """
    if deployment is None:
        if "" in trace.times:
            raise InputError("the trace names no model", "add a column model to it, or give --map")
        streams = [RequestStream(name, 0.0, float("inf")) for name in trace.times]
        times = dict(trace.times)
    else:
        times = {model: arrivals for model, arrivals in name_requests(deployment, trace).times.items() if len(arrivals)}
        streams = [stream for stream in make_rate_streams(deployment, folder, {}, 1.0) if stream.model in times]
        if unplaced := sorted(set(times) - {stream.model for stream in streams}):
            raise InputError(
                f"the trace names {unplaced[0]!r}, which the map does not place", "use the map's names in the trace"
            )
    return [
        replace(stream, rate_rps=len(arrivals) / trace.duration_s, times_s=tuple((arrivals / NS_PER_S).tolist()))
        for stream in streams
        if len(arrivals := times[stream.model])
    ]


def _find_file(path: str | None, folder: Path) -> str | None:
    if path is None:
        return None
    return next((str(file) for file in (folder / path, Path(path)) if file.is_file()), None)


@dataclass(frozen=True, kw_only=True)
class LoadResult(JudgedResult):
    """The clients' measurements, with the predictions.

    Attributes
    ----------
    predictions : mapping of str to LoadPrediction
        By model; empty without a map, and for a closed loop.
    warnings : tuple of str
        Unanswered requests, late clients and stolen time; also part of the notes.
    inputs : mapping of str to str
        File of a model's inputs, with its hash; models with random inputs are absent.
    percentiles : mapping of str to float
        Percent of a model's requests that must be answered within its SLO; 99 where absent.
    is_closed : bool
        Whether answers released the next requests: the map's objectives, which are planned for rates, do not apply.
    """

    verb: ClassVar[str] = "load"
    outcome: LoadOutcome
    predictions: Mapping[str, LoadPrediction] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    percentiles: Mapping[str, float] = field(default_factory=dict)
    is_closed: bool = False

    def verdicts(self) -> tuple[SloVerdict, ...]:
        """Return whether each model kept its SLO, and why not."""
        return tuple(map(self._judge, self.outcome.results, self._compare(), self.stage_rows()))

    def _judge(self, result: ModelResult, row: Mapping[str, object], stages: Mapping[str, object]) -> SloVerdict:
        percentile = self.percentiles.get(result.model, Slo(result.slo_ms).percentile)
        is_kept = keeps_objective(result.in_slo, result.sent, result.slo_ms, percentile)
        if self.is_closed:
            is_kept = None
        predicted = self.predictions.get(result.model)
        return SloVerdict(
            result.model,
            is_kept,
            result.slo_ms,
            percentile,
            100.0 * result.in_slo / result.sent if result.sent else None,
            result.p99_ms,
            None if predicted is None else predicted.p99_ms,
            result.rate_rps,
            result.goodput_rps,
            explain_result(result, is_kept, percentile, row, stages, self.is_closed),
        )

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each model: rates, goodput, latency, predictions, errors, and which inputs were sent."""
        slo = {verdict.model: {"slo_kept": verdict.kept, "reason": verdict.reason} for verdict in self.verdicts()}
        return [
            row | {"input_data": self.inputs.get(str(row["model"]))} | slo[str(row["model"])] for row in self._compare()
        ]

    def _compare(self) -> list[dict[str, object]]:
        return [compare_figures(result, self.predictions.get(result.model)) for result in self.outcome.results]

    def stage_rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each model: mean milliseconds of each stage, measured and predicted."""
        rows = []
        for row in self.outcome.stages:
            predicted, measured_ms = self.predictions.get(str(row["model"])), row.get("infer_ms")
            expected_ms = None if predicted is None else predicted.infer_ms
            error = (
                (measured_ms - expected_ms) / expected_ms if isinstance(measured_ms, float) and expected_ms else None
            )
            rows.append({**row, "predicted_infer_ms": expected_ms, "infer_ms_error": error})
        return rows

    def document(self) -> list[dict[str, object]]:
        """Return `rows`, each with its stages."""
        return [{**row, "stages": stages} for row, stages in zip(self.rows(), self.stage_rows(), strict=True)]


def load(
    server: str = DEFAULT_URL,
    deployment: MapArgument | None = None,
    *,
    traffic: LoadTraffic = LoadTraffic(),  # noqa: B008 - frozen
    access: ServerAccess = ServerAccess(),  # noqa: B008 - frozen
    db: PathArgument | None = None,
    estimator: str | None = None,
    progress: ProgressCallback = say_nothing,
    note: NoteCallback = say_nothing,
) -> LoadResult:
    """Send traffic to a server, open-loop by default; return measured and predicted goodput and latency.

    Raises `InputError` when no traffic is specified, or a model, a trace or the address is wrong; `UnavailableError`
    when no server answers.

    Parameters
    ----------
    server : str
        Its address, ``http://HOST:PORT``.
    deployment : path or DeploymentMap, optional
        The server's map: rates, SLOs, predictions.
    traffic : LoadTraffic
        The map's rates for 20 s unless given.
    db : path, optional
        Kernel database of ``estimator``.
    estimator : str, optional
        Name of the estimator of the predicted times; by default the times of the map.

    Examples
    --------
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(200.0))
    >>> plan = gpuprof.place([demand], fleet="a100-40")
    >>> with gpuprof.serve(plan.deployment, gpuprof.ServeSettings(port=0, simulate=True)) as server:
    ...     seen = gpuprof.load(server.url, server.map, traffic=gpuprof.LoadTraffic(duration_s=1.0, warmup_s=0.1))
    >>> frame = seen.to_frame()
    >>> bool((frame["answered"] == frame["sent"]).all()), bool(frame["predicted_p50_ms"].notna().all())
    (True, True)
    """
    notes = NoteList(note)
    resolved = None if deployment is None else resolve_map(deployment)
    base = Path.cwd() if deployment is None else map_folder(deployment)
    if resolved is not None and not traffic.allow_changed:
        require_planned_files(locate_files(resolved, base))
    streams, settings = traffic.make_streams(resolved, base)
    target = access.reach(server)
    # A server that executes the chain itself, as Triton does with an ensemble, gets whole requests.
    streams = [replace(s, steps=()) if s.steps and target.has_model(s.model) else s for s in streams]
    data_by_model = {s.model: read_stream_data(target, s.first) for s in streams if s.data is not None}
    inputs = {model: str(data) for model, data in data_by_model.items()}
    for stream in streams:
        if stream.model in inputs:
            notes.add(f"{stream.model}: inputs from {inputs[stream.model]}")
        else:
            steps = stream.steps or (stream,)
            notes.add(*filter(None, (describe_assumed(target, s.model, s.path, s.dims) for s in steps)))
    predictions: Mapping[str, LoadPrediction] = {}
    if resolved is not None and traffic.concurrency:
        notes.add("closed loop: nothing is predicted of it, since the map is planned for rates")
    elif resolved is not None:
        timed = time_map_by(resolved, estimator, optional_path(db), base, notes.add)
        predictions = predict_load(timed, streams, settings)
    time_s = f"{settings.warmup_s:g} + {settings.duration_s:g} s"
    requests = ", ".join(
        f"{s.model} {s.concurrency} at a time" if s.concurrency else f"{s.model} {s.rate_rps:.4g}/s" for s in streams
    )
    notes.add(f"sending {requests} to {server} for {time_s}")
    # Cores of the workers, which the client must avoid; empty unless server and client run on the same machine.
    cores = worker_cores(resolved) if resolved is not None and _is_local(target.host) else frozenset()
    schedules = plan_load(target, streams, settings)
    enough = len(schedules) <= len(allowed_cores() - cores)
    with avoiding_cores(cores if enough else ()):
        if resolved is not None and cores and resolved.planned_with.host.host_cores:
            machine = MachineLoad(allowed_cores())
            time.sleep(_WATCH_S)
            notes.add(*filter(None, [machine.describe_disturbance(0.0, _BUSY_PART)]))
        with report_elapsed(progress, "sending requests", settings.warmup_s + settings.duration_s):
            outcome = run_load(target, streams, settings, schedules)
    result = LoadResult(
        outcome=outcome,
        predictions=predictions,
        inputs=inputs,
        percentiles={} if resolved is None else {name: d.percentile for name, d in resolved.traffic.items()},
        is_closed=bool(traffic.concurrency),
    )
    warnings = tuple(_list_warnings(result))
    return replace(result, notes=(*notes.all(), *warnings), warnings=warnings)


def _list_warnings(measured: LoadResult) -> Iterator[str]:
    for result in measured.outcome.results:
        if result.refused or result.failed or result.lost:
            counts = f"{result.refused} refused (503), {result.failed} failed, {result.lost} without an answer"
            yield f"{result.model}: of {result.sent} requests {counts}"
        if result.client_is_limit:
            lag_ms = result.lag_p99_ms
            yield f"{result.model}: the client sent late (p99 {lag_ms:.1f} ms): it is part of these latencies"
    if measured.outcome.disturbance is not None:
        yield f"{measured.outcome.disturbance}: requests then waited for milliseconds, which p99 shows first"


@contextmanager
def report_elapsed(progress: ProgressCallback, step: str, total_s: float) -> Iterator[None]:
    """Call ``progress`` from a background thread with the seconds since the block began, at most once a second.

    ``total_s``: expected duration; reports of longer steps stay at this value.
    """
    # No thread without a listener: its wake-ups would disturb the measurement.
    if progress is say_nothing:
        yield
        return
    began, ended, total = time.monotonic(), Event(), max(1, round(total_s))

    def report() -> None:
        while not ended.wait(1.0):
            progress(Progress(step, min(total, round(time.monotonic() - began)), total))

    progress(Progress(step, 0, total))
    thread = Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    progress(Progress(step, total, total))


def predict_load(
    deployment: DeploymentMap, streams: list[RequestStream], settings: LoadSettings
) -> dict[str, LoadPrediction]:
    """Return the simulator's predictions for the requests by model; members of a merged model get its figures.

    Called before the load starts: a prediction must not take cores from the workers.
    """
    times_s = dict(zip((stream.model for stream in streams), send_times(streams, settings), strict=True))
    until_s = settings.warmup_s + settings.duration_s
    times = {model: np.rint(NS_PER_S * at_s).astype(np.int64) for model, at_s in times_s.items() if len(at_s)}
    planned_with = deployment.planned_with
    host = planned_with.host
    options = SimulationOptions(
        until_s,
        settings.warmup_s,
        settings.seed,
        legs_ms=dict.fromkeys(deployment.models, (planned_with.overhead_ms, 0.0)),
        host=host.at(sum(map(len, times.values())) / until_s),
    )
    try:
        outcome = simulate(deployment, Trace(times, until_s).join(deployment.entries).arrivals(), options)
    finally:
        stop_compiling()  # compilation would take cores from the workers during the measurement
    outcomes = {model.model: model for model in outcome.clients}
    serving = deployment.serving | {name: name for name in deployment.chains}
    counts = {model: int((at_s >= settings.warmup_s).sum()) for model, at_s in times_s.items()}
    return {
        model: _predict_model(outcomes[serving[model]], count, settings.duration_s, host.handover_ms)
        for model, count in counts.items()
    }


def _predict_model(outcome: ModelOutcome, requests: int, seconds: float, handover_ms: float) -> LoadPrediction:
    """Return the prediction for ``requests`` requests of a model whose replicas also serve other members."""
    each = requests / outcome.requests if outcome.requests else 0.0
    service_ms = outcome.stage_mean_ms["service"]
    return LoadPrediction(
        each * outcome.in_time / seconds,
        outcome.p50_ms,
        outcome.p95_ms,
        outcome.p99_ms,
        each * outcome.missed["refused"],
        None if service_ms is None else max(0.0, service_ms - handover_ms),
    )


def _is_local(host: str) -> bool:
    """Return whether this name or address refers to this machine's loopback."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host.strip("[]"))).is_loopback
    except (OSError, ValueError):
        return host.strip("[]") == "::1"


def worker_cores(deployment: DeploymentMap) -> frozenset[int]:
    """Return the cores that the workers of a map hold if served on this machine; empty if it cannot be served here."""
    if len(deployment.nodes) != 1:
        return frozenset()
    shares = [
        (replica.sm_share_pct, replica.turns)
        for gpu in deployment.nodes[0].gpus
        if gpu.device.startswith("cpu") and not gpu.index
        for partition in gpu.partitions
        for replica in partition.replicas
    ]
    try:
        return frozenset(core for part in plan_shared_slices(shares, own_cores()) for core in part.cores)
    except InputError:
        return frozenset()
