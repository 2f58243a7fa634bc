"""Merges many small segments into a single segment atomically: no row is ever missing or duplicated."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import TABLES
from gpuprof.kernel_db.store import (
    COMPACTED_PREFIX,
    REPLACES,
    KernelDb,
    new_run_id,
    remove_segment,
    table_files,
    write_error,
    write_segment,
)

#: File that release 0.1.0 wrote into every segment.
_FOOTERS = "footers.json"
#: Not the writers' lock: runs can be appended while a compaction reads and sorts.
_COMPACT_LOCK = ".compact.lock"
#: Most segments of single runs before `compact_if_due` merges all segments.
_MOST_RUNS = 64


@dataclass(frozen=True, slots=True)
class Compaction:
    """Result of a compaction: segments and bytes before and after."""

    segments_before: int
    segments_after: int
    bytes_before: int
    bytes_after: int


def merge_segments(database: KernelDb) -> Compaction:
    """Merge the rows of all segments, sorted so that queries by device, op and batch read little.

    The new segment names the segments it replaces. Readers skip these from the moment it appears; only then are they
    removed. If the process is killed earlier, the database is unchanged; if later, the next compaction removes them.
    Directories with files not written by gpuprof stay as they are. Raises `InputError` when a segment is damaged, the
    directory is not writable, or another compaction is running.
    """
    try:
        with _lock_compaction(database) as free:
            if not free:
                raise InputError(f"another compaction of {database.path} is at work", "wait for it")
            remove_replaced(database)
            before = database.segments()
            bytes_before = sum(map(_count_bytes, before))
            _merge_rows(database, list(filter(_is_own, before)))
            after = database.segments()
    except OSError as error:
        raise write_error(database.path, error) from error
    return Compaction(len(before), len(after), bytes_before, sum(map(_count_bytes, after)))


def compact_if_due(database: KernelDb) -> None:
    """Compact if there are many segments; call after each appended run.

    Does nothing while another compaction is running or when the disk is too full: the runs stay as they are, and the
    next append reports the error.
    """
    segments = database.segments()
    if sum(not path.name.startswith(COMPACTED_PREFIX) for path in segments) < _MOST_RUNS:
        return
    with suppress(OSError), _lock_compaction(database) as free:
        if free:
            remove_replaced(database)
            _merge_rows(database, list(filter(_is_own, segments)))


def remove_replaced(database: KernelDb) -> None:
    """Remove segments already merged into a compacted segment; a killed compaction may leave them behind."""
    # Hold the writers' lock, so that no cleanup of leftovers removes the same directory.
    with database.writing():
        for path in database.replaced_segments():
            remove_segment(path)


def _is_own(segment: Path) -> bool:
    """Return whether gpuprof wrote all files of a segment; compaction deletes the merged directories as a whole."""
    own_files = {_FOOTERS, REPLACES, *(file.name for file in table_files(segment).values())}
    return "runs.parquet" in own_files and all(file.name in own_files for file in segment.iterdir())


@contextmanager
def _lock_compaction(database: KernelDb) -> Iterator[bool]:
    """Yield whether the lock was free; a held lock excludes other compactions until exit."""
    with (database.path / _COMPACT_LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _merge_rows(database: KernelDb, old: list[Path]) -> None:
    if len(old) < 2:
        return
    tables = {}
    for table in TABLES:
        rows = database.read_table(table, segments=old)
        keys = [
            key for key in ("device", "op_type", "batch", "model", "run_id", "position") if key in rows.column_names
        ]
        tables[table] = rows.sort_by([(key, "ascending") for key in keys]) if table in ("kernels", "ops") else rows
    names = json.dumps([path.name for path in old]).encode()
    name = f"{COMPACTED_PREFIX}{new_run_id(datetime.now(UTC))}"
    with database.writing():
        write_segment(database.path, name, tables, {REPLACES: names})
    remove_replaced(database)


def _count_bytes(segment: Path) -> int:
    return sum(file.stat().st_size for file in segment.iterdir())
