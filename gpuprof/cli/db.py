"""``gpuprof db``: show, query, compact and fill the kernel database."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.options import DEFAULT_DB, DbOption, Verbs
from gpuprof.cli.output import Column, Format, print_rows, say_note
from gpuprof.domain.plural import count_of

app = Verbs(help="Query, compact and fill the kernel database.")


#: Columns of each table that people see; programs get all of them.
_SEEN = {
    "runs": "run_id started_at device collector collector_version model batch sm_share_pct processes beside source",
    "devices": "device kind compute_units sm_share_pct float32_flops_per_s dram_bytes_per_s dram_bytes measured",
    "models": "model device batch sm_share_pct mig_profile processes latency_p50_ms latency_p99_ms throughput_rps "
    "memory_peak_bytes max_occupancy_pct wavg_occupancy_pct wavg_sm_util_pct power_w stable error",
    "ops": "model batch sm_share_pct position name op_type shapes fused flops duration_p50_ns note",
    "kernels": "model batch repeat position name op_name duration_ns grid_x block_x achieved_occupancy_pct "
    "dram_throughput_pct joined",
    "colocations": "model batch sm_share_pct mig_profile processes beside latency_mean_ms latency_p99_ms "
    "solo_latency_mean_ms stable error",
}

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


@app.command(short_help="Show the newest rows of a table.")
def show(
    table: Annotated[
        str, typer.Argument(help="Table: runs, devices, models, ops, kernels or colocations; or a model's name.")
    ],
    db: DbOption = DEFAULT_DB,
    chosen: Format = Format.TABLE,
) -> None:
    """Show the newest rows of a table, or the measurements of a model, without empty columns."""
    from gpuprof.pipeline.db import show_table

    result = show_table(table, db=db)
    say_note(*result.notes)
    names = result.columns
    if chosen is Format.TABLE:
        if not names:
            return
        names = tuple(name for name in _SEEN.get(table, _SEEN["models"]).split() if name in names)
    rows = [{name: row[name] for name in names} for row in result.rows()]
    _print(names, rows, chosen)


@app.command(short_help="Run an SQL query on the tables.")
def sql(
    statement: Annotated[str, typer.Argument(help="SQL in DuckDB's dialect; tables as in gpuprof db show.")],
    db: DbOption = DEFAULT_DB,
    chosen: Format = Format.TABLE,
) -> None:
    """Run a read-only SQL query over the tables."""
    from gpuprof.pipeline.db import query_database

    result = query_database(statement, db=db)
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
        typer.Argument(help="Published measurements, or directories of them; the name of their form may stand first."),
    ],
    device: Annotated[str | None, typer.Option(help="Measured device, where the files do not name it.")] = None,
    db: DbOption = DEFAULT_DB,
    chosen: Format = Format.TABLE,
) -> None:
    """Import measurements of ParvaGPU, iGniter, the V100 table and Triton Model Analyzer, each file once."""
    from gpuprof.pipeline.db import import_measurements as bring_in

    rows = bring_in(files, device=device, db=db).rows()
    _print(("file", "form", "device", "rows", "note"), rows, chosen)


def _print(names: Sequence[str], rows: Sequence[Mapping[str, object]], chosen: Format) -> None:
    """Print columns under the names that queries give them; people read times to the second."""
    if chosen is Format.TABLE:
        rows = [{name: _shorten_time(row[name]) for name in names} for row in rows]
    print_rows(rows, [Column(name, name) for name in names], chosen)


def _shorten_time(value: object) -> object:
    time = _TIME.fullmatch(value) if isinstance(value, str) else None
    return f"{time[1]}T{time[2]}" if time else value  # a single word, which a column does not break
