"""``gpuprof profile``: measure models and keep what was measured in the kernel database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.completion import complete_models
from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import (
    Column,
    CsvOption,
    Format,
    JsonOption,
    chosen_format,
    mebibytes,
    print_rows,
    progress,
    say,
    say_note,
    show_progress,
)
from gpuprof.cli.profile_options import ClusterOptions, MeasurementOptions, OtherMeasurements, WorkloadOptions
from gpuprof.cli.shared_options import DEFAULT_DB, DbOption
from gpuprof.cli.table import ColumnRole
from gpuprof.domain.number_format import number_formatter
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.pipeline.result import Progress

_COLUMNS = (
    Column("model", "model", right=False, role=ColumnRole.SUBJECT),
    Column("dims", "dims", right=False, role=ColumnRole.KEY),
    Column("batch", "batch", role=ColumnRole.SUBJECT),
    Column("share", "share", role=ColumnRole.KEY),
    Column("processes", "processes", role=ColumnRole.KEY),
    Column("latency_p50_ms", "p50 ms", number_formatter()),
    Column("latency_p99_ms", "p99 ms", number_formatter()),
    Column("throughput_rps", "requests/s", number_formatter()),
    Column("memory_peak_bytes", "memory MiB", mebibytes),
    Column("beside", "beside", right=False),
    Column("stable", "stable", lambda stable: "yes" if stable else "no", right=False),
)
_OP_COLUMNS = (
    Column("op_type", "op", right=False, role=ColumnRole.SUBJECT),
    Column("share", "share", role=ColumnRole.KEY),
    Column("ops", "distinct"),
    Column("new", "measured now"),
    Column("untimed", "without a time"),
    Column("sum_ms", "sum of times ms", number_formatter()),
)
_CLUSTER_COLUMNS = (
    Column("model", "model", right=False, role=ColumnRole.SUBJECT),
    Column("batch", "batch", role=ColumnRole.SUBJECT),
    Column("share", "share", role=ColumnRole.KEY),
    Column("processes", "processes", role=ColumnRole.KEY),
    Column("device", "device", right=False, role=ColumnRole.KEY),
    Column("latency_p50_ms", "p50 ms", number_formatter()),
    Column("latency_p99_ms", "p99 ms", number_formatter()),
    Column("stable", "stable", lambda stable: "yes" if stable else "no", right=False),
)
_REPORT_COLUMNS = (
    Column("model", "model", right=False, role=ColumnRole.SUBJECT),
    Column("device", "device", right=False, role=ColumnRole.KEY),
    Column("batch", "batch", role=ColumnRole.SUBJECT),
    Column("share", "share", role=ColumnRole.KEY),
    Column("latency_mean_ms", "mean ms", number_formatter()),
    Column("kernel_count", "kernels"),
    Column("max_occupancy_pct", "max occupancy %", number_formatter()),
    Column("wavg_occupancy_pct", "WAO %", number_formatter()),
    Column("wavg_sm_util_pct", "WSM %", number_formatter()),
    Column("dispatch_ms", "dispatch ms", number_formatter()),
    Column("h2d_bytes", "to device B"),
    Column("d2h_bytes", "from device B"),
)


@with_groups
def profile(
    workloads: WorkloadOptions,
    means: MeasurementOptions,
    instead: OtherMeasurements,
    cluster: ClusterOptions,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            autocompletion=complete_models,
            metavar="MODEL...",
            help="ONNX files, or NAME=FILE to name one.",
            show_default=False,
        ),
    ] = None,
    db: DbOption = DEFAULT_DB,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Measure models on this machine: latency, throughput, memory and the time of every op.

    What is in the database already is not measured again; interrupted, it goes on where it was.
    """
    chosen = chosen_format(as_json, as_csv)
    names = models or []
    if instead.from_report:
        _ingest(instead.from_report, names, workloads, means, instead.runs, db, chosen)
        return
    if not names:
        raise InputError("no model was named", "gpuprof profile MODEL.onnx; gpuprof zoo build makes some")
    if cluster.engine != "local":
        _measure_cluster(names, workloads, cluster.words(workloads, means, instead), means, cluster, db, chosen)
    elif instead.per_op:
        _measure_ops(names, workloads, means, db, chosen)
    else:
        _measure(names, workloads, means, instead.igniter, db, chosen)


