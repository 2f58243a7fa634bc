"""Measurements of models on this machine or a cluster, and of profilers' reports, in the kernel database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share, parse_share
from gpuprof.domain.sizes import combine_sizes, describe_sizes
from gpuprof.domain.validation import Count, NotNegative, Positive
from gpuprof.errors import InputError, UnavailableError, UnstableError
from gpuprof.kernel_db.schema import ColocationRow, ModelRow
from gpuprof.kernel_db.store import COPIES, KernelDb
from gpuprof.pipeline.arguments import PathArgument, name_models
from gpuprof.pipeline.devices import database_path, read_own_devices, resolve_device, resolve_local_device
from gpuprof.pipeline.result import NoteList, Progress, ProgressCallback, Result, say_nothing
from gpuprof.pipeline.serving_cost import measure_serving
from gpuprof.pipeline.settings import Batches, DataFiles, ManyDims, Settings, option, split_names
from gpuprof.profiling.collector import Collector, choose_collector
from gpuprof.profiling.gpu.replay import (
    device_of_recording,
    ingest,
    read_report_set,
    recordings_of,
    replayed_job,
    split_runs,
)
from gpuprof.profiling.sweep import planning
from gpuprof.profiling.sweep.campaign import Campaign, Cell, CellResult
from gpuprof.profiling.sweep.planning import NamedModel
from gpuprof.runtime.batch_items import describe_mixing
from gpuprof.runtime.providers import ORT_CPU

if TYPE_CHECKING:
    from gpuprof.profiling.worker.job import TimingLimits


class ProfileWorkloads(Settings):
    """Workloads to measure, and the database."""

    title: ClassVar[str] = "Workloads"
    usual_batches: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)  #: Default batch sizes.

    batches: Batches | None = option(
        None,
        "Batch sizes, separated by commas; default: 1,2,4,8, or the batch that a model fixes.",
        "--batch",
    )
    shares: Annotated[tuple[str | Share, ...] | None, BeforeValidator(split_names)] = option(
        None, "Shares to measure: 50 (percent), 1core, 3g.40gb. Default on a CPU: 1, 2, 4, … and all cores.", "--share"
    )
    beside: tuple[str, ...] = option(
        (), "Model to run beside the measured ones; may be repeated.", metavar="MODEL[@BATCH[:SHARE]]", repeated=True
    )
    device: str | None = option(
        None,
        "Device to measure: cpu, gpu or a GPU's name; default: the first GPU that can be measured, else the CPU; with "
        "--from-report the recorded GPU, where the report does not name it.",
        values="devices",
    )
    igniter: bool = option(False, "Measure the data for calibrate: 11 configurations, and 2 to 5 copies at once.")
    db: Path | None = option(None, "Kernel database, created if missing; default: GPUPROF_DB, or gpuprof-db.")
    engine: Literal["local", "ray"] = option(
        "local", "Place of the measurements: local, or ray for the Ray cluster at RAY_ADDRESS.", panel="Clusters"
    )


class ProfileSettings(Settings):
    """Collector, processes, inputs and time limits of measurements."""

    title: ClassVar[str] = "Measurement"

    collector: str = option("auto", "Collector; auto takes the first that is available.")
    processes: Batches = option((1,), "Numbers of processes that share one share, separated by commas.")
    dims: ManyDims = option(
        {},
        "Sizes of a free dimension, measured in every combination; may be repeated.",
        "--dim",
        metavar="NAME=SIZE[,SIZE...]",
        repeated=True,
    )
    precision: Literal["float16"] | None = option(
        None,
        "Precision of the measured models: float16 measures converted copies, as NAME-float16; default: the files as "
        "they are.",
    )
    input_data: DataFiles = option(
        {},
        "Input data: .npz, or JSON as perf_analyzer's; default: random. May be repeated.",
        metavar="[MODEL=]FILE",
        repeated=True,
    )
    time_limit_s: Positive = option(10.0, "Longest time to measure one row.", "--time-limit", unit="s")
    profiler_limit_s: Positive = option(
        900.0, "Time after which a profiler is stopped as hung.", "--profiler-limit", unit="s"
    )
    repeat: Count | None = option(
        None,
        "Runs of each row in separate processes; all rows are run once before any is run again. Default: 2 for batches "
        "up to 8 on a GPU, else 1.",
    )
    repeat_every_s: NotNegative = option(0.0, "Minimum time between the runs of --repeat.", "--repeat-every", unit="s")
    force: bool = option(False, "Measure rows again that the database already has.")
    keep_unstable: bool = option(False, "Keep unstable rows as they are instead of measuring them again.")

    def limits(self) -> TimingLimits:
        """Return the time limits of a measurement."""
        from gpuprof.profiling.worker.job import limits_within

        return limits_within(self.time_limit_s, self.profiler_limit_s)


class ReportSettings(Settings):
    """Reports of profilers, in place of measurements."""

    title: ClassVar[str] = "Reports of profilers"

    reports: tuple[Path, ...] = option(
        (),
        "Report to read in place of running: .nsys-rep, .sqlite, .ncu-rep, .csv, trace.json or ONNX Runtime's profile; "
        "reports of one run are joined: kernels, counters, nodes.",
        "--from-report",
        metavar="REPORT",
        repeated=True,
    )
    runs: str | None = option(
        None,
        "Runs of the model in a report: their number, or a regular expression for the names of their ranges, in which "
        "groups model and batch identify the workload.",
        metavar="PATTERN|N",
    )
    device_file: Path | None = option(
        None, "TOML file with GPUs that gpuprof does not know, for --from-report.", metavar="FILE"
    )


def profile(
    models: Sequence[PathArgument] | PathArgument,
    workloads: ProfileWorkloads | None = None,
    *,
    settings: ProfileSettings | None = None,
    progress: ProgressCallback = say_nothing,
    **fields: Any,
) -> ProfileResult:
    """Measure models on this machine: latency, throughput, memory and the time of every op.

    Workloads already in the database are not measured again, so that an interrupted profile can be resumed. Raises
    `InputError` when a model, batch, share or device is wrong; if possible before the first measurement;
    `UnavailableError` when no collector on this machine can measure the device.

    Parameters
    ----------
    models : sequence of path, or one of them
        ONNX files, or ``"NAME=FILE"``.
    workloads : ProfileWorkloads, optional
        Fields may be given as keywords instead.

    Examples
    --------
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> quick = gpuprof.ProfileSettings(time_limit_s=0.2)
    >>> measured = gpuprof.profile(
    ...     [file], batches=(1, 4), shares=("100",), device="cpu", db="db", settings=quick
    ... )
    >>> frame = measured.to_frame()
    >>> frame["batch"].tolist(), bool((frame["latency_p50_ms"] > 0).all())
    ([1, 4], True)
    """
    chosen, settings = ProfileWorkloads.collect(workloads, fields), settings or ProfileSettings()
    if not models:
        raise InputError("no model was named", "gpuprof profile MODEL.onnx; gpuprof zoo build makes some")
    if chosen.engine == "ray":
        return _profile_cluster(planning.parse_models(name_models(models)), chosen, settings, progress)
    with NoteList() as notes:
        device = resolve_local_device(chosen.device, settings.collector, notes.add)
        collector, why = choose_collector(settings.collector, device.kind)
        path = database_path(chosen.db)
        sizes = chosen.batches or chosen.usual_batches
        parts = resolve_shares(chosen.shares, device)
        neighbours = [planning.parse_neighbour(text, device) for text in chosen.beside]
        named_models = _read_models(models, path, settings, collector)
        if chosen.batches is None and not chosen.igniter:
            pairs = [planning.free_batch_or_keep(model, sizes, path / COPIES) for model in named_models]
            notes.add(*(why for _, why in pairs if why))
            named_models = [model for model, _ in pairs]
        else:
            named_models = [planning.free_batch_model(model, sizes, path / COPIES) for model in named_models]
        notes.add(*_describe_sizes(named_models))
        if chosen.igniter:
            cells: Sequence[Cell] = [cell for model in named_models for cell in planning.igniter_cells(model)]
        else:
            cells = planning.plan_cells(named_models, sizes, parts, settings.processes, neighbours)
        progress(Progress(f"{device.name}, collector {why}"))
        campaign = Campaign(
            KernelDb.create(path),
            device,
            collector,
            settings.force,
            settings.limits(),
            settings.keep_unstable,
            settings.repeat,
            settings.repeat_every_s,
        )
        return _measure(campaign, cells, notes, progress)


def _profile_cluster(
    models: Sequence[NamedModel], workloads: ProfileWorkloads, settings: ProfileSettings, progress: ProgressCallback
) -> ProfileResult:
    """Measure models at batch sizes on the GPUs, or machines, of a Ray cluster: that of ``RAY_ADDRESS``, or the local.

    Raises `GpuprofError` when a measurement failed; earlier rows stay in the database.
    """
    from gpuprof.profiling.sweep.ray_sweep import sweep_cluster, task_of

    options = [*workloads.list_words(("batches", "device", "db", "engine")), *settings.list_words()]
    batches = workloads.batches or workloads.usual_batches
    tasks = [task_of(model.name, model.path, size, options) for model in models for size in batches]
    path = database_path(workloads.db)
    rows: list[ModelRow | ColocationRow] = []
    for entry in sweep_cluster(
        KernelDb.create(path), tasks, workloads.device, lambda message: progress(Progress(message))
    ):
        rows.append(entry)
        progress(Progress(f"{entry.model} at batch {entry.batch}: row {len(rows)}"))
    return ProfileResult(
        notes=() if rows else ("everything was measured before; --force measures it again",),
        device=workloads.device or "",
        measured=tuple(map(_describe_row, rows)),
        cells=len(rows),
        failures=(),
        unstable=tuple(f"{row.model}:{row.batch}:{_share_of(row)}" for row in rows if row.stable is False),
        database=path,
    )


def resolve_shares(shares: Sequence[Share | str] | None, device: Device) -> tuple[Share, ...]:
    """Return shares of a device; None: its default shares."""
    if shares is None:
        return planning.parse_shares(None, device)
    units = device.compute_units
    return tuple(sorted({parse_share(share, units) if isinstance(share, str) else share for share in shares}))


def _read_models(
    models: Sequence[PathArgument] | PathArgument, db: Path, settings: ProfileSettings, collector: Collector
) -> list[NamedModel]:
    """Return the named models, each at every size and with its given inputs."""
    parsed = planning.parse_models(name_models(models))
    if settings.precision is not None:
        provider = getattr(collector, "provider", ORT_CPU)
        parsed = planning.convert_models(parsed, db / COPIES, provider)
    files = {name: Path(file) for name, file in settings.input_data.items()}
    return planning.attach_data(planning.size_models(parsed, combine_sizes(settings.dims)), files)


def _describe_sizes(models: Sequence[NamedModel]) -> list[str]:
    """Return remarks on assumed sizes, and on models without op measurements."""
    from gpuprof.graph.load import describe_reading, read_fixed_batch

    graphs = [model.load_graph(read_fixed_batch(model.path) or 1) for model in models]
    inputs = {f"{model.name}: inputs from {model.data}": None for model in models if model.data}
    whole = {
        f"{graph.name} is measured as a whole, not op by op: {graph.unread}": None for graph in graphs if graph.unread
    }
    return [*inputs, *(remark for graph in graphs for remark in describe_reading(graph)), *whole]


def _measure(campaign: Campaign, cells: Sequence[Cell], notes: NoteList, progress: ProgressCallback) -> ProfileResult:
    outcomes = run_campaign(campaign, cells, progress)
    progress(Progress("what serving adds to a request", len(cells), len(cells)))
    measure_serving(campaign.database, campaign.device, notes.add)
    if old := sum(not outcome.measured_now for outcome in outcomes):
        notes.add(f"{old} of {len(outcomes)} were measured before; --force measures them again")
    for name, sha256 in {cell.job.graph.name: cell.job.graph.sha256 for cell in cells}.items():
        if (output := campaign.verdicts.mixed_output(sha256)) is not None:
            notes.add(f"{describe_mixing(name, output)}; place and serve give it batches of 1")
    return ProfileResult(
        notes=notes.all(),
        device=campaign.device.name,
        measured=tuple(
            {**_describe_row(row), "measured_now": outcome.measured_now}
            for outcome in outcomes
            for row in (outcome.row, *outcome.others)
        ),
        cells=len(outcomes),
        failures=tuple(outcome.row.error for outcome in outcomes if outcome.row.error),
        unstable=tuple(str(outcome.cell) for outcome in outcomes if outcome.row.stable is False),
        database=campaign.database.path,
        lost=tuple(dict.fromkeys(reason for outcome in outcomes for reason in outcome.lost)),
    )


def run_campaign(
    campaign: Campaign, cells: Sequence[Cell], progress: ProgressCallback, ceilings: Sequence[Share] | None = None
) -> list[CellResult]:
    """Measure ``cells``, and the device's peak rates under their shares, or under the shares in ``ceilings``."""
    outcomes: list[CellResult] = []
    total = sum(map(campaign.count_runs, cells))
    begin: Callable[[Cell], None] = lambda cell: progress(Progress(str(cell), len(outcomes), total))  # noqa: E731
    for outcome in campaign.run(cells, begin):
        outcomes.append(outcome)
        progress(Progress(str(outcome.cell), len(outcomes), total))
    progress(Progress("what the device can do at best", total, total))
    campaign.measure_ceilings([cell.job.share for cell in cells] if ceilings is None else ceilings)
    return outcomes


