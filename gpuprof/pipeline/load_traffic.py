"""Traffic of ``load``: the map's rates, given rates, or the requests of a trace; and access to the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BeforeValidator, Field

from gpuprof.domain.arrival_process import NS_PER_S
from gpuprof.domain.named_values import collect_distinct
from gpuprof.domain.validation import Count, NotNegative, Positive, Seed
from gpuprof.errors import InputError, unknown_name
from gpuprof.pipeline.settings import DataFiles, Dims, Settings, option

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap, RequestedModel
    from gpuprof.load.load import LoadSettings, RequestStream
    from gpuprof.load.target import Target
    from gpuprof.simulator.trace import Trace

#: Extra time after a trace's last request, so that the trace includes this request.
AFTER_THE_LAST_S = 1e-6
#: A rate below the capability of no machine.
_Rate = Annotated[float, Field(gt=0.0, lt=1e7)]
#: Each concurrent request needs a connection, and systems often allow a process 1024 open files.
_Concurrency = Annotated[int, Field(ge=1, le=800)]
_Duration = Annotated[float, Field(ge=0.1)]


def _read_rates(value: object) -> object:
    from gpuprof.simulator.load import parse_rates

    if not isinstance(value, list):
        return value
    rates, alone = parse_rates(value)
    if alone is not None:
        raise InputError(f"cannot read the rate {alone:g}", "write MODEL=REQUESTS_PER_S, such as resnet50=20")
    return rates


def _read_concurrency(value: object) -> object:
    return collect_distinct("the concurrency", map(_parse_concurrency, value)) if isinstance(value, list) else value


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
    rates_rps: Annotated[Mapping[str, _Rate], BeforeValidator(_read_rates)] = option(
        {}, "Rate as MODEL=REQUESTS_PER_S in place of the map's; may be repeated.", "--rate", repeated=True
    )
    rate_scale: Positive = option(1.0, "Factor on all rates.")
    trace: Path | None = option(None, "Trace to replay: a CSV file of time_s,model.")
    arrivals: str = option("poisson", "Arrival process: poisson, gamma or constant.")
    scv: Positive = option(4.0, "Squared coefficient of variation of gamma arrivals; Poisson has 1.")
    concurrency: Annotated[Mapping[str, _Concurrency], BeforeValidator(_read_concurrency)] = option(
        {},
        "Closed loop: requests on their way at any time, of each model; in place of rates. May be repeated.",
        metavar="[MODEL=]REQUESTS",
        repeated=True,
    )
    warmup_s: NotNegative = option(2.0, "Time before the measured time.", "--warmup", unit="s")
    clients: Count | None = option(None, "Client processes; default: as many as needed.")
    allow_changed: bool = option(False, "Accept model files that changed since the map was planned.")
    seed: Seed = option(0, "Seed of the traffic.")

    def make_streams(self, deployment: DeploymentMap | None, folder: Path) -> tuple[list[RequestStream], LoadSettings]:
        """Return the request stream of each model of the map, or without a map of each named model, and the settings.

        Raises
        ------
        InputError
            When no traffic is specified, a model is not in the map, a trace cannot be read, or both a trace and rates
            are given.
        """
        from gpuprof.load.load import ARRIVALS
        from gpuprof.simulator.trace import read_trace

        if self.arrivals not in ARRIVALS:
            raise unknown_name("kind of arrivals", self.arrivals, list(ARRIVALS))
        if self.concurrency:
            return self._fill(self._make_closed(deployment, folder)), self._make_settings(self.duration_s)
        if self.trace is None:
            streams = make_rate_streams(deployment, folder, self.rates_rps, self.rate_scale)
            return self._fill(streams), self._make_settings(self.duration_s)
        if self.rates_rps or self.rate_scale != 1.0:
            raise InputError("--trace says when requests come: --rate and --rate-scale cannot change that")
        recorded = read_trace(Path(self.trace))
        whole_s = recorded.duration_s + AFTER_THE_LAST_S
        streams = make_trace_streams(deployment, folder, recorded)
        return self._fill(streams), self._make_settings(min(self.duration_s or whole_s, whole_s))

    def _make_closed(self, deployment: DeploymentMap | None, folder: Path) -> list[RequestStream]:
        """Return the streams of a closed loop: for each model the number of concurrent requests."""
        from gpuprof.load.load import RequestStream

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

    def _make_settings(self, duration_s: float | None) -> LoadSettings:
        from gpuprof.load.load import LoadSettings

        return LoadSettings(
            duration_s or LoadSettings().duration_s, self.warmup_s, self.seed, self.arrivals, self.scv, self.clients
        )


class ServerAccess(Settings):
    """Authentication and trust of a client."""

    title: ClassVar[str] = "Authentication and TLS"

    token_file: Path | None = option(None, "File with the server's token; default: GPUPROF_TOKEN.")
    ca_file: Path | None = option(None, "Certificate (PEM) to trust on https; default: those of the system.")

    def reach(self, address: str) -> Target:
        """Return the server at ``address`` after a successful request.

        Raises
        ------
        InputError
            When the address or a file is invalid.
        UnavailableError
            When no server answers there.
        """
        from gpuprof.load.target import Target
        from gpuprof.serving.transport.security import read_token

        server = Target.parse(address, read_token(self.token_file), self.ca_file)
        server.get("/v2")  # fail before the predictions when the server is down
        return server


def size_streams(streams: Sequence[RequestStream], dims: Mapping[str, int]) -> list[RequestStream]:
    """Return the streams with ``dims`` in place of their own sizes, each with those of its model's dimensions.

    Raises `InputError` when no model is known to have a given dimension.
    """
    from gpuprof.domain.sizes import check_size, describe_sizes, require_dimensions
    from gpuprof.graph.load import read_free_dims

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
    from gpuprof.load.load import RequestStream

    if deployment is None:
        if not rates_rps:
            raise InputError(
                "nothing says what to send", "give --map map.json, --rate MODEL=REQUESTS_PER_S, or --trace"
            )
        return [RequestStream(model, scale * rate, float("inf")) for model, rate in rates_rps.items()]
    traffic, entries = deployment.traffic, deployment.entries
    if unknown := [model for model in rates_rps if model not in traffic]:
        raise unknown_name("model", unknown[0], list(traffic))
    placed = {replica.model for *_, replica in deployment.places()}

    def make_stream(name: str, demand: RequestedModel) -> RequestStream:
        chain = deployment.chains.get(name)
        return RequestStream(
            name,
            scale * rates_rps.get(name, demand.rate_rps),
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
    from gpuprof.load.load import RequestStream
    from gpuprof.simulator.load import name_requests

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
