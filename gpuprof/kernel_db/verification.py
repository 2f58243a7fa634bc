"""Checks the integrity of every run of a database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gpuprof.errors import InputError
from gpuprof.kernel_db.compaction import remove_replaced
from gpuprof.kernel_db.migration import migrate_table
from gpuprof.kernel_db.schema import arrow_schema, find_impossible
from gpuprof.kernel_db.segment import TEMPORARY_PREFIX, check_footers, table_files
from gpuprof.kernel_db.store import COMPACTED_PREFIX, KernelDb


@dataclass(frozen=True, slots=True)
class Defect:
    """Something wrong with a database."""

    path: Path  #: File or directory.
    what: str
    is_harmless: bool = False  #: True for leftovers of killed processes, skipped by readers and removed by ``repair``.


def verify(database: KernelDb, repair: bool = False) -> list[Defect]:
    """Check every page of every file against its checksum, and every row against the runs.

    ``repair``: remove leftovers of killed processes. Damaged files are never touched.

    Returns
    -------
    list of Defect
        Defects found; empty for a sound database.
    """
    if repair:
        remove_replaced(database)
        database.clear_leftovers()
    defects = [
        Defect(path, "left behind by a writer that was killed, or one at work", is_harmless=True)
        for path in sorted(database.path.glob(f"{TEMPORARY_PREFIX}*"))
    ]
    defects += [
        Defect(path, "already compacted, but not yet removed", is_harmless=True)
        for path in database.replaced_segments()
    ]
    segments_by_run: dict[str, Path] = {}
    for segment in database.segments():
        defects += _check_segment(segment, segments_by_run)
    return defects


def _check_segment(segment: Path, segments_by_run: dict[str, Path]) -> Iterator[Defect]:
    files = table_files(segment)
    for unknown in set(segment.glob("*.parquet")) - set(files.values()):
        yield Defect(unknown, "no table of this schema")
    runs: set[str] = set()
    if "runs" not in files:
        yield Defect(segment, "has no runs.parquet")
    # Runs come first in `TABLES`: the rows of other tables are checked against them.
    for table, file in files.items():
        try:
            check_footers(segment, [file.name])
            content = _read_checked(table, file)
        except (pa.ArrowException, OSError, InputError, ValueError, OverflowError) as error:
            yield Defect(file, f"cannot be read: {str(error).splitlines()[0]}")
            continue
        ids = set(pc.unique(content.column("run_id")).to_pylist())
        if table == "runs":
            runs = ids
            yield from _check_runs(segment, content, segments_by_run)
        elif ids - runs:
            yield Defect(file, f"has rows of {', '.join(sorted(map(str, ids - runs)))}, of which there is no run")


def _read_checked(table: str, file: Path) -> pa.Table:
    content = migrate_table(table, pq.ParquetFile(file, page_checksum_verification=True).read(), str(file))
    for field in arrow_schema(table):
        if not field.nullable and content.column(field.name).null_count:
            raise InputError(f"{field.name} is missing in {content.column(field.name).null_count} rows")
    if impossible := find_impossible(content):
        raise InputError(impossible)
    return content


def _check_runs(segment: Path, runs: pa.Table, segments_by_run: dict[str, Path]) -> Iterator[Defect]:
    ids = runs.column("run_id").to_pylist()
    for run_id in ids:
        if run_id in segments_by_run:
            yield Defect(segment, f"has run {run_id}, which is in {segments_by_run[run_id].name} too")
        segments_by_run[run_id] = segment
    # A segment of a single run is named by the run's id: this detects a directory copied under another name.
    if not segment.name.startswith(COMPACTED_PREFIX) and ids != [segment.name]:
        yield Defect(segment, f"holds the runs {', '.join(ids) or 'none'}, not the one that it is named after")
