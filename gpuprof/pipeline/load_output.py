"""Output file of ``gpuprof load``: JSON, CSV or Parquet, by its ending."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpuprof.domain.file_access import write_atomically
from gpuprof.errors import InputError, refuse_unwritable
from gpuprof.pipeline.verdicts import VERDICT_SUFFIXES

Row = Mapping[str, object]


def check_output(path: Path) -> None:
    """Refuse a file name without a known format, before the measurement. Raises `InputError`."""
    endings = sorted([*_WRITERS, *VERDICT_SUFFIXES])
    if path.suffix not in endings:
        raise InputError(f"cannot tell the format of {path}", f"let its name end in one of {', '.join(endings)}")


def write_results(rows: Sequence[Row], path: Path) -> None:
    """Write one row for each model; in CSV and Parquet the stages are separate columns.

    Raises `InputError` when the file cannot be written.
    """
    with refuse_unwritable(path):
        _WRITERS[path.suffix]([_drop_infinities(row) for row in rows], path)


def _write_json(rows: Sequence[Row], path: Path) -> None:
    write_atomically(path, f"{json.dumps(rows, indent=1)}\n".encode())


def _write_csv(rows: Sequence[Row], path: Path) -> None:
    flat = [_flatten(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    writer.writeheader()
    for row in flat:
        writer.writerow({name: json.dumps(v) if isinstance(v, list) else v for name, v in row.items()})
    write_atomically(path, text.getvalue().encode())


def _write_parquet(rows: Sequence[Row], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([_flatten(row) for row in rows]), path)


_WRITERS: dict[str, Callable[[Sequence[Row], Path], None]] = {
    ".json": _write_json,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
}


def _drop_infinities(row: Row) -> Row:
    """Return the row without infinities, which JSON lacks: a model without an SLO has none."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def _flatten(row: Row) -> dict[str, object]:
    """Return the row with its stages as columns and the batches as a list of sizes and counts."""
    stages = row["stages"]
    assert isinstance(stages, Mapping)
    flat = {name: value for name, value in row.items() if name != "stages"}
    flat |= {f"stage_{name}": value for name, value in stages.items() if name not in ("model", "batches")}
    sizes = stages.get("batches") or {}
    flat["batches"] = [{"size": int(size), "count": count} for size, count in sizes.items()]
    return flat
