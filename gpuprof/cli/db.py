"""``gpuprof db``: list, query, compact and fill the kernel database."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

import gpuprof
from gpuprof.cli.options import DEFAULT_DB, DbOption, Verbs
from gpuprof.cli.output import Format, print_rows, say_note
from gpuprof.domain.plural import count_of
from gpuprof.domain.table import Column

app = Verbs(help="Query, compact and fill the kernel database.")


#: A time to the microsecond, of which people read the seconds.
_TIME = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)(\.\d+)?\+00:00")


@app.command("ls", short_help="List the measured models.")
def list_models(db: DbOption = DEFAULT_DB, chosen: Format = Format.TABLE) -> None:
    """List the measured models with their devices, batch sizes and shares."""
    from gpuprof.pipeline.db import list_measured_models

    result = list_measured_models(db)
    rows = result.rows()
    _print(result.columns, rows, chosen)
    if not rows:
        say_note(f"{db} holds no measurements (gpuprof profile MODEL.onnx --db {db} makes some)")


@app.command(short_help="Run an SQL query on the tables.")
def sql(
    statement: Annotated[
        str, typer.Argument(help="SQL of DuckDB; tables: runs, devices, models, ops, kernels, colocations.")
    ],
    db: DbOption = DEFAULT_DB,
    chosen: Format = Format.TABLE,
) -> None:
    """Run a read-only SQL query over the tables."""
    result = gpuprof.query_database(statement, db=db)
    rows = result.rows()
    if chosen is Format.TABLE and not rows:
        say_note("no row answers the query")
        return
    if chosen is Format.TABLE:  # columns that were asked for are shown without a value, too
        rows = [{name: "–" if value is None else value for name, value in row.items()} for row in rows]
    _print(result.columns, rows, chosen)


@app.command(short_help="Merge many small runs into one.")
def compact(db: DbOption = DEFAULT_DB) -> None:
    """Merge many small runs into one segment, which is smaller and faster to query."""
    from gpuprof.pipeline.db import compact_database

    result = compact_database(db)
    before, after = (f"{size / 2**20:,.1f} MiB" for size in (result.bytes_before, result.bytes_after))
    say_note(f"{count_of(result.segments_before, 'segment')} of {before} → {result.segments_after} of {after}")


@app.command("import", short_help="Import published measurements.")
def import_measurements(
    files: Annotated[
        list[Path],
        typer.Argument(help="Published measurements, or directories of them; the first word may name their format."),
    ],
    device: Annotated[str | None, typer.Option(help="Measured device, where the files do not name it.")] = None,
    db: DbOption = DEFAULT_DB,
    chosen: Format = Format.TABLE,
) -> None:
    """Import measurements of ParvaGPU, iGniter, the V100 table and Triton Model Analyzer, each file once."""
    rows = gpuprof.import_measurements(files, device=device, db=db).rows()
    _print(("file", "form", "device", "rows", "note"), rows, chosen)


def _print(names: Sequence[str], rows: Sequence[Mapping[str, object]], chosen: Format) -> None:
    """Print columns under the names given by the query; tables show times to the second."""
    if chosen is Format.TABLE:
        rows = [{name: _shorten_time(row[name]) for name in names} for row in rows]
    print_rows(rows, [Column(name, name) for name in names], chosen)


def _shorten_time(value: object) -> object:
    time = _TIME.fullmatch(value) if isinstance(value, str) else None
    return f"{time[1]}T{time[2]}" if time else value  # a single word, which a column does not break