def _measure(
    models: Sequence[str],
    workloads: WorkloadOptions,
    means: MeasurementOptions,
    igniter: bool,
    db: Path,
    chosen: Format,
) -> None:
    from gpuprof.pipeline.profile import profile as measure
    from gpuprof.pipeline.profile import profile_for_igniter

    batches, settings = workloads.batches(), means.settings(workloads, workloads.copies())
    with show_progress() as show:
        if igniter:
            result = profile_for_igniter(
                models, batches=batches, device=means.device, db=db, settings=settings, progress=show
            )
        else:
            result = measure(
                models,
                batches=batches,
                shares=workloads.shares(),
                beside=workloads.beside or (),
                device=means.device,
                db=db,
                settings=settings,
                progress=show,
            )
    rows = result.rows()
    has_dims = any(row["dims"] for row in rows)
    print_rows(rows, [column for column in _COLUMNS if has_dims or column.key != "dims"], chosen)
    say_note(*result.notes)
    for reason in result.lost:
        say(f"error: {reason}")
    result.require_trusted()


def _measure_ops(
    models: Sequence[str], workloads: WorkloadOptions, means: MeasurementOptions, db: Path, chosen: Format
) -> None:
    from gpuprof.pipeline.profile import profile_ops

    if workloads.beside or workloads.processes != "1" or workloads.input_data:
        raise InputError("--per-op measures ops one by one", "leave out --beside, --processes and --input-data")
    with show_progress() as show:
        result = profile_ops(
            models,
            batches=workloads.batches(),
            shares=workloads.shares(),
            device=means.device,
            db=db,
            settings=means.settings(workloads),
            progress=show,
        )
    print_rows(result.type_rows() if chosen is Format.TABLE else result.rows(), _OP_COLUMNS, chosen)
    say_note(*result.notes)


def _measure_cluster(
    models: Sequence[str],
    workloads: WorkloadOptions,
    options: Sequence[str],
    means: MeasurementOptions,
    cluster: ClusterOptions,
    db: Path,
    chosen: Format,
) -> None:
    """Measure models at batch sizes on the places of a Ray cluster; what came before a failure is printed, too."""
    from gpuprof.pipeline.profile import profile_cluster
    from gpuprof.pipeline.profile_result import ProfileProgress

    rows: list[Mapping[str, object]] = []

    def show(step: Progress) -> None:
        if isinstance(step, ProfileProgress):
            rows.extend(step.rows)
        else:
            say(step.step)

    try:
        with progress() as bar:
            bar.add_task("models and batches", total=None)
            result = profile_cluster(
                models,
                batches=workloads.batches(),
                options=options,
                device=means.device,
                address=cluster.ray_address or "",
                db=db,
                progress=show,
            )
    finally:
        if rows:
            print_rows(rows, _CLUSTER_COLUMNS, chosen)
    say_note(*result.notes)
    for reason in result.lost:
        say(f"error: {reason}")
    result.require_trusted()


def _ingest(
    reports: Sequence[Path],
    models: Sequence[str],
    workloads: WorkloadOptions,
    means: MeasurementOptions,
    runs: str | None,
    db: Path,
    chosen: Format,
) -> None:
    from gpuprof.pipeline.ingest import ingest_reports
    from gpuprof.pipeline.profile import DEFAULT_BATCHES

    result = ingest_reports(
        reports,
        models,
        batches=workloads.batches() or DEFAULT_BATCHES,
        runs=runs,
        share=workloads.share,
        device=means.device,
        device_file=means.device_file,
        db=db,
        dims=workloads.dims(),
    )
    say_note(*result.notes)
    print_rows(result.rows(), _REPORT_COLUMNS, chosen)
