"""Settings of a simulation: requests, serving, rescheduling and fidelity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, model_validator

from gpuprof.domain.validation import NotNegative, Positive, Seed, parse_duration
from gpuprof.errors import InputError, unknown_name
from gpuprof.pipeline.result import NoteCallback, say_nothing
from gpuprof.pipeline.settings import Settings, option

if TYPE_CHECKING:
    from gpuprof.domain.arrival_process import ArrivalProcess
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.simulator.cluster import SimulationOptions


@dataclass(frozen=True, slots=True)
class SimulatedArrivals:
    """The arrivals of each model's requests."""

    processes: Mapping[str, ArrivalProcess]
    trace_s: float | None = None  #: Duration of the trace up to its last request; None without a trace.


def _read_timeout(value: object) -> object:
    return 1000.0 * parse_duration(value, "--batch-timeout") if isinstance(value, str) else value


def _read_names(value: object) -> object:
    """Return names separated by commas; other values unchanged. Raises `InputError` for a text without names."""
    if not isinstance(value, str):
        return value
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise InputError(f"--policy names no policy but is {value!r}", "write names with commas, as in optimal,usher")
    return names


class SimulatedTraffic(Settings):
    """Requests and their arrival times.

    With a ``trace`` the rates say nothing; ``duration_s`` is by default that of the trace, or 60 s.
    """

    title: ClassVar[str] = "Traffic"

    trace: Path | None = option(None, "Trace to replay: a CSV file of time_s,model.")
    rates_rps: Mapping[str, NotNegative] = option(
        {}, "Rate as MODEL=REQUESTS_PER_S, or one of all; default: the map's.", "--rate", repeated=True
    )
    total_rps: Positive | None = option(None, "Requests per second of all models together.", hidden=True)
    rate_scale: Positive = option(1.0, "Factor on all rates.")
    arrivals: str = option(
        "poisson", "Arrival process: constant, poisson, gamma:SCV, bursts:RATIO,BURST,CALM or diurnal:PEAK,PERIOD."
    )
    duration_s: Positive = option(
        60.0, "Time in which requests arrive: 60s, 5m, 1d; default with a trace: its own.", "--duration", unit="s"
    )
    warmup_s: NotNegative = option(0.0, "Time before the measurement begins.", "--warmup", unit="s")
    seed: Seed = option(0, "Seed of the simulation.")

    @model_validator(mode="before")
    @classmethod
    def _read_rates(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read rates in the texts of the command line: ``MODEL=100`` for a model, ``100`` for all."""
        from gpuprof.simulator.load import parse_rates

        if not isinstance(values, dict) or not isinstance(texts := values.get("rates_rps"), list):
            return values
        rates, total = parse_rates(texts)
        return {**values, "rates_rps": rates, "total_rps": total}

    def read_arrivals(self, deployment: DeploymentMap, note: NoteCallback = say_nothing) -> SimulatedArrivals:
        """Return how the requests of each model of a map arrive.

        Raises
        ------
        InputError
            When a rate is of a model that the map lacks, the trace cannot be read, or both are given.
        """
        from gpuprof.simulator.load import arrivals_of_rates, arrivals_of_trace
        from gpuprof.simulator.trace import read_trace

        if self.trace is None:
            return SimulatedArrivals(
                arrivals_of_rates(deployment, self.rates_rps, self.total_rps, self.rate_scale, self.arrivals)
            )
        if self.rates_rps or self.total_rps is not None or self.rate_scale != 1.0:
            raise InputError("--trace says when requests come: --rate and --rate-scale cannot change that")
        trace = read_trace(Path(self.trace))
        gap = trace.longest_gap_s()
        if gap > max(60.0, 0.1 * trace.duration_s):
            note(f"the trace has a gap of {gap:.3g} s without any request")
        processes = arrivals_of_trace(deployment, trace)
        return SimulatedArrivals(processes, trace.span_s)

    def resolve_duration_s(self, trace_s: float | None) -> float:
        """Return how long requests arrive, in seconds.

        Raises
        ------
        InputError
            When nothing would be left to count.
        """
        seconds = self.duration_s if trace_s is None or "duration_s" in self.model_fields_set else trace_s
        if self.warmup_s >= seconds:
            raise InputError(f"--warmup must be shorter than the duration of {seconds:g} s but got {self.warmup_s:g} s")
        return seconds


class ServiceSettings(Settings):
    """Routing, batching, refusal, delays and failures."""

    title: ClassVar[str] = "Service and failures"

    routing: str = option("fastest", "Rule that picks the replica of a request: fastest or round-robin.")
    refuse: bool = option(True, "Refuse requests that cannot be answered in time, as the server does.")
    batch_timeout_ms: Annotated[NotNegative | None, BeforeValidator(_read_timeout)] = option(
        None, "Time that every batch waits to fill, such as 100ms; default: the map's.", "--batch-timeout", as_text=True
    )
    router_ms: NotNegative = option(0.0, "Time in ms that the router takes for a request.", unit="ms")
    overhead_ms: NotNegative | None = option(
        None, "Time in ms that a request spends outside router and replica; default: the map's.", unit="ms"
    )
    host_ms: NotNegative | None = option(
        None, "CPU time in ms of router and clients for a request; default: the map's.", unit="ms"
    )
    network: str = option("none", "Network between router and replicas: none, or that of Elvinger's thesis: thesis.")
    # An image of 3 × 224 × 224 in float32, and the scores of 1000 classes.
    payload_bytes: NotNegative = option(602112.0, "Size of a request on the network.")
    answer_bytes: NotNegative = option(4000.0, "Size of an answer on the network.")
    failures: tuple[str, ...] = option(
        (),
        "Failure of a node or GPU: node0@30s, node0/1@30s or node0/1@30s+10s; may be repeated.",
        "--fail",
        repeated=True,
    )

    def simulation_options(
        self, deployment: DeploymentMap, traffic: SimulatedTraffic, arrivals: SimulatedArrivals
    ) -> SimulationOptions:
        """Return the simulator's options, by default the map's own, at the rate of ``arrivals``.

        Raises
        ------
        InputError
            When a network or a failure cannot be read.
        """
        from gpuprof.rules.host_work import host_work_of_plan
        from gpuprof.simulator.cluster import SimulationOptions, parse_failure
        from gpuprof.simulator.load import expected_requests, thesis_network_ms

        seconds = traffic.resolve_duration_s(arrivals.trace_s)
        settings = deployment.planned_with
        outside_ms = settings.overhead_ms if self.overhead_ms is None else self.overhead_ms
        host = host_work_of_plan(settings)
        host = host if self.host_ms is None else replace(host, host_ms=self.host_ms, host_ms_busy=0.0)
        if self.network not in ("none", "thesis"):
            raise unknown_name("network", self.network, ["none", "thesis"])
        sizes = (self.payload_bytes, self.answer_bytes)
        to_ms, back_ms = map(thesis_network_ms, sizes) if self.network == "thesis" else (0.0, 0.0)
        return SimulationOptions(
            seconds,
            traffic.warmup_s,
            traffic.seed,
            self.routing,
            self.refuse,
            self.router_ms,
            dict.fromkeys(deployment.models, (outside_ms + to_ms, back_ms)),
            tuple(parse_failure(text, deployment) for text in self.failures),
            batch_timeout_ms=self.batch_timeout_ms,
            host=host.at(expected_requests(arrivals.processes, seconds) / seconds),
        )


class Rescheduling(Settings):
    """Rescheduling of the map for the observed rates; several ``policies`` are compared on the same load."""

    title: ClassVar[str] = "Rescheduling"

    period_s: Positive = option(
        60.0,
        "Period after which the rates seen since are placed anew: 60s; default: never.",
        "--reschedule",
        unit="s",
        unset=True,
    )
    policies: Annotated[tuple[str, ...], BeforeValidator(_read_names)] = option(
        (),
        "Policy of --reschedule; several, separated by commas, are compared; default: the map's.",
        "--policy",
        values="policies",
    )
    headroom: Positive = option(1.2, "Factor on the rates that --reschedule plans for.")
    load_s: NotNegative = option(5.0, "Time to load a model into a new replica.", "--load-time", unit="s")
    mig_s: NotNegative = option(10.0, "Time to give a GPU another MIG layout.", "--mig-time", unit="s")


class Fidelity(Settings):
    """Exactness of a simulation."""

    title: ClassVar[str] = "Fidelity"

    interference: bool = option(
        False, "Slow batches down by the neighbours that run at that moment, not by all neighbours."
    )
