"""``gpuprof profile``: measure models and store the measurements in the kernel database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpuprof.cli.options import ModelsArgument
from gpuprof.cli.output import Column, ColumnRole, Format, mebibytes, print_rows, progress, say, say_note, show_progress
from gpuprof.domain.number_format import number_formatter
from gpuprof.errors import InputError
from gpuprof.pipeline.profile_settings import ProfileSettings, ProfileWorkloads
from gpuprof.pipeline.settings import Settings, option

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


class SourceOptions(Settings):
    """Measurements of ops, of iGniter's configurations, on a cluster, or from reports."""

    title: ClassVar[str] = "Other measurements"

    per_op: bool = option(False, "Measure each distinct op of all models once, as a model of its own.")
    igniter: bool = option(False, "Measure what calibrate needs: 11 configurations, 2 to 5 copies at once.")
    from_report: tuple[Path, ...] = option(
        (),
        "Report to read in place of running: .nsys-rep, .sqlite, .ncu-rep, .csv, trace.json or ONNX Runtime's profile; "
        "reports of one run are joined: kernels, counters, nodes.",
        metavar="REPORT",
        repeated=True,
    )
    runs: str | None = option(
        None,
        "Runs of the model in a report: a regular expression for names of ranges, whose groups model and batch tell "
        "several apart, or their number.",
        metavar="PATTERN|N",
    )
    device_file: Path | None = option(
        None, "TOML file with GPUs that gpuprof does not know, for --from-report.", metavar="FILE"
    )
    engine: str = option("local", "Place to measure: local, or ray for the GPUs or machines of a Ray cluster.")
    ray_address: str | None = option(None, "Address of the Ray cluster; default: this machine's.", envvar="RAY_ADDRESS")


def profile(
    workloads: ProfileWorkloads,
    settings: ProfileSettings,
    source: SourceOptions,
    models: ModelsArgument = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Measure models on this machine: latency, throughput, memory and the time of every op.

    What is in the database already is not measured again; interrupted, it goes on where it was.
    """
    names = models or []
    if source.from_report:
        _ingest(names, workloads, settings, source, chosen)
        return
    if not names:
        raise InputError("no model was named", "gpuprof profile MODEL.onnx; gpuprof zoo build makes some")
    if source.engine != "local":
        _measure_cluster(names, workloads, settings, source, chosen)
    elif source.per_op:
        _measure_ops(names, workloads, settings, chosen)
    else:
        _measure(names, workloads, settings, source.igniter, chosen)


def _measure(
    models: Sequence[str],
    workloads: ProfileWorkloads,
    settings: ProfileSettings,
    igniter: bool,
    chosen: Format,
) -> None:
    from gpuprof.pipeline.profile import profile as measure
    from gpuprof.pipeline.profile import profile_for_igniter

    with show_progress() as show:
        run = profile_for_igniter if igniter else measure
        result = run(models, workloads, settings=settings, progress=show)
    print_rows(result.rows(), _COLUMNS, chosen)
    say_note(*result.notes)
    for reason in result.lost:
        say(f"error: {reason}")
    result.require_trusted()


def _measure_ops(models: Sequence[str], workloads: ProfileWorkloads, settings: ProfileSettings, chosen: Format) -> None:
    from gpuprof.pipeline.profile import profile_ops

    if workloads.beside or settings.processes != (1,) or settings.input_data:
        raise InputError("--per-op measures ops one by one", "leave out --beside, --processes and --input-data")
    with show_progress() as show:
        result = profile_ops(models, workloads, settings=settings, progress=show)
    print_rows(result.type_rows() if chosen is Format.TABLE else result.rows(), _OP_COLUMNS, chosen)
    say_note(*result.notes)


def _measure_cluster(
    models: Sequence[str],
    workloads: ProfileWorkloads,
    settings: ProfileSettings,
    source: SourceOptions,
    chosen: Format,
) -> None:
    """Measure models at batch sizes on a Ray cluster; rows before a failure are printed, too."""
    from gpuprof.pipeline.profile import ProfileProgress, profile_cluster

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
                workloads,
                options=_describe_options(workloads, settings, source),
                address=source.ray_address or "",
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
    models: Sequence[str],
    workloads: ProfileWorkloads,
    settings: ProfileSettings,
    source: SourceOptions,
    chosen: Format,
) -> None:
    from gpuprof.pipeline.ingest import ingest_reports
    from gpuprof.pipeline.profile import DEFAULT_BATCHES

    result = ingest_reports(
        source.from_report,
        models,
        batches=workloads.batches or DEFAULT_BATCHES,
        runs=source.runs,
        share=None if workloads.shares is None else ",".join(map(str, workloads.shares)),
        device=workloads.device,
        device_file=source.device_file,
        db=workloads.db,
        dims=settings.dims,
    )
    say_note(*result.notes)
    print_rows(result.rows(), _REPORT_COLUMNS, chosen)


def _describe_options(workloads: ProfileWorkloads, settings: ProfileSettings, source: SourceOptions) -> list[str]:
    """Return the options for each place of the cluster, in the form of its own command line.

    Raises `InputError` for an unknown engine, or an engine that does not measure ops.
    """
    if source.engine != "ray" or source.per_op:
        raise InputError(f"--engine must be local, or ray without --per-op, but got {source.engine}")
    words = [f"--share={','.join(map(str, workloads.shares))}"] if workloads.shares else []
    words += [
        f"--processes={','.join(map(str, settings.processes))}",
        f"--collector={settings.collector}",
        f"--time-limit={settings.time_limit_s:g}",
        f"--profiler-limit={settings.profiler_limit_s:g}",
        *(f"--beside={text}" for text in workloads.beside),
        *(f"--dim={name}={_join(sizes)}" for name, sizes in settings.dims.items()),
        *(
            f"--input-data={name}={file}" if name else f"--input-data={file}"
            for name, file in settings.input_data.items()
        ),
    ]
    flags = {"--keep-unstable": settings.keep_unstable, "--force": settings.force, "--igniter": source.igniter}
    return [*words, *(flag for flag, wanted in flags.items() if wanted)]


def _join(sizes: int | Sequence[int]) -> str:
    return ",".join(map(str, (sizes,) if isinstance(sizes, int) else sizes))
