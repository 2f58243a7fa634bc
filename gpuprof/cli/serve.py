"""``gpuprof serve``: run a deployment map on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.duration_option import duration_option
from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import say, say_note
from gpuprof.cli.shared_options import RayAddressOption, RoutingOption
from gpuprof.domain.plural import count_of

DEFAULT_PORT = 8000
#: Options whose names lack the unit that settings have in theirs.
_NAMES = {"adapt_period": "adapt_period_s"}


@dataclass(frozen=True)
class ListenOptions:
    """Where the server is reached, and by which rule it routes."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="HTTP port; 0 takes any free one.", min=0, max=65535)] = DEFAULT_PORT
    grpc_port: Annotated[
        int | None, typer.Option(help="gRPC port; 0 takes any free one; default: no gRPC.", min=0, max=65535)
    ] = None
    routing: RoutingOption = "fastest"


@dataclass(frozen=True)
class WorkerOptions:
    """Which part of the map is served, and by what."""

    node: Annotated[str | None, typer.Option(help="Node of the map that this machine is.")] = None
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Compute nothing; batches take the time that the map predicts.")
    ] = False
    engine: Annotated[
        str, typer.Option(help="Place of the workers: local, or ray for the nodes of a Ray cluster that the map names.")
    ] = "local"
    ray_address: RayAddressOption = None
    apply_mig: Annotated[
        bool,
        typer.Option(
            "--apply-mig", help="Cut GPUs into the map's MIG instances, and put the old layout back at the end."
        ),
    ] = False
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Serve model files that changed since the map was planned.")
    ] = False


@dataclass(frozen=True)
class LimitOptions:
    """How much memory and time requests and workers may take."""

    buffer_mb: Annotated[
        int, typer.Option(help="Memory in MiB for the tensors of all requests in progress.", min=1)
    ] = 1024
    max_body_mb: Annotated[int, typer.Option(help="Largest inference request, in MiB.", min=1)] = 64
    hang_s: Annotated[
        float, duration_option("--hang-s", "Time after which a silent worker is replaced.", least_s=0.1)
    ] = 5.0
    drain_s: Annotated[float, duration_option("--drain-s", "Time for the last answers after Ctrl-C.", least_s=0.0)] = (
        30.0
    )
    max_connections: Annotated[int, typer.Option(help="Most connections of clients.", min=1)] = 16_384


@dataclass(frozen=True)
class AdaptOptions:
    """How the server follows its load."""

    shadow: Annotated[
        bool, typer.Option("--shadow", help="Keep standbys with a larger share, for models whose p99 passes its SLO.")
    ] = False
    adapt: Annotated[
        bool,
        typer.Option("--adapt", help="Plan a new map when rates or latencies leave what this one was planned for."),
    ] = False
    adapt_period: Annotated[
        float, duration_option("--adapt-period", "Time over which --adapt measures.", least_s=0.1)
    ] = 5.0
    adapt_output: Annotated[
        Path | None, typer.Option(help="File for the maps of --adapt; default: MAP.adapted.json.")
    ] = None
    db: Annotated[Path | None, typer.Option(help="Kernel database, for --adapt.")] = None
    estimator: Annotated[
        str | None, typer.Option(help="Estimator to plan anew with, for --adapt; default: the map's.")
    ] = None


@dataclass(frozen=True)
class SecurityOptions:
    """Authentication, TLS, and the edge (Envoy) that other machines come through."""

    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must send; default: GPUPROF_TOKEN.")
    ] = None
    public: Annotated[
        bool,
        typer.Option("--public", help="Listen on every address, behind the edge; needs a token and TLS."),
    ] = False
    envoy: Annotated[
        Path | None, typer.Option(help="Envoy binary, for gRPC, TLS and --public; default: that of the extra edge.")
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM), to serve https and grpcs.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in without a token or without TLS.")
    ] = False


@dataclass(frozen=True)
class TelemetryOptions:
    """What the server tells of itself."""

    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send OpenTelemetry traces to this collector, http://HOST:4318.")
    ] = None
    otlp_sample: Annotated[float, typer.Option(help="Fraction of the requests to trace.", min=0.0, max=1.0)] = 1.0
    log: Annotated[str, typer.Option(help="Form of the log on stderr: text or json.")] = "text"


@with_groups
def serve(
    listening: ListenOptions,
    workers: WorkerOptions,
    limits: LimitOptions,
    following: AdaptOptions,
    guarding: SecurityOptions,
    telling: TelemetryOptions,
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map, as gpuprof place writes it.")] = Path(
        "map.json"
    ),
) -> None:
    """Serve the models of MAP over HTTP (Open Inference Protocol v2) until Ctrl-C, then answer what is left."""
    from gpuprof.pipeline.serve import run_map_server
    from gpuprof.pipeline.serve_settings import ServeSettings

    groups = (listening, workers, limits, following, guarding, telling)
    settings = ServeSettings(
        **{_NAMES.get(name, name): value for group in groups for name, value in vars(group).items()}
    )
    started = time.monotonic()

    def ready(url: str, models: int, workers: int) -> None:
        took_s = time.monotonic() - started
        typer.echo(
            f"serving {count_of(models, 'model')} with {count_of(workers, 'worker')} on {url} (ready in {took_s:.1f} s)"
        )

    run_map_server(map_file, settings, ready, say_note)
    say("drained")