def _describe_row(row: ModelRow | ColocationRow) -> dict[str, object]:
    return {**asdict(row), "share": str(_share_of(row))}


def _share_of(row: ModelRow | ColocationRow) -> Share:
    return Share(row.sm_share_pct, row.mig_profile)


@dataclass(frozen=True, kw_only=True)
class ProfileResult(Result):
    """The database's rows for each requested workload.

    Attributes
    ----------
    device : str
        Empty for measurements on several devices of a cluster.
    measured : tuple of mapping
        Rows of the tables ``models`` and ``colocations``, with ``share`` as text and whether it was ``measured_now``.
    cells : int
        Number of requested workloads; a workload with neighbours has a row for each of them.
    failures : tuple of str
        Reasons for failed measurements, one for each workload.
    unstable : tuple of str
        Workloads whose times vary too much to be trusted.
    lost : tuple of str
        Reasons for missing kernel counters that were requested, each reason once.
    """

    device: str
    measured: tuple[Mapping[str, object], ...]
    cells: int
    failures: tuple[str, ...]
    unstable: tuple[str, ...]
    database: Path
    lost: tuple[str, ...] = ()

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each workload and for each of its neighbours."""
        return self.measured

    def require_trusted(self) -> None:
        """Raise an error if something failed or is unstable; its rows are in the database all the same.

        Raises `UnavailableError` when something could not be measured; `UnstableError` when the machine is too noisy.
        """
        if self.failures:
            raise UnavailableError(f"{len(self.failures)} of {self.cells} could not be measured: {self.failures[0]}")
        if self.unstable:
            first = self.unstable[0]
            verb = "is" if len(self.unstable) == 1 else "are"
            raise UnstableError(
                f"{len(self.unstable)} of {self.cells} {verb} unstable, first {first}: the machine is too noisy",
                f"they are kept and marked in {self.database}; the same command measures them again",
            )


@dataclass(frozen=True, kw_only=True)
class IngestResult(Result):
    """Profiler reports of one model at one batch size, as rows."""

    models: tuple[ModelRow, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return the rows added to the table ``models``."""
        return [_describe_row(row) for row in self.models]


