"""Options of ``gpuprof simulate``, in groups: what comes, how it is served, how the map follows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.duration_option import duration_option
from gpuprof.cli.option_groups import fill_settings
from gpuprof.cli.shared_options import ArrivalsOption, RateScaleOption, ReplayedTraceOption, RoutingOption
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.pipeline.simulation_settings import Rescheduling, ServiceSettings, SimulatedTraffic


@dataclass(frozen=True)
class ArrivalOptions:
    """Which requests come, and when."""

    trace: ReplayedTraceOption = None
    rate: Annotated[
        list[str] | None, typer.Option(help="Rate as MODEL=REQUESTS_PER_S, or one of all; default: the map's.")
    ] = None
    rate_scale: RateScaleOption = 1.0
    arrivals: ArrivalsOption = "poisson"
    duration: Annotated[str | None, typer.Option(help="Time in which requests arrive: 60s, 5m, 1d.")] = None
    warmup: Annotated[str | None, typer.Option(help="Time before requests count.")] = None
    seed: Annotated[int, typer.Option(help="Seed of the simulation.", min=0)] = 0

    def simulated_traffic(self) -> SimulatedTraffic:
        """Return the traffic as `gpuprof.simulate` takes it.

        Raises `InputError` when a rate or a duration cannot be read.
        """
        from gpuprof.domain.duration import parse_duration
        from gpuprof.pipeline.simulation_settings import SimulatedTraffic
        from gpuprof.simulator.load import parse_rates

        rates, total = parse_rates(self.rate or [])
        return fill_settings(
            SimulatedTraffic,
            self,
            rates_rps=rates,
            total_rps=total,
            duration_s=parse_duration(self.duration, "--duration") if self.duration else None,
            warmup_s=parse_duration(self.warmup, "--warmup", least_s=0.0) if self.warmup else 0.0,
        )


@dataclass(frozen=True)
class ServiceOptions:
    """How requests are routed, batched, refused and delayed, and what fails meanwhile."""

    routing: RoutingOption = "fastest"
    refuse: Annotated[bool, typer.Option(help="Refuse what cannot be answered in time, as the server does.")] = True
    batch_timeout: Annotated[
        str | None, typer.Option(help="Time that every batch waits to fill, such as 100ms; default: the map's.")
    ] = None
    router_ms: Annotated[
        float, duration_option("--router-ms", "Time in ms that the router takes for a request.", least_s=0.0, unit="ms")
    ] = 0.0
    overhead_ms: Annotated[
        float | None,
        duration_option(
            "--overhead-ms",
            "Time in ms that a request spends outside router and replica; default: the map's.",
            least_s=0.0,
            unit="ms",
        ),
    ] = None
    host_ms: Annotated[
        float | None,
        duration_option(
            "--host-ms",
            "CPU time in ms of router and clients for a request; default: the map's.",
            least_s=0.0,
            unit="ms",
        ),
    ] = None
    network: Annotated[
        str, typer.Option(help="Network model: none, thesis, or a CSV file of payload_bytes,latency_ms to fit.")
    ] = "none"
    # 602112: an image of 3 × 224 × 224 in FP32.
    payload_bytes: Annotated[float, typer.Option(help="Size of a request on the network.", min=0.0)] = 602112.0
    answer_bytes: Annotated[float, typer.Option(help="Size of an answer on the network.", min=0.0)] = 4000.0
    fail: Annotated[
        list[str] | None,
        typer.Option(help="Failure of a node or GPU: node0@30s, node0/1@30s or node0/1@30s+10s; may be repeated."),
    ] = None

    def service_settings(self) -> ServiceSettings:
        """Return them as `gpuprof.simulate` takes them. Raises `InputError` when a duration cannot be read."""
        from gpuprof.domain.duration import parse_duration
        from gpuprof.pipeline.simulation_settings import ServiceSettings

        timeout = self.batch_timeout
        return fill_settings(
            ServiceSettings,
            self,
            batch_timeout_ms=None if timeout is None else 1000.0 * parse_duration(timeout, "--batch-timeout"),
            failures=tuple(self.fail or ()),
        )


@dataclass(frozen=True)
class RescheduleOptions:
    """How the map follows the load."""

    every: Annotated[
        str | None, typer.Option("--reschedule", help="Period after which the rates seen since are placed anew: 60s.")
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(help="Policy of --reschedule; several, separated by commas, are compared; default: the map's."),
    ] = None
    headroom: Annotated[float, typer.Option(help="Factor on the rates that --reschedule plans for.", min=0.1)] = 1.2
    load_time: Annotated[str, typer.Option(help="Time to load a model into a new replica.")] = "5s"
    mig_time: Annotated[str, typer.Option(help="Time to give a GPU another MIG layout.")] = "10s"
    db: Annotated[
        Path | None, typer.Option(help="Kernel database, for --reschedule, --interference and --estimator.")
    ] = None

    def __post_init__(self) -> None:
        if self.policy is not None and self.every is None:
            raise InputError("--policy says how to reschedule", "add --reschedule 60s")

    def rescheduling(self) -> Rescheduling | None:
        """Return how often and with which costs models are placed again; None: never.

        Raises `InputError` when a duration cannot be read, or no policy is named where some should be.
        """
        from gpuprof.domain.duration import parse_duration
        from gpuprof.pipeline.simulation_settings import Rescheduling

        if self.every is None:
            return None
        names = [name.strip() for name in (self.policy or "").split(",") if name.strip()]
        if self.policy is not None and not names:
            raise InputError(
                f"--policy names no policy but is {self.policy!r}", "write names with commas, as in optimal,usher"
            )
        return Rescheduling(
            period_s=parse_duration(self.every, "--reschedule"),
            policies=names,
            headroom=self.headroom,
            load_s=parse_duration(self.load_time, "--load-time"),
            mig_s=parse_duration(self.mig_time, "--mig-time"),
        )


@dataclass(frozen=True)
class FidelityOptions:
    """What is simulated exactly, and what is approximated."""

    interference: Annotated[
        bool,
        typer.Option(
            "--interference", help="Slow batches down by what runs beside them at that moment, not by all neighbours."
        ),
    ] = False
    estimator: Annotated[str | None, typer.Option(help="Take the times of this estimator, not those of the map.")] = (
        None
    )
    sample: Annotated[
        int | None,
        typer.Option(help="Replicas of a model that are simulated, for all of them; 0 simulates all.", min=0),
    ] = None
