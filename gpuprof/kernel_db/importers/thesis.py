"""The table of Elvinger's thesis (Table A.1, 5.2, 6.5): models on a V100 with the three metrics of Creq."""

from __future__ import annotations

from collections.abc import Iterable

from gpuprof.domain.catalogue import devices
from gpuprof.kernel_db.importers.source import Source
from gpuprof.kernel_db.schema import ModelRow
from gpuprof.kernel_db.store import Run

HEADER = (
    "model",
    "batch",
    "latency_s",
    "throughput_rps",
    "mem_capacity_pct",
    "achieved_occupancy_pct",
    "weighted_achieved_occupancy_pct",
    "weighted_sm_utilization_pct",
)
DEVICE = "v100"
_NOTES = (
    "latencies are as printed or batch over throughput, whichever has more digits; memory is published as a percentage "
    "of 16 GiB; empty fields are illegible in the published copy"
)


def recognizes(source: Source) -> bool:
    """Return whether ``source`` has the table's header."""
    return source.header() == HEADER


def read_runs(source: Source, device: str | None) -> Iterable[Run]:
    """Return the table as a run. Raises `InputError` with the line number for an invalid number."""
    run = source.run(device or DEVICE, "import:thesis", _NOTES, runtime="pytorch", runtime_version="2.4")
    models = []
    for line, row in source.rows():
        batch, throughput_rps = (
            int(source.require_number(line, row, "batch")),
            source.number(line, row, "throughput_rps"),
        )
        memory_pct = source.number(line, row, "mem_capacity_pct")
        models.append(
            ModelRow(
                run_id=run.run_id,
                model=row["model"],
                device=run.device,
                batch=batch,
                latency_mean_ms=source.finer_latency_ms(line, row, "latency_s", "throughput_rps", batch=batch),
                throughput_rps=throughput_rps,
                memory_peak_bytes=None
                if memory_pct is None
                else round(memory_pct / 100.0 * devices()[DEVICE].dram_bytes),
                max_occupancy_pct=source.number(line, row, "achieved_occupancy_pct"),
                wavg_occupancy_pct=source.number(line, row, "weighted_achieved_occupancy_pct"),
                wavg_sm_util_pct=source.number(line, row, "weighted_sm_utilization_pct"),
            )
        )
    yield Run(run, models=models)
