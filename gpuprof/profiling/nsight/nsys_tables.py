"""Opens the SQLite file that ``nsys export`` writes and reads tables of it by the columns that are there.

Tables are made only for what was recorded, and columns came and went with the versions of the export's schema: nothing
is read by position, and a column that a version lacks is left out of the answer.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pandas as pd

from gpuprof.errors import InputError

_MAGIC = b"SQLite format 3\x00"
#: The table's name in newer exports and in older ones.
_META = ("META_DATA_EXPORT", "EXPORT_META_DATA")
_BLOCK = 65_536
_EXPORT_FIX = "nsys export --type=sqlite REPORT.nsys-rep writes one"


class NsysTables:
    """A report of Nsight Systems, open for reading.

    ``path``: a SQLite file. Raises `InputError` when it cannot be read, is cut off, or was not written by ``nsys
    export``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_magic(path)
        # Immutable: SQLite takes no lock and looks for no journal, so that a report on a read-only disk opens too.
        self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            self._tables = {
                name: tuple(row[1] for row in self._connection.execute(f'PRAGMA table_info("{name}")'))
                for (name,) in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            self.about = self._read_metadata()
        except sqlite3.DatabaseError as error:
            self.close()
            raise self._damage_error(error) from error
        except InputError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @property
    def version(self) -> str:
        """Version of Nsight Systems, and of the export's schema."""
        product = self.about.get("EXPORT_PRODUCT_VERSION", "unknown")
        return f"{product} (schema {self.about.get('EXPORT_SCHEMA_VERSION', 'unknown')})"

    def has(self, table: str) -> bool:
        """Whether anything of the kind was recorded."""
        return table in self._tables

    def columns(self, table: str) -> tuple[str, ...]:
        """Return the columns that ``table`` has."""
        return self._tables.get(table, ())

    def read_table(
        self, table: str, wanted: Mapping[str, str], needed: Sequence[str] = (), present: Sequence[str] = ()
    ) -> pd.DataFrame:
        """Return the columns of ``table`` that are there.

        Raises `InputError` when a needed column is missing, or the file is cut off in the middle of the table.
        ``wanted``: column of the file → what it is called in the answer; ``needed``: columns without which the table
        says nothing; ``present``: rows in which one of these columns is null are left out: ids of 64 bits do not
        survive nulls in pandas.
        """
        there = [name for name in wanted if name in self.columns(table)]
        if missing := [name for name in needed if name not in there]:
            raise InputError(
                f"{self.path}: {table} of Nsight Systems {self.version} has no column {missing[0]}",
                "a version of nsys that gpuprof does not know: report it",
            )
        listed = ", ".join(f'"{name}"' for name in there)
        condition = " AND ".join(f'"{name}" IS NOT NULL' for name in present if name in there) or "1"
        try:
            cursor = self._connection.execute(f'SELECT {listed} FROM "{table}" WHERE {condition}')
            columns = _columns(cursor, len(there))
        except sqlite3.DatabaseError as error:
            raise self._damage_error(error) from error
        return pd.DataFrame(dict(zip((wanted[name] for name in there), columns, strict=True)))

    def _read_metadata(self) -> dict[str, str]:
        table = next((name for name in _META if name in self._tables), None)
        if table is None or not {"name", "value"} <= set(self.columns(table)):
            raise InputError(f"{self.path} is a SQLite file, but not one that nsys export wrote", _EXPORT_FIX)
        rows = self._connection.execute(f'SELECT name, value FROM "{table}"').fetchall()
        return {str(name): str(value) for name, value in rows}

    def _damage_error(self, error: sqlite3.DatabaseError) -> InputError:
        return InputError(f"{self.path} is cut off or damaged: {error}", "export the report again")


def _columns(cursor: sqlite3.Cursor, count: int) -> list[Any]:
    """Read by blocks into columns: whole tables as rows of Python objects would take ten times as long."""
    blocks: list[list[Any]] = [[] for _ in range(count)]
    while rows := cursor.fetchmany(_BLOCK):
        for block, values in zip(blocks, zip(*rows, strict=True), strict=True):
            block.append(_array(values))
    return [np.concatenate(block) if block else np.zeros(0, dtype=np.int64) for block in blocks]


def _array(values: tuple[Any, ...]) -> Any:
    try:
        return np.array(values, dtype=np.int64 if isinstance(values[0], int) else object)
    except (TypeError, ValueError, OverflowError):  # nulls or text in between
        return np.array(values, dtype=object)


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if head != _MAGIC:
        raise InputError(f"{path} is not a SQLite file", _EXPORT_FIX)
