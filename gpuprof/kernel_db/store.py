"""The database as a whole: opening, appending runs, reading tables."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.domain.file_access import find_write_obstacle
from gpuprof.errors import InputError
from gpuprof.kernel_db.migration import migrate_table
from gpuprof.kernel_db.schema import (
    TABLES,
    ColocationRow,
    DeviceRow,
    KernelRow,
    ModelRow,
    OpRow,
    RunRow,
    arrow_schema,
    find_impossible,
    to_arrow,
)
from gpuprof.kernel_db.segment import TEMPORARY_PREFIX, check_footers, damage_error, write_segment

if TYPE_CHECKING:  # imported on use: without a database, this saves half a second
    import pyarrow as pa

#: File of a compacted segment with the names of the segments merged into it.
REPLACES = "replaces.json"
#: Name prefix of compacted segments, so that they sort after the segments of runs.
COMPACTED_PREFIX = "compacted-"
#: Directory inside the database for copies of fixed-batch models rewritten to take any batch.
COPIES = ".models"
_LOCK = ".lock"
#: Most attempts of a read: a compaction may remove a segment during the read, which then starts again.
_READ_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Run:
    """All rows added to the database by a run."""

    run: RunRow
    devices: Sequence[DeviceRow] = ()
    models: Sequence[ModelRow] = ()
    ops: Sequence[OpRow] = ()
    kernels: Sequence[KernelRow] = ()
    colocations: Sequence[ColocationRow] = ()

    def tables(self) -> dict[str, pa.Table]:
        """Return the rows as Arrow tables."""
        return {
            "runs": to_arrow("runs", [self.run]),
            **{table: to_arrow(table, getattr(self, table)) for table in TABLES if table != "runs"},
        }


def new_run_id(started_at: datetime) -> str:
    """Return a unique id that sorts by time."""
    return f"{started_at:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(4)}"


class KernelDb:
    """A directory with a sub-directory per run, each written atomically; safe for concurrent writers and readers.

    ``path``: an existing database. Raises `InputError` when there is no database at ``path``.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            state = "is not a directory" if path.exists() else "does not exist"
            raise InputError(f"the kernel database {path} {state}", "gpuprof profile MODEL.onnx makes one")
        self.path = path

    @classmethod
    def create(cls, path: Path) -> KernelDb:
        """Open the database at ``path`` for writing, and remove leftovers of killed writers.

        A missing database is created by the first appended run; until then nothing is changed. Raises `InputError` when
        the directory cannot be made or written to.
        """
        place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        obstacle = find_write_obstacle(place) if place.is_dir() else None
        reason = "not a directory" if not place.is_dir() else obstacle and f"not writable ({obstacle})"
        if reason:
            raise InputError(
                f"cannot write to the kernel database {path}: {place} is {reason}", "choose another with --db"
            )
        # Not the constructor: it refuses a missing database.
        database = cls.__new__(cls)
        database.path = path
        if path.exists():
            database.clear_leftovers()
        return database

    def append(self, run: Run) -> None:
        """Add a run: atomic and durable once this returns.

        Raises `InputError` when the directory cannot be written to or the disk is full.
        """
        self.append_tables(run.run.run_id, run.tables())

    def append_tables(self, run_id: str, tables: Mapping[str, pa.Table]) -> None:
        """Add a run given as Arrow tables, such as a run measured on another machine.

        Raises `InputError` as `append` does.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.writing():
                self._refuse_known(run_id)
                write_segment(self.path, run_id, tables)
        except OSError as error:
            raise write_error(self.path, error) from error

    def _refuse_known(self, run_id: str) -> None:
        """Refuse an existing run id: readers would skip its rows if a compacted segment replaces that name."""
        listing = _list_directory(self.path)
        with suppress(FileNotFoundError):
            if run_id in listing or run_id in replaced_names(listing.values()):
                raise InputError(f"run {run_id} is in the kernel database {self.path} already")

    def read_table(
        self,
        table: str,
        columns: Sequence[str] | None = None,
        where: Mapping[str, object] | None = None,
        segments: Sequence[Path] | None = None,
    ) -> pa.Table:
        """Return rows of ``table``; ``run_id`` sorts them by the time at which their runs started.

        Raises `InputError`, naming the file, for a file damaged or of a newer gpuprof. ``table``: a key of
        `gpuprof.kernel_db.schema.TABLES`; ``columns``: columns to return; ``where``: column → its required value, a
        list, tuple or set of allowed values, or None for null; ``segments``: segments to read, by default those of
        `segments`.

        Returns
        -------
        pyarrow.Table
            Rows in the schema of the table, or its requested part.
        """
        for attempt in range(_READ_ATTEMPTS):
            try:
                return _read_table(table, self.segments() if segments is None else segments, columns, where or {})
            except FileNotFoundError:  # removed by a compaction during the read: its rows are now in another segment
                if attempt == _READ_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def segments(self) -> list[Path]:
        """Return the directories with the rows, oldest first; each row is in exactly one directory."""
        while True:
            listing = _list_directory(self.path)
            with suppress(FileNotFoundError):  # removed by a compaction: list again
                replaced = replaced_names(listing.values())
                if listing.keys() == _list_directory(self.path).keys():  # else a compaction passed through: no snapshot
                    return [listing[name] for name in sorted(listing) if name not in replaced]

    def replaced_segments(self) -> list[Path]:
        """Return the segments already merged into a committed compacted segment, in a safe order of removal.

        Only segments named by a committed segment are replaced; a run appended a moment ago, for example, is not.
        Compacted segments come last: removing a compacted segment before the segments it replaces would make their rows
        visible again.
        """
        while True:
            listing = _list_directory(self.path)
            with suppress(FileNotFoundError):
                return [listing[name] for name in sorted(replaced_names(listing.values()) & listing.keys())]

    def clear_leftovers(self) -> list[str]:
        """Remove leftovers of killed writers, unless a writer is active; return the removed names."""
        removed_names: list[str] = []
        with (self.path / _LOCK).open("a") as lock:
            try:
                # Writers hold the lock shared (`writing`): an exclusive lock proves that no writer is active.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return removed_names
            for path in self.path.glob(f"{TEMPORARY_PREFIX}*"):
                shutil.rmtree(path, ignore_errors=True)
                removed_names.append(path.name)
        return removed_names

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the writers' lock, which the system releases when the process dies."""
        with (self.path / _LOCK).open("a") as lock:
            # Shared lock: writers need not wait for each other, since each writes its own directory.
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield


