"""``gpuprof profile``: measure models and store the measurements in the kernel database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from gpuprof.cli.options import ModelsArgument, list_words
from gpuprof.cli.output import Format, make_columns, print_rows, say, say_note, show_progress
from gpuprof.errors import InputError
from gpuprof.pipeline.profile import ProfileSettings, ProfileWorkloads, ReportSettings
from gpuprof.pipeline.settings import Settings, option

if TYPE_CHECKING:
    from gpuprof.pipeline.profile import ProfileResult
    from gpuprof.pipeline.result import Progress

_COLUMNS = make_columns(
    "model dims batch share processes device latency_p50_ms latency_p99_ms throughput_rps memory_peak_bytes "
    "beside stable",
)
_REPORT_COLUMNS = make_columns(
    "model device batch share latency_mean_ms kernel_count:kernels max_occupancy_pct wavg_occupancy_pct:WAO_% "
    "wavg_sm_util_pct:WSM_% dispatch_ms h2d_bytes:to_device_MiB d2h_bytes:from_device_MiB",
)


class PlaceOptions(Settings):
    """Another place to measure."""

    title: ClassVar[str] = "Clusters"

    engine: str = option("local", "Place to measure: local, or ray for a Ray cluster, at RAY_ADDRESS.")


def profile(
    workloads: ProfileWorkloads,
    settings: ProfileSettings,
    reports: ReportSettings,
    place: PlaceOptions,
    models: ModelsArgument = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Measure models on this machine: latency, throughput, memory and the time of every op.

    Skips rows that the database already has, and so resumes after an interruption.
    """
    names = models or []
    if reports.reports:
        from gpuprof.pipeline.profile import ingest_reports

        ingested = ingest_reports(names, reports, workloads, settings.dims)
        say_note(*ingested.notes)
        print_rows(ingested.rows(), _REPORT_COLUMNS, chosen)
        return
    if not names:
        raise InputError("no model was named", "gpuprof profile MODEL.onnx; gpuprof zoo build makes some")
    if place.engine != "local":
        _measure_cluster(names, workloads, settings, place, chosen)
    else:
        _measure(names, workloads, settings, chosen)


def _measure(models: Sequence[str], workloads: ProfileWorkloads, settings: ProfileSettings, chosen: Format) -> None:
    from gpuprof.pipeline.profile import profile as measure

    with show_progress() as show:
        result = measure(models, workloads, settings=settings, progress=show)
    print_rows(result.rows(), _COLUMNS, chosen)
    _report(result)


def _report(result: ProfileResult) -> None:
    say_note(*result.notes)
    for reason in result.lost:
        say(f"error: {reason}")
    result.require_trusted()


def _measure_cluster(
    models: Sequence[str],
    workloads: ProfileWorkloads,
    settings: ProfileSettings,
    place: PlaceOptions,
    chosen: Format,
) -> None:
    """Measure models at batch sizes on a Ray cluster; rows before a failure are printed, too."""
    from gpuprof.pipeline.profile import ProfileProgress, profile_cluster

    if place.engine != "ray":
        raise InputError(f"--engine must be local or ray but got {place.engine}")
    options = [*list_words(workloads, ("batches", "device", "db")), *list_words(settings)]
    rows: list[Mapping[str, object]] = []

    try:
        with show_progress() as show:

            def collect_rows(step: Progress) -> None:
                rows.extend(step.rows if isinstance(step, ProfileProgress) else ())
                show(step)

            result = profile_cluster(models, workloads, options=options, progress=collect_rows)
    finally:
        if rows:
            print_rows(rows, _COLUMNS, chosen)
    _report(result)
