"""Writes the database for other tools: CSV, Parquet, and a timeline for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuprof.domain.file_access import write_atomically
from gpuprof.errors import InputError, refuse_unwritable
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import TABLES, KernelRow
from gpuprof.kernel_db.store import KernelDb


def export_tables(database: KernelDb, directory: Path, kind: str) -> list[Path]:
    """Write each table that has rows to ``directory`` as ``TABLE.csv`` or ``TABLE.parquet``; return the files.

    Raises `InputError` when the directory cannot be written to.
    """
    import pyarrow.csv
    import pyarrow.parquet

    write = {"csv": pyarrow.csv.write_csv, "parquet": pyarrow.parquet.write_table}[kind]
    paths = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for table in TABLES:
            rows = database.read_table(table)
            if rows.num_rows:
                path = directory / f"{table}.{kind}"
                write(rows, path)
                paths.append(path)
    except OSError as error:
        raise InputError(
            f"cannot write to {directory}: {error.strerror or error}", "name a directory that you may write to with -o"
        ) from error
    return paths


def export_timeline(database: KernelDb, path: Path) -> int:
    """Write the kernels with a start as a trace in Chrome's JSON format; return their number.

    A process of the trace is a run, a thread of it a stream. Raises `InputError` when there is no kernel with a start,
    or ``path`` cannot be written.
    """
    events = list(_events(database))
    if not events:
        raise InputError(f"{database.path} has no kernel whose start was recorded", "gpuprof profile records some")
    with refuse_unwritable(path):
        write_atomically(path, json.dumps({"displayTimeUnit": "ns", "traceEvents": events}).encode())
    return sum(event["ph"] == "X" for event in events)


def _events(database: KernelDb) -> Iterator[dict[str, Any]]:
    numbers: dict[str, int] = {}
    for row in read_records(database, KernelRow):
        if row.start_ns is None or row.duration_ns is None:
            continue
        if row.run_id not in numbers:
            numbers[row.run_id] = len(numbers) + 1
            title = f"{row.model} at batch {row.batch} on {row.sm_share_pct:g}% of {row.device}"
            yield {"ph": "M", "name": "process_name", "pid": numbers[row.run_id], "args": {"name": title}}
        yield _event(row, row.start_ns, row.duration_ns, numbers[row.run_id])


def _event(row: KernelRow, start_ns: int, duration_ns: int, number: int) -> dict[str, Any]:
    columns = ("run_id", "model", "device", "batch", "name", "start_ns", "duration_ns")
    return {
        "ph": "X",
        "name": row.op_name or row.name,
        "cat": row.op_type or "untied",
        "pid": number,
        "tid": row.stream_id or 0,
        # Always microseconds: ``displayTimeUnit`` only affects the viewer (Trace Event Format).
        "ts": start_ns / 1000.0,
        "dur": duration_ns / 1000.0,
        "args": {"kernel": row.name, **{k: v for k, v in asdict(row).items() if v is not None and k not in columns}},
    }
