"""Verbs of the server: ``serve`` and ``apply``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import gpuprof
from gpuprof.cli.output import Format, print_rows, say, say_note
from gpuprof.domain.plural import count_of
from gpuprof.domain.table import make_columns
from gpuprof.pipeline.serve import run_map_server


def serve(
    settings: gpuprof.ServeSettings,
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map, as gpuprof place writes it.")] = Path(
        "map.json"
    ),
) -> None:
    """Serve the models of MAP over HTTP (Open Inference Protocol v2) until Ctrl-C; answer all pending requests."""
    started = time.monotonic()

    def ready(url: str, models: int, workers: int) -> None:
        took_s = time.monotonic() - started
        typer.echo(
            f"serving {count_of(models, 'model')} with {count_of(workers, 'worker')} on {url} (ready in {took_s:.1f} s)"
        )

    run_map_server(map_file, settings, ready, say_note)
    say("drained")


_CHANGES = make_columns("replica change reason")


def apply(
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Map to serve from now on.")],
    port: Annotated[
        int, typer.Option(help="HTTP port of the server.", min=1, max=65535)
    ] = gpuprof.ServeSettings().port,
    chosen: Format = Format.TABLE,
) -> None:
    """Move the server on this machine to MAP; only changed replicas are restarted, and no request is lost."""
    print_rows(gpuprof.apply(map_file, port=port).rows(), _CHANGES, chosen)
