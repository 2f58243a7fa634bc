"""``gpuprof profile``: measure models and store the measurements in the kernel database."""

from __future__ import annotations

import gpuprof
from gpuprof.cli.options import ModelsArgument
from gpuprof.cli.output import Format, print_rows, say, say_note, show_progress
from gpuprof.domain.table import make_columns
from gpuprof.pipeline.profile import ReportSettings, ingest_reports

_COLUMNS = make_columns(
    "model dims batch share processes device latency_p50_ms latency_p99_ms throughput_rps memory_peak_bytes "
    "beside stable"
)
_REPORT_COLUMNS = make_columns(
    "model device batch share latency_mean_ms kernel_count:kernels max_occupancy_pct wavg_occupancy_pct:WAO_% "
    "wavg_sm_util_pct:WSM_% dispatch_ms h2d_bytes:to_device_MiB d2h_bytes:from_device_MiB"
)


def profile(
    workloads: gpuprof.ProfileWorkloads,
    settings: gpuprof.ProfileSettings,
    reports: ReportSettings,
    models: ModelsArgument = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Measure models on this machine: latency, throughput, memory and the time of every op.

    Skips rows that the database already has, and so resumes after an interruption.
    """
    if reports.reports:
        ingested = ingest_reports(models or [], reports, workloads, settings.dims)
        say_note(*ingested.notes)
        print_rows(ingested.rows(), _REPORT_COLUMNS, chosen)
        return
    with show_progress() as show:
        result = gpuprof.profile(models or [], workloads, settings=settings, progress=show)
    print_rows(result.rows(), _COLUMNS, chosen)
    say_note(*result.notes)
    for reason in result.lost:
        say(f"error: {reason}")
    result.require_trusted()
