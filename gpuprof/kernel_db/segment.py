"""A directory of Parquet files, one a table, that appears in the database whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gpuprof.kernel_db.schema import TABLES

TEMPORARY_PREFIX = ".tmp-"
_SORTED_INTEGERS = ("start_ns", "position", "repeat", "process_id", "duration_ns")


def write_segment(database: Path, name: str, tables: Mapping[str, pa.Table], extra: Mapping[str, bytes] = {}) -> Path:
    """Write ``tables`` as the directory ``name`` of ``database``; a crash at any moment leaves no half of it.

    Everything is written and flushed to disk in a hidden directory, which one rename then makes visible.

    Parameters
    ----------
    tables : mapping of str to pyarrow.Table
        Empty ones are left out.
    extra : mapping of str to bytes
        Other files of the directory.

    Raises
    ------
    OSError
        When the disk is full or the directory is not writable; nothing is left behind then.
    """
    temporary = database / f"{TEMPORARY_PREFIX}{name}"
    temporary.mkdir()
    try:
        for table, rows in tables.items():
            if rows.num_rows:
                _write_parquet(rows, temporary / f"{table}.parquet")
        for file_name, content in extra.items():
            (temporary / file_name).write_bytes(content)
        for file in temporary.iterdir():
            flush(file)
        flush(temporary)
        temporary.rename(database / name)
    except BaseException:  # Ctrl-C, too, must leave nothing behind; it goes on its way
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush(database)
    return database / name


def remove_segment(path: Path) -> None:
    """Remove a segment: it vanishes at once and is deleted afterwards, so that nobody sees half of it."""
    hidden = path.with_name(f"{TEMPORARY_PREFIX}gone-{path.name}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def flush(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def table_files(segment: Path) -> dict[str, Path]:
    """Return the Parquet file of each table that ``segment`` has."""
    found = {path.stem: path for path in segment.glob("*.parquet")}
    return {table: found[table] for table in TABLES if table in found}


def _write_parquet(rows: pa.Table, path: Path) -> None:
    sorted_integers = [name for name in _SORTED_INTEGERS if name in rows.column_names]
    pq.write_table(
        rows,
        path,
        compression="zstd",
        use_dictionary=[name for name in rows.column_names if name not in sorted_integers],
        column_encoding=dict.fromkeys(sorted_integers, "DELTA_BINARY_PACKED"),
        write_page_checksum=True,
        row_group_size=65_536,
    )
