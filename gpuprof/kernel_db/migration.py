"""Brings tables that an older gpuprof wrote up to the present schema; the files themselves stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import SCHEMA_VERSION, VERSION_KEY, arrow_schema

#: Version → table → old name of a column → its name in the next version. Columns that a version merely added
#: need no entry: in older rows they are null.
RENAMED: Mapping[int, Mapping[str, Mapping[str, str]]] = {
    1: {"kernels": {"stream": "stream_id", "instructions": "instruction_count"}},
}


def version_of(schema: pa.Schema, path: str) -> int:
    """Return the version that the file at ``path`` was written with.

    Raises
    ------
    InputError
        When the file is not gpuprof's, or of a gpuprof newer than this one.
    """
    try:
        version = int((schema.metadata or {})[VERSION_KEY])
    except (KeyError, ValueError):
        raise InputError(f"{path} was not written by gpuprof", "move it out of the kernel database") from None
    if not 1 <= version <= SCHEMA_VERSION:
        raise InputError(
            f"{path} has version {version} of the schema, this gpuprof reads up to {SCHEMA_VERSION}", "upgrade gpuprof"
        )
    return version


def migrate_table(table: str, old: pa.Table, path: str) -> pa.Table:
    """Return the rows of ``old``, of any older version, with the present schema of ``table``."""
    for version in range(version_of(old.schema, path), SCHEMA_VERSION):
        renamed = RENAMED.get(version, {}).get(table, {})
        old = old.rename_columns([renamed.get(name, name) for name in old.column_names])
    schema = arrow_schema(table)
    columns = [
        old.column(field.name).cast(field.type) if field.name in old.column_names else pa.nulls(len(old), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
