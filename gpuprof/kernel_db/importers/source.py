"""A file that measurements are imported from: read, bounded, hashed, and turned into runs."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.domain.file_access import refuse_pipe
from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import RunRow
from gpuprof.kernel_db.store import new_run_id

if TYPE_CHECKING:  # imported on use: this module's parsing also serves iGniter's coefficients
    import pyarrow.parquet as pq

PARQUET = ".parquet"


@dataclass(frozen=True)
class Source:
    """A file and its content."""

    path: Path
    content: bytes
    sha256: str

    @classmethod
    def read_file(cls, path: Path) -> Source:
        """Read ``path``.

        Raises `InputError` for a file that is unreadable, or neither text nor Parquet.
        """
        try:
            content = refuse_pipe(path).read_bytes()
        except OSError as error:
            raise InputError(
                f"cannot read {path}: {error.strerror}", "name a file or a known table to import"
            ) from error
        source = cls(path, content, hashlib.sha256(content).hexdigest())
        if path.suffix == PARQUET:
            source.columns()
        else:
            source.text  # noqa: B018 - what is no text is refused here
        return source

    @cached_property
    def text(self) -> str:
        """Text of the file; empty for a Parquet file. Raises `InputError` for a file that is not text."""
        if self.path.suffix == PARQUET:
            return ""
        try:
            # Spreadsheets begin CSV files with a byte order mark, which would become a part of the first column's name.
            return self.content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(f"{self.path} is not a text file in UTF-8", "save it as UTF-8") from None

    def columns(self) -> tuple[str, ...]:
        """Return the column names of a Parquet file; empty for other files.

        Raises `InputError` when the file is damaged.
        """
        if self.path.suffix != PARQUET:
            return ()
        with self._parquet() as file:
            return tuple(file.schema_arrow.names)

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of a Parquet file. Raises `InputError` when the file is damaged."""
        with self._parquet() as file:
            rows: list[dict[str, Any]] = file.read().to_pylist()
            return rows

    def record_number(self, line: int, row: Mapping[str, Any], name: str) -> float:
        """Return the number in a column of a record, which may be typed.

        Raises `InputError` with the line for a value that is not a number, negative or infinite.
        """
        try:
            value = float(row[name])
        except (KeyError, TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise InputError(f"{self.path}:{line}: {name} must be a number, not negative, but is {row.get(name)!r}")
        return value

    @contextmanager
    def _parquet(self) -> Iterator[pq.ParquetFile]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            yield pq.ParquetFile(io.BytesIO(self.content))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.path} is not a whole Parquet file: {error}", "fetch it again whole") from None

    def rows(self) -> list[tuple[int, dict[str, str]]]:
        """Return the lines of a CSV file with a header as (line number, column → text).

        Raises `InputError` with the line number, when a line has more or fewer fields than the header.
        """
        reader = csv.reader(io.StringIO(self.text, newline=""))
        header: Sequence[str] = [name.strip() for name in next(reader, [])]
        rows = []
        for fields in reader:
            if not any(field.strip() for field in fields):
                continue
            if len(fields) != len(header):
                raise InputError(
                    f"{self.path}:{reader.line_num}: {len(fields)} fields where the header has {len(header)}"
                )
            rows.append((reader.line_num, dict(zip(header, (field.strip() for field in fields), strict=True))))
        return rows

    def header(self) -> tuple[str, ...]:
        """Return the names in the first line of a CSV file."""
        first = next(csv.reader(io.StringIO(self.text.lstrip("\r\n").split("\n", 1)[0])), [])
        return tuple(name.strip() for name in first)

    def number(self, line: int, row: Mapping[str, str], name: str) -> float | None:
        """Return a non-negative number of a row; None for an empty field or a mark for a missing value.

        Raises `InputError` with the line number, for any other text.
        """
        # Published tables separate thousands by commas.
        text = row[name].replace(",", "")
        if text in ("", "N/A", "nan", "-"):
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{self.path}:{line}: {name} must be a number, not negative, but is {row[name]!r}")
        return value

    def require_number(self, line: int, row: Mapping[str, str], name: str) -> float:
        """Return a required number. Raises `InputError` with the line number when the number is missing."""
        value = self.number(line, row, name)
        if value is None:
            raise InputError(f"{self.path}:{line}: {name} is missing")
        return value

    def finer_latency_ms(
        self, line: int, row: Mapping[str, str], latency_s: str, throughput: str, *, batch: int
    ) -> float | None:
        """Return a batch's time in ms: from the printed time or, if more precise, a single process's throughput.

        A time printed as 2 ms may be anything from 1.5 to 2.5 ms. None when both are missing, or no request was
        answered. ``latency_s``, ``throughput``: names of columns, in seconds and requests per second.
        """
        latency, rate = self.number(line, row, latency_s), self.number(line, row, throughput)
        if not latency and not rate:
            return None
        if not rate or (latency and _rounding(row[latency_s]) <= _rounding(row[throughput])):
            return 1000.0 * (latency or 0.0)
        return 1000.0 * batch / rate

    def run(self, device: str, collector: str, notes: str, model: str = "", **columns: str | None) -> RunRow:
        """Return the run of the file's rows; ``columns`` are further columns of the run."""
        now = datetime.now(UTC)
        return RunRow(
            run_id=new_run_id(now),
            started_at=now,
            device=device,
            collector=collector,
            model=model,
            source=str(self.path),
            source_sha256=self.sha256,
            notes=notes,
            **columns,  # type: ignore[arg-type]
        )


def _rounding(text: str) -> float:
    """Return the largest relative rounding error of a printed number above 0."""
    number = Decimal(text.replace(",", ""))
    return 0.5 * 10.0 ** int(number.as_tuple().exponent) / float(number)
