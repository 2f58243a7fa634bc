"""``gpuprof apply``: move a running server to another map."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.output import Format, make_columns, print_rows
from gpuprof.pipeline.serve import ServeSettings

_COLUMNS = make_columns("replica change reason")


def apply(
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Map to serve from now on.")],
    port: Annotated[int, typer.Option(help="HTTP port of the server.", min=1, max=65535)] = ServeSettings().port,
    chosen: Format = Format.TABLE,
) -> None:
    """Move the server on this machine to MAP; only changed replicas are restarted, and no request is lost."""
    from gpuprof.pipeline.serve import apply as apply_map

    print_rows(apply_map(map_file, port=port).rows(), _COLUMNS, chosen)
