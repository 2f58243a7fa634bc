"""``gpuprof db``: look into the kernel database, check it, and carry data in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from gpuprof.cli.output import (
    Column,
    CsvOption,
    Format,
    JsonOption,
    chosen_format,
    mebibytes,
    number,
    print_rows,
    say,
)
from gpuprof.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Look into the kernel database, check it, carry data in and out.")

DbOption = Annotated[Path, typer.Option(envvar="GPUPROF_DB", help="Kernel database.")]
DEFAULT_DB = Path("gpuprof-db")


class ExportFormat(StrEnum):
    """What ``gpuprof db export`` writes."""

    CSV = "csv"
    PARQUET = "parquet"
    TRACE = "trace"


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
_LISTING = """
select m.model, m.device,
  string_agg(distinct r.collector, ', ' order by r.collector) as collectors,
  list_sort(list(distinct m.batch)) as batches,
  list_sort(list(distinct coalesce(m.mig_profile || ':', '') || printf('%g%%', m.sm_share_pct))) as shares,
  count(*) as rows, count(*) filter (m.stable = false) as unstable, count(m.error) as failed,
  strftime(max(r.started_at), '%Y-%m-%d %H:%M') as latest
from models m join runs r using (run_id) group by m.model, m.device order by m.model, m.device
"""


@app.command("ls")
def list_models(db: DbOption = DEFAULT_DB, as_json: JsonOption = False, as_csv: CsvOption = False) -> None:
    """List the models that were measured, on which devices, at which batch sizes and shares."""
    from gpuprof.kernel_db.sql import query
    from gpuprof.kernel_db.store import KernelDb

    result = query(KernelDb(db), _LISTING)
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    print_rows(rows, _columns(list(result.columns), rows), chosen_format(as_json, as_csv))


@app.command()
def show(
    table: Annotated[
        str, typer.Argument(help="runs, devices, models, ops, kernels or colocations; or a model's name.")
    ],
    limit: Annotated[int, typer.Option(min=1, help="Rows at most, newest first.")] = 50,
    db: DbOption = DEFAULT_DB,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Show the newest rows of a table, without the columns that are empty, or what is known of one model."""
    from gpuprof.errors import unknown_name
    from gpuprof.kernel_db.schema import TABLES
    from gpuprof.kernel_db.store import KernelDb

    database = KernelDb(db)
    if table in TABLES:
        rows = database.read(table)
    else:
        rows = database.read("models", where={"model": table})
        if not rows.num_rows:
            models = set(database.read("models", ["model"]).column("model").to_pylist())
            raise unknown_name("table or model", table, sorted({*TABLES, *models}))
    newest = rows.sort_by([("run_id", "descending")]).slice(0, limit).to_pylist()
    filled = [name for name in rows.column_names if any(row[name] is not None for row in newest)]
    if rows.num_rows > limit:
        say(f"{limit} of {rows.num_rows:,} rows; --limit shows more")
    chosen = chosen_format(as_json, as_csv)
    if chosen is Format.TABLE:
        filled = [name for name in _SEEN[table if table in TABLES else "models"].split() if name in filled]
    seen = [{name: _plain_value(row[name]) for name in filled} for row in newest]
    print_rows(seen, _columns(filled, seen), chosen)


@app.command()
def sql(
    statement: Annotated[str, typer.Argument(help="SQL in DuckDB's dialect; tables as in gpuprof db show.")],
    db: DbOption = DEFAULT_DB,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Answer an SQL query over the tables; it can read them and nothing else."""
    from gpuprof.kernel_db.sql import query
    from gpuprof.kernel_db.store import KernelDb

    chosen = chosen_format(as_json, as_csv)
    result = query(KernelDb(db), statement)
    names = _distinct(result.columns)
    rows = [dict(zip(names, map(_plain_value, row), strict=True)) for row in result.rows]
    print_rows(rows, _columns(names, rows), chosen)


@app.command()
def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Remove what killed processes left behind.")] = False,
    db: DbOption = DEFAULT_DB,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Read every page of every file against its checksum; exit code 3 when something is damaged."""
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.kernel_db.verification import verify as verify_database

    database = KernelDb(db)
    problems = verify_database(database, repair)
    columns = (Column("path", "where", right=False), Column("what", "what", right=False))
    chosen = chosen_format(as_json, as_csv)
    if problems or as_json or as_csv:
        rows = [{"path": str(p.path), "what": p.what, "harmless": p.harmless} for p in problems]
        print_rows(rows, columns, chosen)
    broken = [problem for problem in problems if not problem.harmless]
    if broken:
        raise InputError(f"{len(broken)} problems in {db}, first {broken[0].path}: {broken[0].what}")
    say(f"{len(database.segments())} segments, all whole")


@app.command()
def compact(db: DbOption = DEFAULT_DB) -> None:
    """Merge many small runs into one segment, which is smaller and faster to query."""
    from gpuprof.kernel_db.compaction import compact as compact_database
    from gpuprof.kernel_db.store import KernelDb

    done = compact_database(KernelDb(db))
    say(
        f"{done.segments_before} segments of {mebibytes(done.bytes_before)} MiB → "
        f"{done.segments_after} of {mebibytes(done.bytes_after)} MiB"
    )


@app.command("import")
def import_measurements(
    files: Annotated[
        list[Path],
        typer.Argument(help="Published measurements, or directories of them; the name of their form may stand first."),
    ],
    device: Annotated[str | None, typer.Option(help="What they were measured on, where they do not say.")] = None,
    form: Annotated[str | None, typer.Option("--format", help="By default told from each file.")] = None,
    db: DbOption = DEFAULT_DB,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Bring in measurements of ParvaGPU, iGniter, the V100 table, Model Analyzer, NeuSight and AIConfigurator, once."""
    from gpuprof.kernel_db.importing import import_files, split_form
    from gpuprof.kernel_db.store import KernelDb

    chosen = chosen_format(as_json, as_csv)
    first, files = split_form(files)
    rows = [
        {"file": str(done.path), "form": done.form, "device": done.device, "rows": done.rows, "note": done.note}
        for done in import_files(KernelDb.create(db), files, device, form or first)
    ]
    print_rows(rows, _columns(["file", "form", "device", "rows", "note"], rows), chosen)


@app.command()
def export(
    output: Annotated[Path, typer.Option("-o", "--output", help="A directory; for a trace, a file.")],
    format: Annotated[ExportFormat, typer.Option(help="What to write.")] = ExportFormat.CSV,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Write the tables as CSV or Parquet, or the kernels as a timeline for Perfetto and chrome://tracing."""
    from gpuprof.kernel_db.export import export_tables, export_timeline
    from gpuprof.kernel_db.store import KernelDb

    if format is ExportFormat.TRACE:
        say(f"{export_timeline(KernelDb(db), output):,} kernels → {output}")
        return
    for path in export_tables(KernelDb(db), output, format.value):
        say(str(path))


def _columns(names: list[str], rows: Sequence[Mapping[str, object]]) -> list[Column]:
    """Return columns with numbers to the right and all else to the left."""
    return [
        Column(name, name, _plain, right=all(isinstance(row[name], int | float | None) for row in rows))
        for name in names
    ]


def _distinct(names: tuple[str, ...]) -> list[str]:
    """Number columns that a query named alike, as JSON and CSV need them apart."""
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        distinct.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return distinct


def _plain_value(value: Any) -> object:
    """Return a value that JSON knows: times and decimals as text or number."""
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return number(4)(value) if isinstance(value, float) else str(value)
