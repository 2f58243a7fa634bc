"""Rows of the database as typed records: whole rows, or the columns that a reader needs; and SQL over its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import TABLES
from gpuprof.kernel_db.store import KernelDb

if TYPE_CHECKING:
    import pyarrow as pa
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)
else:
    Record = TypeVar("Record")

#: Epoch of timestamps, which count microseconds.
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Memory limit: a careless join must fail with an error, not take memory from the models served on the machine.
_MEMORY_LIMIT = "4GB"
_EXAMPLE = "select model, batch, latency_p50_ms from latest_models"
#: View of ``models`` with the newest of all rows measured under equal conditions.
LATEST_MODELS = """
create view latest_models as
select * from models
qualify row_number() over (
  partition by model, model_sha256, dims, device, batch, sm_share_pct, mig_profile, processes, runtime, execution,
    precision
  order by run_id desc) = 1
"""


def read_records(
    database: KernelDb, record: type[Record], where: Mapping[str, object] | None = None, *, table: str | None = None
) -> list[Record]:
    """Return the rows of a table as records; only the record's columns are read.

    Raises `InputError` when a file is damaged or of a newer gpuprof. ``record``: the dataclass of a table's rows
    (`gpuprof.kernel_db.schema.TABLES`), or a dataclass with some of its columns, names and types unchanged; ``where``:
    as for `KernelDb.read_table`; ``table``: required for a record with some of the columns.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from gpuprof.kernel_db.schema import ModelRow
    >>> read_records(KernelDb(Path(tempfile.mkdtemp())), ModelRow, {"device": "v100"})
    []
    """
    name = table or next(name for name, row in TABLES.items() if row is record)
    columns = [field.name for field in fields(record)]
    content = database.read_table(name, columns, where)
    # Column by column: a dictionary per row takes several times as long.
    values = [list_values(content.column(column)) for column in columns]
    return [record(*row) for row in zip(*values, strict=True)]


def list_values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column, times as `datetime`."""
    import pyarrow as pa  # not needed without a database

    if not pa.types.is_timestamp(column.type):
        return list(column.to_pylist())
    # By hand: pyarrow would import pandas, if installed, for this, which takes half a second.
    return [None if us is None else _EPOCH + timedelta(microseconds=us) for us in column.cast(pa.int64()).to_pylist()]


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Result of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def run_query(database: KernelDb, statement: str) -> QueryResult:
    """Run a single SQL statement over the tables and the view ``latest_models``.

    The statement can neither access files or the network nor change settings, and its changes are discarded afterwards.
    Raises `InputError` for several statements, or for a statement refused by DuckDB.
    """
    import duckdb

    connection = duckdb.connect(
        ":memory:", config={"autoinstall_known_extensions": False, "memory_limit": _MEMORY_LIMIT}
    )
    try:
        if (count := len(duckdb.extract_statements(statement))) != 1:
            problem = "the query is empty" if not count else f"the query holds {count} statements"
            raise InputError(problem, f'write one, such as "{_EXAMPLE}"')
        for table in TABLES:
            connection.register(table, database.read_table(table))
        connection.execute(LATEST_MODELS)
        # In this order: once the configuration is locked nothing can be set, not even by the statement itself.
        connection.execute("set enable_external_access = false")
        connection.execute("set lock_configuration = true")
        answer = connection.execute(statement)
        columns = tuple(str(column[0]) for column in answer.description or ())
        return QueryResult(columns, tuple(answer.fetchall()))
    except duckdb.Error as error:
        detail = " ".join(str(error).split("\n\n")[0].split())
        raise InputError(f"the query failed: {detail}", _query_remedy(statement)) from error
    finally:
        connection.close()


def _query_remedy(statement: str) -> str:
    """Return the fix for a failed statement: statements may only read."""
    words = statement.split(None, 1)
    if words and words[0].lower() not in {"select", "with", "from", "describe", "summarize"}:
        return "a query reads and changes nothing: begin with select"
    return f"tables: {', '.join(TABLES)}, latest_models; describe TABLE lists its columns"
