"""``gpuprof serve``: run a deployment map on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.output import say, say_note
from gpuprof.domain.plural import count_of
from gpuprof.pipeline.serve import ServeSettings


def serve(
    settings: ServeSettings,
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map, as gpuprof place writes it.")] = Path(
        "map.json"
    ),
) -> None:
    """Serve the models of MAP over HTTP (Open Inference Protocol v2) until Ctrl-C; answer all pending requests."""
    from gpuprof.pipeline.serve import run_map_server

    started = time.monotonic()

    def ready(url: str, models: int, workers: int) -> None:
        took_s = time.monotonic() - started
        typer.echo(
            f"serving {count_of(models, 'model')} with {count_of(workers, 'worker')} on {url} (ready in {took_s:.1f} s)"
        )

    run_map_server(map_file, settings, ready, say_note)
    say("drained")
