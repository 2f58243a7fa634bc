"""``gpuprof serve``: run a deployment map on this machine."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import say, say_note
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.serving.change.adapt import AdaptSettings
    from gpuprof.serving.plan.planner import MapSource
    from gpuprof.serving.transport.security import Security

DEFAULT_PORT = 8000


@dataclass(frozen=True)
class Listening:
    """Where the server is reached, and by which rule it routes."""

    host: Annotated[str, typer.Option(help="Address to listen on; loopback unless said otherwise.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="HTTP port; 0: any that is free.", min=0, max=65535)] = DEFAULT_PORT
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port too; 0: any that is free.", min=0, max=65535)] = None
    routing: Annotated[str, typer.Option(help="Choice among replicas: fastest or round-robin.")] = "fastest"


@dataclass(frozen=True)
class Workers:
    """Which part of the map is served, and by what."""

    node: Annotated[str | None, typer.Option(help="Which node of the map this machine is.")] = None
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Compute nothing; batches take the time that the map predicts.")
    ] = False
    engine: Annotated[
        str,
        typer.Option(help="Where the workers run: local, or ray: on the nodes of a Ray cluster that the map names."),
    ] = "local"
    ray_address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="The Ray cluster; the one of this machine unless given.")
    ] = None
    apply_mig: Annotated[
        bool, typer.Option("--apply-mig", help="Cut GPUs into the map's MIG instances; put them back in the end.")
    ] = False


@dataclass(frozen=True)
class Limits:
    """How much memory and time requests and workers may take."""

    buffer_mb: Annotated[int, typer.Option(help="Memory for all tensors on their way, in MiB.", min=1)] = 1024
    max_body_mb: Annotated[int, typer.Option(help="Largest inference request, in MiB.", min=1)] = 64
    hang_s: Annotated[float, typer.Option(help="A worker silent for so long is replaced.", min=0.1)] = 5.0
    drain_s: Annotated[float, typer.Option(help="Time for the last answers after Ctrl-C.", min=0.0)] = 30.0
    connections_per_peer: Annotated[int, typer.Option(help="HTTP connections that one address may have.", min=1)] = 2048

    def __post_init__(self) -> None:
        if self.buffer_mb < self.max_body_mb:
            raise InputError(
                f"--buffer-mb must be at least --max-body-mb but got {self.buffer_mb} and {self.max_body_mb}"
            )


@dataclass(frozen=True)
class Following:
    """How the server follows its load."""

    shadow: Annotated[
        bool, typer.Option("--shadow", help="Keep standbys with a larger share, for models whose p99 passes its SLO.")
    ] = False
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Plan the map anew when rates or latencies leave what it was planned for.")
    ] = False
    adapt_period: Annotated[float, typer.Option(help="Seconds over which --adapt measures.", min=0.1)] = 5.0
    adapt_output: Annotated[
        Path | None, typer.Option(help="Where --adapt writes its maps; MAP.adapted.json unless given.")
    ] = None
    db: Annotated[Path | None, typer.Option(help="Kernel database, for --adapt.")] = None

    def settings(self, source: MapSource, map_file: Path, workers: Workers) -> AdaptSettings | None:
        """Return when and how the map is planned anew; None: never.

        Raises
        ------
        InputError
            When it could not be.
        """
        from gpuprof.pipeline.adaptation import MapReplanner, check_adaptable
        from gpuprof.serving.change.adapt import AdaptSettings

        if not self.adapt:
            return None
        check_adaptable(source.deployment, self.db, workers.node, say_note)
        replan = MapReplanner(map_file.absolute().parent, self.db, workers.simulate, source.deployment)
        output = self.adapt_output or map_file.with_suffix(".adapted.json")
        return AdaptSettings(replan, output, period_s=self.adapt_period)


@dataclass(frozen=True)
class Guarding:
    """What clients must know and are shown."""

    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must send; or GPUPROF_TOKEN.")
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM): serve https and grpcs.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in without a token or without TLS.")
    ] = False

    def security(self, host: str) -> Security:
        """Return it, for a server that listens on ``host``.

        Raises
        ------
        InputError
            When a file is not what it should be, or other machines could come in without.
        """
        from gpuprof.serving.transport.security import check_exposure, server_security

        security = server_security(self.token_file, self.tls_cert, self.tls_key)
        check_exposure(host, security, self.insecure)
        return security


@dataclass(frozen=True)
class Telling:
    """What the server tells of itself."""

    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send OpenTelemetry traces to this collector, http://HOST:4318.")
    ] = None
    otlp_sample: Annotated[float, typer.Option(help="Part of the requests to trace.", min=0.0, max=1.0)] = 1.0
    log: Annotated[str, typer.Option(help="Form of the log on stderr: text or json.")] = "text"


@with_groups
def serve(
    listening: Listening,
    workers: Workers,
    limits: Limits,
    following: Following,
    guarding: Guarding,
    telling: Telling,
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map, as gpuprof place writes it.")] = Path(
        "map.json"
    ),
) -> None:
    """Serve the models of MAP over HTTP (Open Inference Protocol v2) until Ctrl-C, then answer what is left."""
    from gpuprof.rules.routing import routing_rule
    from gpuprof.serving.engines.choice import RAY, chosen_engine
    from gpuprof.serving.plan.planner import MapSource, Planner
    from gpuprof.serving.plan.shadow_plan import SHADOW_PCT
    from gpuprof.serving.server import ServerSettings, run_server
    from gpuprof.serving.watch.logs import configure
    from gpuprof.serving.watch.tracing import otlp_tracer

    routing_rule(listening.routing)
    configure(telling.log)
    make_engine = chosen_engine(workers.engine, workers.ray_address, guarding.insecure)
    source = MapSource.read(map_file)
    planner = Planner(
        f"serve-{os.getpid()}",
        workers.node,
        workers.simulate,
        SHADOW_PCT if following.shadow else 0.0,
        cluster=workers.engine == RAY,
        apply_mig=workers.apply_mig,
    )
    settings = ServerSettings(
        host=listening.host,
        port=listening.port,
        grpc_port=listening.grpc_port,
        routing=listening.routing,
        buffer_bytes=limits.buffer_mb << 20,
        max_body_bytes=limits.max_body_mb << 20,
        hang_s=limits.hang_s,
        drain_s=limits.drain_s,
        connections_per_peer=limits.connections_per_peer,
        shadow=following.shadow,
        security=guarding.security(listening.host),
        tracer=None if telling.otlp is None else otlp_tracer(telling.otlp, telling.otlp_sample),
        adapt=following.settings(source, map_file, workers),
    )
    started = time.monotonic()

    def ready(url: str, models: int, workers: int) -> None:
        took_s = time.monotonic() - started
        typer.echo(f"serving {models} model(s) with {workers} worker(s) on {url} (ready in {took_s:.1f} s)")

    run_server(source, planner, settings, ready, make_engine)
    say("drained")
