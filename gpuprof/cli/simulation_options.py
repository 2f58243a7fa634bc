"""Options of ``gpuprof simulate``, in groups: what comes, how it is served, how the map follows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import say
from gpuprof.errors import InputError, unknown_name

if TYPE_CHECKING:
    from gpuprof.domain.arrival_process import ArrivalProcess
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.pipeline.rescheduling import Loop
    from gpuprof.simulator.cluster import SimulationOptions
    from gpuprof.simulator.merged_queues import MergedQueues
    from gpuprof.simulator.network import NetworkDelay
    from gpuprof.simulator.trace import Trace

#: A trace ends with its last request, which is to be simulated too.
_AFTER_THE_LAST_S = 1e-6


@dataclass(frozen=True)
class Traffic:
    """Which requests come, and when."""

    trace: Annotated[Path | None, typer.Option(help="Replay this CSV of time_s,model.")] = None
    rate: Annotated[
        list[str] | None, typer.Option(help="MODEL=REQUESTS_PER_S, or requests/s of all; else the map's own.")
    ] = None
    rate_scale: Annotated[float, typer.Option(help="Times the rates.", min=1e-6)] = 1.0
    arrivals: Annotated[
        str, typer.Option(help="constant, poisson, gamma:SCV, bursts:RATIO,BURST,CALM, diurnal:PEAK,PERIOD.")
    ] = "poisson"
    duration: Annotated[str | None, typer.Option(help="How long requests arrive: 60s, 5m, 1d.")] = None
    warmup: Annotated[str | None, typer.Option(help="Time before requests count.")] = None
    seed: Annotated[int, typer.Option(help="Same seed, same result.", min=0)] = 0

    def load(self, asked: DeploymentMap, queues: MergedQueues) -> tuple[Mapping[str, ArrivalProcess], float | None]:
        """Return how each queue's requests arrive, and how long a trace lasts in seconds (None without one).

        Raises
        ------
        InputError
            When a rate is of a model that the map lacks, the trace cannot be read, or both are given.
        """
        from gpuprof.simulator.load import arrivals_of_rates, arrivals_of_trace, parse_rates
        from gpuprof.simulator.trace import read_trace

        if self.trace is None:
            rates, total = parse_rates(self.rate or [])
            if unknown := [name for name in rates if name not in asked.models]:
                raise unknown_name("model", unknown[0], list(asked.models))
            of_queues = queues.rates(asked, rates)
            return arrivals_of_rates(queues.deployment, of_queues, total, self.rate_scale, self.arrivals), None
        if self.rate or self.rate_scale != 1.0:
            raise InputError("--trace says when requests come: --rate and --rate-scale cannot change that")
        read = read_trace(self.trace)
        _tell_gap(read)
        return arrivals_of_trace(queues.deployment, queues.trace(read)), read.duration_s + _AFTER_THE_LAST_S

    def span_s(self, trace_s: float | None) -> tuple[float, float]:
        """Return how long requests arrive and how long the first of them do not count, in seconds.

        Raises
        ------
        InputError
            When nothing would be left to count.
        """
        from gpuprof.domain.duration import parse_duration

        seconds = parse_duration(self.duration, "--duration") if self.duration else trace_s or 60.0
        warmup_s = parse_duration(self.warmup, "--warmup") if self.warmup else 0.0
        if warmup_s >= seconds:
            raise InputError(f"--warmup must be shorter than the duration of {seconds:g} s but got {self.warmup}")
        return seconds, warmup_s


@dataclass(frozen=True)
class Served:
    """How requests are routed, batched, refused and delayed, and what fails meanwhile."""

    routing: Annotated[str, typer.Option(help="Choice among replicas: fastest or round-robin.")] = "fastest"
    refuse: Annotated[bool, typer.Option(help="Refuse what cannot be answered in time, as the server does.")] = True
    batch_timeout: Annotated[
        str | None,
        typer.Option(help="Every batch waits so long to fill, whatever its SLO: 100ms; else as the map says."),
    ] = None
    router_ms: Annotated[float, typer.Option(help="Time of the router for a request.", min=0.0)] = 0.0
    overhead_ms: Annotated[
        float | None, typer.Option(help="Time of a request outside router and replica; else the map's own.", min=0.0)
    ] = None
    host_ms: Annotated[
        float | None,
        typer.Option(help="CPU time of router and clients for a request; else the map's own.", min=0.0),
    ] = None
    network: Annotated[str, typer.Option(help="none, thesis, or a CSV of payload_bytes,latency_ms to fit.")] = "none"
    payload_bytes: Annotated[float, typer.Option(help="Size of a request on the network.", min=0.0)] = 602112.0
    answer_bytes: Annotated[float, typer.Option(help="Size of an answer on the network.", min=0.0)] = 4000.0
    fail: Annotated[
        list[str] | None, typer.Option(help="node0@30s, node0/1@30s or node0/1@30s+10s; may be repeated.")
    ] = None

    def options(
        self, deployment: DeploymentMap, traffic: Traffic, load: Mapping[str, ArrivalProcess], trace_s: float | None
    ) -> SimulationOptions:
        """Return what the simulator is told of them; what is not given is the map's own, at the rate of ``load``.

        Raises
        ------
        InputError
            When a duration, a network or a failure cannot be read.
        """
        from gpuprof.domain.duration import parse_duration
        from gpuprof.rules.host_work import recorded_work
        from gpuprof.simulator.cluster import SimulationOptions
        from gpuprof.simulator.failures import parse_failure
        from gpuprof.simulator.sampling import expected_requests

        seconds, warmup_s = traffic.span_s(trace_s)
        planned_with = deployment.planned_with
        outside_ms = planned_with.overhead_ms if self.overhead_ms is None else self.overhead_ms
        host = recorded_work(planned_with)
        host = host if self.host_ms is None else replace(host, host_ms=self.host_ms, host_ms_busy=0.0)
        to_ms, back_ms = (_network(self.network).ms(size) for size in (self.payload_bytes, self.answer_bytes))
        return SimulationOptions(
            seconds,
            warmup_s,
            traffic.seed,
            self.routing,
            self.refuse,
            self.router_ms,
            dict.fromkeys(deployment.models, (outside_ms + to_ms, back_ms)),
            tuple(parse_failure(text, deployment) for text in self.fail or []),
            batch_timeout_ms=(
                None if self.batch_timeout is None else 1000.0 * parse_duration(self.batch_timeout, "--batch-timeout")
            ),
            host=host.at(expected_requests(load, seconds) / seconds),
        )


@dataclass(frozen=True)
class Following:
    """How the map follows the load."""

    every: Annotated[
        str | None, typer.Option("--reschedule", help="PlacedInstance anew this often, for the rates seen since: 60s.")
    ] = None
    policy: Annotated[
        str | None, typer.Option(help="Policy of --reschedule, else the map's own; several, with commas, are compared.")
    ] = None
    headroom: Annotated[float, typer.Option(help="Times the rates that --reschedule sees.", min=0.1)] = 1.2
    load_time: Annotated[str, typer.Option(help="Of a model into a new replica.")] = "5s"
    mig_time: Annotated[str, typer.Option(help="Of giving a GPU another MIG layout.")] = "10s"
    db: Annotated[Path | None, typer.Option(help="Kernel database, for --reschedule and --interference.")] = None

    def __post_init__(self) -> None:
        if self.policy is not None and self.every is None:
            raise InputError("--policy says how to reschedule", "add --reschedule 60s")

    def loop(self) -> Loop | None:
        """Return how often and with which costs the map is placed anew; None: never.

        Raises
        ------
        InputError
            When a duration cannot be read.
        """
        from gpuprof.domain.duration import parse_duration
        from gpuprof.pipeline.rescheduling import Loop
        from gpuprof.simulator.reschedule import MoveCosts

        if self.every is None:
            return None
        costs = MoveCosts(parse_duration(self.load_time, "--load-time"), parse_duration(self.mig_time, "--mig-time"))
        return Loop(parse_duration(self.every, "--reschedule"), self.headroom, costs, self.db)


@dataclass(frozen=True)
class Fidelity:
    """What is simulated exactly, and what is approximated."""

    interference: Annotated[
        bool, typer.Option("--interference", help="Slow batches by what really runs beside, not by all neighbours.")
    ] = False
    sample: Annotated[
        int | None, typer.Option(help="Approximate: so many replicas of a model; 0: never approximate.", min=0)
    ] = None


def _tell_gap(trace: Trace) -> None:
    gap = trace.longest_gap_s()
    if gap > max(60.0, 0.1 * trace.duration_s):
        say(f"the trace has a gap of {gap:.3g} s without any request")


def _network(text: str) -> NetworkDelay:
    from gpuprof.simulator.network import LOCAL, THESIS, read_measurements

    return {"none": LOCAL, "thesis": THESIS}.get(text) or read_measurements(Path(text))