def ingest_reports(
    models: Sequence[str],
    reports: ReportSettings,
    workloads: ProfileWorkloads,
    dims: Mapping[str, int | Sequence[int]] | None = None,
) -> IngestResult:
    """Append the content of reports: a run for each model, batch size and GPU with kernels.

    Raises `InputError` when a report cannot be read, or more than one workload was named. ``models``: empty (the first
    report's name is used), or a single ONNX file, ``"NAME=FILE"``, or name; ``reports``: by default the runs are
    gpuprof's own ranges, else the whole report is a single run; ``workloads``: the recorded batch size and share, by
    default the whole device, and the device, by default the GPU that the reports name or describe; ``dims``: sizes of
    free dimensions in the recording, a single size for each.
    """
    files, runs, batches = list(reports.reports), reports.runs, workloads.batches or workloads.usual_batches
    names_batch = runs is not None and "(?P<batch>" in runs
    if (len(batches) != 1 and not names_batch) or len(models) > 1:
        raise InputError(
            f"a report is of one model at one batch size but got {len(models)} and {len(batches)}",
            "say which was recorded: --batch 8",
        )
    recorded, *more = combine_sizes(dims or {})
    if more:
        raise InputError(
            "a report is of one size of each dimension", f"say which: --dim {describe_sizes(recorded[:1])}"
        )
    notes: list[str] = []
    rows: list[ModelRow] = []
    own_devices = read_own_devices(reports.device_file)
    device = resolve_device(workloads.device, None, own_devices, notes.append) if workloads.device else None
    database, evidence = KernelDb.create(database_path(workloads.db)), read_report_set(files)
    for (model, batch), selected in split_runs(evidence, runs).items():
        for recording in recordings_of(evidence, selected):
            target = device
            if target is None and recording.is_on_cpu:  # no report describes a CPU
                target = resolve_device("cpu", None, None, notes.append)
                notes.append(f"the report does not name its CPU: taken for {target.name}; --device names another")
            target = target or device_of_recording(recording)
            part = resolve_shares(workloads.shares, target)[0] if workloads.shares else Share()
            name = model or (models[0] if models else None)
            job = replayed_job(name, batch or batches[0], part, files, recorded)
            row, remarks = ingest(database, recording, files, job, target)
            notes += remarks
            rows.append(row)
    return IngestResult(notes=tuple(dict.fromkeys(notes)), models=tuple(rows))
