"""Lists, queries, compacts and fills the kernel database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuprof.errors import InputError
from gpuprof.kernel_db.importing import IMPORTERS, ImportOutcome, import_files, split_form
from gpuprof.kernel_db.records import run_query
from gpuprof.kernel_db.store import Compaction, KernelDb, merge_segments
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.devices import database_path, open_existing
from gpuprof.pipeline.result import Result

_LISTING = """
select m.model, m.device,
  string_agg(distinct r.collector, ', ' order by r.collector) as collectors,
  list_sort(list(distinct m.batch)) as batches,
  list_sort(list(distinct coalesce(m.mig_profile || ':', '') || printf('%g%%', m.sm_share_pct))) as shares,
  count(*) as rows, count(*) filter (m.stable = false) as unstable, count(m.error) as failed,
  strftime(max(r.started_at), '%Y-%m-%d %H:%M') as latest
from models m join runs r using (run_id) group by m.model, m.device order by m.model, m.device
"""


@dataclass(frozen=True, kw_only=True)
class TableResult(Result):
    """Rows of a table or of a query's answer."""

    columns: tuple[str, ...]
    #: A row each, in the order of ``columns``: text, numbers, lists and mappings of them, or None.
    values: tuple[tuple[object, ...], ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return the rows by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.values]


@dataclass(frozen=True, kw_only=True)
class ImportResult(Result):
    """The imported rows, file by file."""

    files: tuple[ImportOutcome, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each file."""
        return [
            {"file": str(file.path), "form": file.form, "device": file.device, "rows": file.rows, "note": file.note}
            for file in self.files
        ]


def list_measured_models(db: PathArgument | None = None) -> TableResult:
    """Return the measured models, with their devices, batch sizes and shares.

    Raises `InputError` when there is no database.
    """
    answer = run_query(open_existing(database_path(db)), _LISTING)
    place = answer.columns.index("shares")
    values = tuple((*row[:place], sorted(row[place], key=_share_order), *row[place + 1 :]) for row in answer.rows)
    return TableResult(columns=answer.columns, values=values)


def _share_order(share: str) -> tuple[str, float]:
    instance, _, percent = share.rpartition(":")
    return instance, float(percent.removesuffix("%"))


def query_database(statement: str, *, db: PathArgument | None = None) -> TableResult:
    """Answer a read-only SQL query (DuckDB's dialect) over the tables.

    Columns of the same name are numbered. Raises `InputError` when there is no database, or DuckDB refuses the
    statement.

    Examples
    --------
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> quick = gpuprof.ProfileSettings(time_limit_s=0.2)
    >>> found = gpuprof.profile([file], batches=(1,), shares=("100",), device="cpu", db="db", settings=quick)
    >>> gpuprof.query_database("select model, batch from models", db="db").rows()
    [{'model': 'mlp', 'batch': 1}]
    """
    answer = run_query(open_existing(database_path(db)), statement)
    values = tuple(tuple(map(_plain_value, row)) for row in answer.rows)
    return TableResult(columns=tuple(_distinct(answer.columns)), values=values)


def compact_database(db: PathArgument | None = None) -> Compaction:
    """Merge many small runs into one segment, which is smaller and faster to query.

    Raises `InputError` when there is no database, or the database cannot be written.
    """
    return merge_segments(open_existing(database_path(db)))


def import_measurements(
    files: Sequence[PathArgument], *, device: str | None = None, db: PathArgument | None = None
) -> ImportResult:
    r"""Import published measurements, each file once.

    Known sources: ParvaGPU, iGniter, the V100 table and Triton Model Analyzer. Raises `InputError` when a file cannot
    be read or its form is unknown.

    Parameters
    ----------
    files : sequence of path
        Files or directories; the name of their form, by default detected in each file, may come first.
    device : str, optional
        Device of the measurements, for files that do not name a device.

    Examples
    --------
    >>> from pathlib import Path
    >>> from gpuprof.pipeline.db import import_measurements
    >>> header = "Mig instance,Batch size,Workload Number,Throughput,Latency"
    >>> _ = Path("resnet50.csv").write_text(header + "\n1,8,1,500,16\n")
    >>> import_measurements(["resnet50.csv"], db="db").rows()[0]["form"]
    'parvagpu'
    """
    database = KernelDb.create(database_path(db))
    form, paths = split_form([Path(file) for file in files])
    imported = tuple(import_files(database, paths, device, form))
    if not any(file.form for file in imported):
        raise InputError(
            f"no file of {', '.join(map(str, paths))} has a form that is known",
            f"known: {', '.join(sorted(IMPORTERS))}; name a file to have it told why",
        )
    return ImportResult(files=imported)


def _distinct(names: Sequence[str]) -> list[str]:
    """Number columns of the same name in a query."""
    counts: dict[str, int] = {}
    distinct = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        distinct.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return distinct


def _plain_value(value: Any) -> object:
    """Return a JSON value: other types, such as times and decimals, as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