def _read_table(
    table: str, segments: Sequence[Path], columns: Sequence[str] | None, where: Mapping[str, object]
) -> pa.Table:
    import pyarrow as pa

    schema = arrow_schema(table)
    chosen = schema.names if columns is None else list(columns)
    read_columns = [name for name in schema.names if name in chosen or name in where]
    files = [file for segment in segments if (file := _table_file(segment, table)) is not None]
    # `Schema.empty_table` would import pandas.
    rows = pa.concat_tables(
        [pa.Table.from_batches([], schema).select(read_columns), *(_read_file(table, f, read_columns) for f in files)]
    )
    for name, value in where.items():
        rows = rows.filter(_pack_bits([_is_wanted(cell, value) for cell in rows.column(name).to_pylist()]))
    return rows.select(chosen)


def _read_file(table: str, file: Path, columns: Sequence[str]) -> pa.Table:
    """Return columns of a file, its rows brought up to the present schema.

    Not by pyarrow's datasets: these import pandas, which takes longer than the reading.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(table)
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            if opened.schema_arrow.equals(schema, check_metadata=True):
                rows = opened.read(columns=list(columns)).replace_schema_metadata(schema.metadata)
            else:
                rows = migrate_table(table, opened.read(), str(file)).select(list(columns))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise damage_error(file, str(error).split("\n")[0].replace(str(file), "").strip(" ':")) from error
    if impossible := find_impossible(rows):
        raise damage_error(file, impossible)
    return rows


def _is_wanted(value: object, wanted: object) -> bool:
    if isinstance(wanted, Collection) and not isinstance(wanted, str):
        return value in wanted
    return value == wanted


def _pack_bits(flags: Sequence[bool]) -> pa.Array:
    """Return an Arrow array of bools; pyarrow would import pandas to check for pandas' own types."""
    import numpy as np
    import pyarrow as pa

    packed = np.packbits(np.array(flags, dtype=np.bool_), bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, pa.py_buffer(packed)])


def _table_file(segment: Path, table: str) -> Path | None:
    """Return the file of ``table`` after checking its footer; None: no rows of the table in this segment.

    Raises `FileNotFoundError` when the segment was removed: its rows are in another segment now.
    """
    file = segment / f"{table}.parquet"
    if not file.exists():
        if not segment.exists():
            raise FileNotFoundError(segment)
        return None
    check_footers(segment, [file.name])
    return file


def _list_directory(database: Path) -> dict[str, Path]:
    try:
        with os.scandir(database) as entries:
            return {e.name: Path(e.path) for e in entries if not e.name.startswith(".") and _is_directory(e)}
    except FileNotFoundError:  # no run has been appended yet
        return {}


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link, or an inaccessible path
        return False


def replaced_names(segments: Iterable[Path]) -> set[str]:
    """Return the names of all segments replaced by the compacted ones among ``segments``.

    Raises `FileNotFoundError` when a segment was removed meanwhile; `InputError` when a list of names is damaged.
    """
    names: set[str] = set()
    for segment in segments:
        if segment.name.startswith(COMPACTED_PREFIX):
            try:
                names.update(map(str, json.loads((segment / REPLACES).read_text())))
            except ValueError as error:
                raise damage_error(segment / REPLACES, "it is no JSON") from error
    return names


def write_error(path: Path, error: OSError) -> InputError:
    """Return the error for a failed write: the disk is full, or the database is read-only."""
    reason = (error.strerror or str(error)).lower()
    return InputError(f"cannot write to the kernel database {path}: {reason}", "choose another with --db")
