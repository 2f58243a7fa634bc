"""Ingests reports that a profiler wrote elsewhere: ``gpuprof profile --from-report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpuprof.cli.output import Column, Format, number, print_rows, say
from gpuprof.errors import InputError

_COLUMNS = (
    Column("model", "model", right=False),
    Column("device", "device", right=False),
    Column("batch", "batch"),
    Column("share", "share"),
    Column("kernel_count", "kernels"),
    Column("max_occupancy_pct", "max occupancy %", number()),
    Column("wavg_occupancy_pct", "WAO %", number()),
    Column("wavg_sm_util_pct", "WSM %", number()),
    Column("dispatch_ms", "dispatch ms", number()),
    Column("h2d_bytes", "to device B"),
    Column("d2h_bytes", "from device B"),
)


def ingest_reports(
    reports: Sequence[Path], models: Sequence[str], batch: str, share: str | None, device: str | None, db: Path
) -> list[dict[str, object]]:
    """Append one run with what ``reports`` hold of one model at one batch size; return its row of ``models``.

    Parameters
    ----------
    models : sequence of str
        None (the first report's name), or one: an ONNX file, NAME=FILE, or a name.
    batch, share : str
        As the options say; one value each.
    device : str or None
        A name of the catalogue; None: the GPU that the reports name.

    Raises
    ------
    InputError
        When a report cannot be read, or more than one workload was named.
    """
    from dataclasses import asdict

    from gpuprof.domain.catalogue import device as catalogued
    from gpuprof.domain.share import Share
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.profiling.gpu.replay import ReplayCollector, device_of_recording, ingest, replayed_job
    from gpuprof.profiling.sweep import planning

    batches = planning.parse_batches(batch)
    if len(batches) != 1 or len(models) > 1:
        raise InputError(
            f"a report is of one model at one batch size but got {len(models)} and {len(batches)}",
            "say which was recorded: --batch 8",
        )
    collector = ReplayCollector(reports)
    recorded = collector.recording()
    target = catalogued(device) if device else device_of_recording(recorded)
    shares = planning.parse_shares(share, target) if share else (Share(),)
    job = replayed_job(models[0] if models else None, batches[0], shares[0], reports)
    collected = ingest(KernelDb.create(db), collector, job, target)
    for note in collected.notes:
        say(f"gpuprof: {note}")
    return [{**asdict(row), "share": str(shares[0])} for row in collected.models]


def print_ingested(rows: Sequence[dict[str, object]], chosen: Format) -> None:
    """Print what was ingested."""
    print_rows(list(rows), _COLUMNS, chosen)
