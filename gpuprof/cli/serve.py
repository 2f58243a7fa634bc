"""``gpuprof serve``: run a deployment map on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import say
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.deployment import DeploymentMap
    from gpuprof.serving.adapt import AdaptSettings

DEFAULT_PORT = 8000


def serve(
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map, as gpuprof place writes it.")] = Path(
        "map.json"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on; loopback unless said otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port; 0: any that is free.", min=0, max=65535)] = DEFAULT_PORT,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port too; 0: any that is free.", min=0, max=65535)] = None,
    routing: Annotated[str, typer.Option(help="Choice among replicas: fastest or round-robin.")] = "fastest",
    node: Annotated[str | None, typer.Option(help="Which node of the map this machine is.")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Compute nothing; batches take the time that the map predicts.")
    ] = False,
    buffer_mb: Annotated[int, typer.Option(help="Memory for all tensors on their way, in MiB.", min=1)] = 1024,
    max_body_mb: Annotated[int, typer.Option(help="Largest inference request, in MiB.", min=1)] = 64,
    hang_s: Annotated[float, typer.Option(help="A worker silent for so long is replaced.", min=0.1)] = 5.0,
    drain_s: Annotated[float, typer.Option(help="Time for the last answers after Ctrl-C.", min=0.0)] = 30.0,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Keep standbys with a larger share, for models whose p99 passes its SLO.")
    ] = False,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Plan the map anew when rates or latencies leave what it was planned for.")
    ] = False,
    adapt_period: Annotated[float, typer.Option(help="Seconds over which --adapt measures.", min=0.1)] = 5.0,
    adapt_output: Annotated[
        Path | None, typer.Option(help="Where --adapt writes its maps; MAP.adapted.json unless given.")
    ] = None,
    db: Annotated[Path | None, typer.Option(help="Kernel database, for --adapt.")] = None,
    engine: Annotated[
        str,
        typer.Option(help="Where the workers run: local, or ray: on the nodes of a Ray cluster that the map names."),
    ] = "local",
    ray_address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="The Ray cluster; the one of this machine unless given.")
    ] = None,
    apply_mig: Annotated[
        bool, typer.Option("--apply-mig", help="Cut GPUs into the map's MIG instances; put them back in the end.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must send; or GPUPROF_TOKEN.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM): serve https and grpcs.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in without a token or without TLS.")
    ] = False,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send OpenTelemetry traces to this collector, http://HOST:4318.")
    ] = None,
    otlp_sample: Annotated[float, typer.Option(help="Part of the requests to trace.", min=0.0, max=1.0)] = 1.0,
    log: Annotated[str, typer.Option(help="Form of the log on stderr: text or json.")] = "text",
) -> None:
    """Serve the models of MAP over HTTP (Open Inference Protocol v2) until Ctrl-C, then answer what is left."""
    from gpuprof.routing import routing_rule
    from gpuprof.serving.engines import RAY, chosen_engine
    from gpuprof.serving.logs import configure
    from gpuprof.serving.planner import MapSource, Planner
    from gpuprof.serving.security import check_exposure, server_security
    from gpuprof.serving.server import ServerSettings, run_server
    from gpuprof.serving.shadow_plan import SHADOW_PCT
    from gpuprof.serving.tracing import otlp_tracer

    if buffer_mb < max_body_mb:
        raise InputError(f"--buffer-mb must be at least --max-body-mb but got {buffer_mb} and {max_body_mb}")
    routing_rule(routing)
    configure(log)
    group = f"serve-{os.getpid()}"
    make_engine = chosen_engine(engine, ray_address, insecure)
    source = MapSource.read(map_file)
    shadow_pct = SHADOW_PCT if shadow else 0.0
    planner = Planner(group, node, simulate, shadow_pct, cluster=engine == RAY, apply_mig=apply_mig)
    security = server_security(token_file, tls_cert, tls_key)
    check_exposure(host, security, insecure)
    settings = ServerSettings(
        host=host,
        port=port,
        grpc_port=grpc_port,
        routing=routing,
        buffer_bytes=buffer_mb << 20,
        max_body_bytes=max_body_mb << 20,
        hang_s=hang_s,
        drain_s=drain_s,
        shadow=shadow,
        tracer=None if otlp is None else otlp_tracer(otlp, otlp_sample),
        adapt=_adapting(source.deployment, map_file, adapt_output, db, node, adapt_period, simulate) if adapt else None,
        security=security,
    )
    started = time.monotonic()

    def ready(url: str, models: int, workers: int) -> None:
        took_s = time.monotonic() - started
        typer.echo(f"serving {models} model(s) with {workers} worker(s) on {url} (ready in {took_s:.1f} s)")

    run_server(source, planner, settings, ready, make_engine)
    say("drained")


def _adapting(
    deployment: DeploymentMap,
    map_file: Path,
    output: Path | None,
    db: Path | None,
    node: str | None,
    period_s: float,
    simulate: bool,
) -> AdaptSettings:
    from gpuprof.cli.adapting import MapReplanner, check_adaptable
    from gpuprof.serving.adapt import AdaptSettings

    check_adaptable(deployment, db, node)
    replan = MapReplanner(map_file.absolute().parent, db, more_devices=simulate)
    return AdaptSettings(replan, output or map_file.with_suffix(".adapted.json"), period_s=period_s)
