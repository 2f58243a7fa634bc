"""CSV files of Triton Model Analyzer: the inference table, and the table of GPU metrics over the same time."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuprof.errors import InputError
from gpuprof.kernel_db.importers.source import Source
from gpuprof.kernel_db.schema import ModelRow
from gpuprof.kernel_db.store import Run

_THROUGHPUT = "Throughput (infer/sec)"
_NOTES = (
    "latencies are a client's, queueing at its concurrency included; the batch is the client's; CPU and GPU memory "
    "are the server's"
)
#: Column of the database → the analyzer's name, and the factor to the column's unit.
_COLUMNS = {
    "throughput_rps": (_THROUGHPUT, 1.0),
    "latency_mean_ms": ("Avg Latency (ms)", 1.0),
    "latency_p95_ms": ("p95 Latency (ms)", 1.0),
    "latency_p99_ms": ("p99 Latency (ms)", 1.0),
    "power_w": ("GPU Power Usage (W)", 1.0),
}
_MEMORY = re.compile(r"(?:Max )?GPU Memory Usage \(MB\)")
_INSTANCES = re.compile(r"(?P<count>\d+)\s*[:/x]")


def recognizes(source: Source) -> bool:
    """Return whether ``source`` has the columns common to the analyzer's tables."""
    header = source.header()
    return {"Model", "Batch"} <= set(header) and (_THROUGHPUT in header or any(map(_MEMORY.fullmatch, header)))


def read_runs(source: Source, device: str | None) -> Iterable[Run]:
    """Return a table as a run.

    Raises `InputError` when no device is given (the file does not name its device), or with the line number for an
    invalid number.
    """
    if device is None:
        raise InputError(f"{source.path} does not say which device it is of", "say so with --device")
    run = source.run(device, "import:model-analyzer", _NOTES, runtime="triton")
    memory = next(filter(_MEMORY.fullmatch, source.header()), None)
    models = []
    for line, row in source.rows():
        figures = {
            column: None if value is None else value * factor
            for column, (name, factor) in _COLUMNS.items()
            if name in row
            for value in [source.number(line, row, name)]
        }
        used = source.number(line, row, memory) if memory else None
        models.append(
            ModelRow(
                run_id=run.run_id,
                model=row["Model"],
                device=device,
                batch=int(source.require_number(line, row, "Batch")),
                processes=_instances(row.get("Instance Group", "")),
                memory_peak_bytes=None if used is None else round(used * 1e6),
                **figures,  # type: ignore[arg-type]
            )
        )
    yield Run(run, models=models)


def _instances(text: str) -> int:
    """Read ``"2:KIND_GPU"`` or ``"2/GPU"``; 1 without a number."""
    match = _INSTANCES.match(text)
    return int(match["count"]) if match else 1
