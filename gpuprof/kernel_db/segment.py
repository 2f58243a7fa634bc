"""A directory of Parquet files, one per table, added to the database atomically."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import TABLES

if TYPE_CHECKING:  # imported on use: not needed without a database
    import pyarrow as pa

TEMPORARY_PREFIX = ".tmp-"
#: File of a segment with the CRC-32 of each Parquet file's footer. Pages carry their own checksums, footers do not.
FOOTERS = "footers.json"
#: Bytes after the footer of a Parquet file (format specification): the footer's length, 4 bytes little-endian, and
#: ``PAR1``.
_TRAILER_BYTES = 8
#: Columns with small differences between neighbouring rows: delta encoding stores them in a few bits a value.
_SORTED_INTEGERS = ("start_ns", "position", "repeat", "process_id", "duration_ns")


def write_segment(database: Path, name: str, tables: Mapping[str, pa.Table], extra: Mapping[str, bytes] = {}) -> Path:
    """Write ``tables`` as the directory ``name`` of ``database``; a crash at any moment leaves no partial segment.

    Everything is written and flushed to disk in a hidden directory; a single rename makes the directory visible. Raises
    `OSError` when the disk is full or the directory is not writable; nothing is left behind then. ``tables``: empty
    tables are left out; ``extra``: other files of the directory.
    """
    temporary = database / f"{TEMPORARY_PREFIX}{name}"
    temporary.mkdir()
    try:
        for table, rows in tables.items():
            if rows.num_rows:
                _write_parquet(rows, temporary / f"{table}.parquet")
        # A footer locates the pages: a flipped bit there could make whole columns read wrongly without an error.
        checksums = {file.name: _footer_checksum(file) for file in sorted(temporary.glob("*.parquet"))}
        (temporary / FOOTERS).write_text(json.dumps(checksums))
        for file_name, content in extra.items():
            (temporary / file_name).write_bytes(content)
        # Before the rename: otherwise a crash of the machine could leave empty files under the visible name.
        for file in temporary.iterdir():
            sync_to_disk(file)
        sync_to_disk(temporary)
        temporary.rename(database / name)
    except BaseException:  # Ctrl-C, too, must leave nothing behind; the exception is raised again
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # A rename changes the parent directory and is on the disk only after that directory is flushed.
    sync_to_disk(database)
    return database / name


def remove_segment(path: Path) -> None:
    """Remove a segment: rename first, then delete, so readers never see a partial segment."""
    trash = path.with_name(f"{TEMPORARY_PREFIX}gone-{path.name}")
    path.rename(trash)
    shutil.rmtree(trash)


def sync_to_disk(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def table_files(segment: Path) -> dict[str, Path]:
    """Return the Parquet file of each table that ``segment`` has."""
    files = {path.stem: path for path in segment.glob("*.parquet")}
    return {table: files[table] for table in TABLES if table in files}


def check_footers(segment: Path, names: Iterable[str]) -> None:
    """Check the footers of Parquet files against their stored checksums.

    Segments of older versions without checksums pass; a flipped bit in a page is detected when the page is read. Raises
    `FileNotFoundError` when the segment is gone; `InputError` when a footer, or the list of checksums, is damaged.
    """
    try:
        expected = json.loads((segment / FOOTERS).read_text())
    except FileNotFoundError:
        if not segment.exists():
            raise
        return
    except ValueError as error:
        raise damage_error(segment / FOOTERS, "it is no JSON") from error
    for name in names:
        if name in expected and _footer_checksum(segment / name) != expected[name]:
            raise damage_error(segment / name, "its footer does not match its checksum")


def damage_error(file: Path, detail: str) -> InputError:
    """Return the error for a damaged file."""
    return InputError(
        f"{file} is damaged: {detail}",
        f"restore {file.parent} from a copy, or remove it and profile again; gpuprof db verify checks the others",
    )


def _footer_checksum(path: Path) -> int:
    """Return the CRC-32 of the footer, its length and the magic bytes, which end every Parquet file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TRAILER_BYTES))
        footer_bytes = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - _TRAILER_BYTES - footer_bytes))
        return zlib.crc32(file.read())


def _write_parquet(rows: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    sorted_integers = [name for name in _SORTED_INTEGERS if name in rows.column_names]
    pq.write_table(
        rows,
        path,
        compression="zstd",
        # Arrow accepts an encoding only for columns without a dictionary.
        use_dictionary=[name for name in rows.column_names if name not in sorted_integers],
        column_encoding=dict.fromkeys(sorted_integers, "DELTA_BINARY_PACKED"),
        write_page_checksum=True,
        # Compacted kernels and ops are sorted by device and op: small groups let readers skip most by statistics.
        row_group_size=65_536,
    )
