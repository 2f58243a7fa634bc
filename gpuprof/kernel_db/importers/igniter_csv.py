"""iGniter's co-location measurements: models alone under MPS shares, and pairs of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from gpuprof.kernel_db.importers.source import Source
from gpuprof.kernel_db.schema import ColocationRow, ModelRow, workload_label
from gpuprof.kernel_db.store import Run

SOLO = ("model", "batch", "mps_share_pct", "latency_ms", "l2_utilization_pct", "dram_utilization_pct")
PAIRS = (
    "pair",
    *SOLO[:4],
    "beside",
    "beside_batch",
    "beside_mps_share_pct",
    "solo_latency_ms",
    "l2_utilization_pct",
    "beside_l2_utilization_pct",
    "dram_utilization_pct",
    "beside_dram_utilization_pct",
)
DEVICE = "v100"
_NOTES = "means of trtexec's end-to-end latency under MPS"


def recognizes(source: Source) -> bool:
    """Return whether ``source`` has the header of either table."""
    return source.header() in (SOLO, PAIRS)


def read_runs(source: Source, device: str | None) -> Iterable[Run]:
    """Return a table as a run. Raises `InputError` with the line number for a missing or invalid number."""
    run = source.run(device or DEVICE, "import:igniter", _NOTES, runtime="tensorrt")
    if source.header() == SOLO:
        yield Run(run, models=list(_read_solo(source, run.run_id, run.device)))
    else:
        yield Run(run, colocations=list(_read_pairs(source, run.run_id, run.device)))


def _read_solo(source: Source, run_id: str, device: str) -> Iterable[ModelRow]:
    for line, row in source.rows():
        yield ModelRow(
            run_id=run_id,
            model=row["model"],
            device=device,
            batch=int(source.require_number(line, row, "batch")),
            sm_share_pct=source.require_number(line, row, "mps_share_pct"),
            latency_mean_ms=source.require_number(line, row, "latency_ms"),
            l2_pct=source.number(line, row, "l2_utilization_pct"),
            dram_pct=source.number(line, row, "dram_utilization_pct"),
        )


def _read_pairs(source: Source, run_id: str, device: str) -> Iterable[ColocationRow]:
    members: dict[int, int] = defaultdict(int)
    for line, row in source.rows():
        group = int(source.require_number(line, row, "pair"))
        beside_batch = int(source.require_number(line, row, "beside_batch"))
        beside_share = source.require_number(line, row, "beside_mps_share_pct")
        yield ColocationRow(
            run_id=run_id,
            device=device,
            group=group,
            member=members[group],
            model=row["model"],
            batch=int(source.require_number(line, row, "batch")),
            beside=workload_label(row["beside"], beside_batch, beside_share, None, 1),
            sm_share_pct=source.require_number(line, row, "mps_share_pct"),
            latency_mean_ms=source.require_number(line, row, "latency_ms"),
            solo_latency_mean_ms=source.number(line, row, "solo_latency_ms"),
            l2_pct=source.number(line, row, "l2_utilization_pct"),
            dram_pct=source.number(line, row, "dram_utilization_pct"),
        )
        members[group] += 1
