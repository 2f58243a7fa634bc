"""The database as a whole: opening, appending runs, reading tables, merging many small segments into one.

Merging is atomic: no row is ever missing or duplicated.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.domain.file_access import find_write_obstacle
from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import (
    SCHEMA_VERSION,
    TABLES,
    VERSION_KEY,
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

if TYPE_CHECKING:
    import pyarrow as pa

TEMPORARY_PREFIX = ".tmp-"
#: File of a compacted segment with the names of the segments merged into it.
REPLACES = "replaces.json"
#: Name prefix of compacted segments, so that they sort after the segments of runs.
COMPACTED_PREFIX = "compacted-"
#: Directory inside the database for copies of fixed-batch models rewritten to take any batch.
COPIES = ".models"
_LOCK = ".lock"
#: Most attempts of a read: a compaction may remove a segment during the read, which then starts again.
_READ_ATTEMPTS = 5
#: Columns with small differences between neighbouring rows: delta encoding stores them in a few bits a value.
_SORTED_INTEGERS = ("start_ns", "position", "repeat", "process_id", "duration_ns")
#: Version of release 0.1.0.
_OLDEST_VERSION = 2
#: First version whose rows name their runtime, execution and precision.
_SAYS_VARIANT = 3
#: First version with a separate column for estimated occupancies.
_PARTS_ESTIMATES = 5
_VARIANT = ("runtime", "execution", "precision")
_EXECUTIONS = {"onnxruntime": ("onnxruntime", "fused"), "torch": ("pytorch", "eager")}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
#: File that release 0.1.0 wrote into every segment.
_FOOTERS = "footers.json"
#: Not the writers' lock: runs can be appended while a compaction reads and sorts.
_COMPACT_LOCK = ".compact.lock"
#: Most segments of single runs before `compact_if_due` merges all segments.
_MOST_RUNS = 64


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

    def clear_leftovers(self) -> None:
        """Remove leftovers of killed writers, unless a writer is active."""
        with (self.path / _LOCK).open("a") as lock:
            try:
                # Writers hold the lock shared (`writing`): an exclusive lock proves that no writer is active.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            for path in self.path.glob(f"{TEMPORARY_PREFIX}*"):
                shutil.rmtree(path, ignore_errors=True)

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
    """Return the file of ``table``; None: no rows of the table in this segment.

    Raises `FileNotFoundError` when the segment was removed: its rows are in another segment now.
    """
    file = segment / f"{table}.parquet"
    if not file.exists():
        if not segment.exists():
            raise FileNotFoundError(segment)
        return None
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
        for file_name, content in extra.items():
            (temporary / file_name).write_bytes(content)
        # Before the rename: otherwise a crash of the machine could leave empty files under the visible name.
        for file in temporary.iterdir():
            _sync_to_disk(file)
        _sync_to_disk(temporary)
        temporary.rename(database / name)
    except BaseException:  # Ctrl-C, too, must leave nothing behind; the exception is raised again
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # A rename changes the parent directory and is on the disk only after that directory is flushed.
    _sync_to_disk(database)
    return database / name


def remove_segment(path: Path) -> None:
    """Remove a segment: rename first, then delete, so readers never see a partial segment."""
    trash = path.with_name(f"{TEMPORARY_PREFIX}gone-{path.name}")
    path.rename(trash)
    shutil.rmtree(trash)


def _sync_to_disk(path: Path) -> None:
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


def damage_error(file: Path, detail: str) -> InputError:
    """Return the error for a damaged file."""
    return InputError(
        f"{file} is damaged: {detail}", f"restore {file.parent} from a copy, or remove it and profile again"
    )


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


def _version_of(schema: pa.Schema, path: str) -> int:
    """Return the schema version of the file at ``path``.

    Raises `InputError` when the file is not gpuprof's, or of a newer gpuprof.
    """
    try:
        version = int((schema.metadata or {})[VERSION_KEY])
    except (KeyError, ValueError):
        raise InputError(f"{path} was not written by gpuprof", "move it out of the kernel database") from None
    if not _OLDEST_VERSION <= version <= SCHEMA_VERSION:
        raise InputError(
            f"{path} has version {version} of the schema, this gpuprof reads {_OLDEST_VERSION} to {SCHEMA_VERSION}",
            "upgrade gpuprof" if version > SCHEMA_VERSION else "profile again",
        )
    return version


def migrate_table(table: str, old: pa.Table, path: str) -> pa.Table:
    """Return the rows of ``old``, of any older version, with the present schema of ``table``.

    Columns that a version added are null in older rows.
    """
    import pyarrow as pa

    oldest = _version_of(old.schema, path)
    schema = arrow_schema(table)
    # The run already had these columns; only its other rows lacked them.
    if oldest < _SAYS_VARIANT and table != "runs" and set(_VARIANT) <= set(schema.names):
        old = _with_variants(old, Path(path).parent / "runs.parquet")
    if oldest < _PARTS_ESTIMATES and table == "kernels" and "launch_occupancy_pct" not in old.column_names:
        old = _part_estimates(old)
    columns = [
        old.column(field.name).cast(field.type) if field.name in old.column_names else pa.nulls(len(old), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _part_estimates(kernels: pa.Table) -> pa.Table:
    """Move occupancies estimated from launches, which older versions stored there, out of the column of counters.

    Estimates belong to kernels with a start time (from a timeline) and without counters.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if "achieved_occupancy_pct" not in kernels.column_names:
        return kernels
    count = kernels.num_rows
    joined = kernels.column("joined") if "joined" in kernels.column_names else pa.nulls(count, pa.string())
    starts = kernels.column("start_ns") if "start_ns" in kernels.column_names else pa.nulls(count, pa.int64())
    has_counters = pc.is_in(joined, value_set=pa.array(["both", "counters"]))
    estimated = pc.and_(pc.invert(has_counters), pc.is_valid(starts))
    mixed, nulls = kernels.column("achieved_occupancy_pct"), pa.nulls(count, pa.float64())
    position = kernels.column_names.index("achieved_occupancy_pct")
    kernels = kernels.set_column(position, "achieved_occupancy_pct", pc.if_else(estimated, nulls, mixed))
    return kernels.append_column("launch_occupancy_pct", pc.if_else(estimated, mixed, nulls))


def _with_variants(rows: pa.Table, runs: Path) -> pa.Table:
    """Add to old rows the runtime, execution and precision of their segment's runs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not runs.is_file() or "run_id" not in rows.column_names:
        return rows
    variants_by_run = {run["run_id"]: _variant_of_run(run) for run in pq.read_table(runs).to_pylist()}
    variants = [variants_by_run.get(run_id, (None, None, None)) for run_id in rows.column("run_id").to_pylist()]
    for position, name in enumerate(_VARIANT):
        if name not in rows.column_names:
            rows = rows.append_column(name, pa.array([variant[position] for variant in variants], pa.string()))
    return rows


def _variant_of_run(run: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
    """Return runtime, execution and precision; on GPUs older runs left the precision to the runtime's defaults."""
    runtime, execution = _EXECUTIONS.get(run.get("runtime") or "", (None, None))
    on_cpu = "CPU" in (run.get("provider") or "")
    precision_text = run.get("precision")  # type of the first input; whole numbers for a language model
    precision = (precision_text if precision_text in _FLOATS else "float32") if runtime is not None and on_cpu else None
    return runtime, execution, precision


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
