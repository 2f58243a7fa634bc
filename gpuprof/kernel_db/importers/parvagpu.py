"""Profiles in ParvaGPU's form: a CSV a model, with MIG size, batch, processes, throughput and latency."""

from __future__ import annotations

from collections.abc import Iterable

from gpuprof.errors import InputError
from gpuprof.kernel_db.importers.source import Source
from gpuprof.kernel_db.schema import ModelRow
from gpuprof.kernel_db.store import Run

HEADER = ("Mig instance", "Batch size", "Workload Number", "Throughput", "Latency")
DEVICE = "a100-80"
#: MIG size in compute slices → the profile of an A100-80 that ParvaGPU measured.
_PROFILES = {1: "1g.10gb", 2: "2g.20gb", 3: "3g.40gb", 4: "4g.40gb", 7: "7g.80gb"}
_NOTES = (
    "latencies are as printed or batch over throughput, whichever has more digits; throughput is published of one "
    "process and multiplied here by their number; 0,0 means out of memory"
)


def recognizes(source: Source) -> bool:
    """Return whether ``source`` has ParvaGPU's header."""
    return source.header() == HEADER


def read_runs(source: Source, device: str | None) -> Iterable[Run]:
    """Return the runs of a file; the file's stem names the model.

    Raises `InputError` with the line number, for a MIG size unknown to the A100, or an invalid number.
    """
    run = source.run(device or DEVICE, "import:parvagpu", _NOTES, source.path.stem, precision=None)
    models = []
    for line, row in source.rows():
        size, batch = int(source.require_number(line, row, HEADER[0])), int(source.require_number(line, row, HEADER[1]))
        processes = int(source.require_number(line, row, HEADER[2]))
        throughput = source.require_number(line, row, HEADER[3])
        if size not in _PROFILES:
            raise InputError(f"{source.path}:{line}: MIG size {size} is none of {', '.join(map(str, _PROFILES))}")
        measured = throughput > 0
        models.append(
            ModelRow(
                run_id=run.run_id,
                model=source.path.stem,
                device=run.device,
                batch=batch,
                sm_share_pct=100.0,
                mig_profile=_PROFILES[size],
                processes=processes,
                latency_mean_ms=(
                    source.finer_latency_ms(line, row, HEADER[4], HEADER[3], batch=batch) if measured else None
                ),
                throughput_rps=throughput * processes if measured else None,
                error=None if measured else "out of memory",
            )
        )
    yield Run(run, models=models)
