"""Measures models on this machine, or on a cluster, and keeps what was measured in the kernel database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share, parse_share
from gpuprof.errors import InputError, UnavailableError, UnstableError
from gpuprof.kernel_db.store import COPIES, KernelDb
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.devices import database_path, resolve_local_device
from gpuprof.pipeline.result import Progress, ProgressCallback, Result, ignore_progress
from gpuprof.pipeline.serving_cost import measure_serving
from gpuprof.profiling.child.job import TimingLimits, limits_within
from gpuprof.profiling.collector import Collector, choose
from gpuprof.profiling.per_op.per_op import OpOutcome, PerOp
from gpuprof.profiling.sweep import planning
from gpuprof.profiling.sweep.campaign import Campaign, Cell, CellResult
from gpuprof.profiling.sweep.igniter_cells import igniter_cells

if TYPE_CHECKING:
    from gpuprof.profiling.sweep.planning import NamedModel

DEFAULT_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """With what models are measured, and how long.

    Attributes
    ----------
    collector : str
        What measures; ``"auto"``: the first that works here.
    processes : tuple of int
        Copies that run at once in a share.
    time_limit_s : float
        For the timing of one row at most.
    profiler_limit_s : float
        After which a profiler counts as hung and is ended.
    force : bool
        Measure what is in the database already, too.
    keep_unstable : bool
        Leave what was measured and is marked unstable as it is.
    """

    collector: str = "auto"
    processes: tuple[int, ...] = (1,)
    time_limit_s: float = 10.0
    profiler_limit_s: float = 900.0
    force: bool = False
    keep_unstable: bool = False

    def limits(self) -> TimingLimits:
        """Return when a measurement ends."""
        return limits_within(self.time_limit_s, self.profiler_limit_s)


@dataclass(frozen=True, slots=True)
class ProfileProgress(Progress):
    """How far profiling has come, and what was just put into the database.

    Attributes
    ----------
    rows : tuple of mapping
        As `ProfileResult.rows` has them.
    """

    rows: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProfileResult(Result):
    """What the database holds now of each workload that was to be measured.

    Attributes
    ----------
    device : str
        Empty where several devices of a cluster measured.
    measured : tuple of mapping
        Rows of the tables ``models`` and ``colocations``, with ``share`` as text and whether it was ``measured_now``.
    cells : int
        Workloads that were to be measured; one beside others has a row for each of them.
    failures : tuple of str
        Why a workload could not be measured, one a workload.
    unstable : tuple of str
        Workloads whose times vary too much to be trusted.
    database : Path
    """

    device: str
    measured: tuple[Mapping[str, object], ...]
    cells: int
    failures: tuple[str, ...]
    unstable: tuple[str, ...]
    database: Path

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each workload and for each that ran beside it."""
        return self.measured

    def require_trusted(self) -> None:
        """Refuse a result of which something failed or is unstable; its rows are in the database all the same.

        Raises
        ------
        UnavailableError
            When something could not be measured.
        UnstableError
            When the machine is too noisy.
        """
        if self.failures:
            raise UnavailableError(f"{len(self.failures)} of {self.cells} could not be measured: {self.failures[0]}")
        if self.unstable:
            first = self.unstable[0]
            raise UnstableError(
                f"{len(self.unstable)} of {self.cells} are unstable, first {first}: the machine is too noisy",
                f"they are kept and marked in {self.database}; the same command measures them again",
            )


@dataclass(frozen=True, kw_only=True)
class OpProfileResult(Result):
    """What the database holds now of each distinct op, by share."""

    outcomes: Mapping[Share, tuple[OpOutcome, ...]]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each op under each share."""
        found = (one for outcomes in self.outcomes.values() for one in outcomes)
        return [{**asdict(one.row), "measured_now": one.measured_now} for one in found]

    def type_rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each type of op under each share, the longest first."""
        return [row for share, outcomes in self.outcomes.items() for row in _sum_by_type(outcomes, str(share))]


def profile(
    models: Sequence[PathArgument],
    *,
    batches: Sequence[int] = DEFAULT_BATCHES,
    shares: Sequence[Share | str] | None = None,
    beside: Sequence[str] = (),
    device: str | None = None,
    db: PathArgument | None = None,
    settings: ProfileSettings | None = None,
    progress: ProgressCallback = ignore_progress,
) -> ProfileResult:
    """Measure models on this machine: latency, throughput, memory and the time of every op.

    What is in the database already is not measured again; interrupted, it goes on where it was.

    Parameters
    ----------
    models : sequence of path
        ONNX files, or ``"NAME=FILE"``.
    batches : sequence of int
    shares : sequence of Share or str, optional
        ``"50"`` percent, ``"1core"``, ``"3g.40gb"``; by default of a CPU 1, 2, 4, … and all cores, of a GPU the whole.
    beside : sequence of str
        ``"MODEL[:BATCH[:SHARE]]"``: measure again with this running on the device, too.
    device : str, optional
        ``"cpu"``, ``"gpu"`` or a GPU's name; by default the first GPU that can be measured here, else the CPU.
    db : path, optional
        Kernel database; by default ``GPUPROF_DB``, else ``./gpuprof-db``, which is made.
    settings : ProfileSettings, optional
    progress : callable, optional
        Told before each workload, and with its rows (`ProfileProgress`) once they are on the disk.

    Raises
    ------
    InputError
        When a model, batch, share or device is wrong; before anything is measured, where that can be known.
    UnavailableError
        When nothing here can measure the device.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import gpuprof
    >>> folder = Path(tempfile.mkdtemp())
    >>> file = gpuprof.build_model("mlp", folder / "mlp.onnx")
    >>> quick = gpuprof.ProfileSettings(time_limit_s=0.2)
    >>> measured = gpuprof.profile(
    ...     [file], batches=(1, 4), shares=("100",), device="cpu", db=folder / "db", settings=quick
    ... )
    >>> frame = measured.to_frame()
    >>> frame["batch"].tolist(), bool((frame["latency_p50_ms"] > 0).all())
    ([1, 4], True)
    """
    settings = settings or ProfileSettings()
    target = _choose_target(device, settings)
    path = database_path(db)
    sizes = _check_batches(batches)
    parts = _resolve_shares(shares, target.device)
    neighbours = [planning.parse_neighbour(text, target.device) for text in beside]
    named = _free_models(models, sizes, path)
    cells = planning.plan_cells(named, sizes, parts, _check_batches(settings.processes), neighbours)
    return _measure(target, cells, path, settings, progress)


def profile_for_igniter(
    models: Sequence[PathArgument],
    *,
    batches: Sequence[int] = DEFAULT_BATCHES,
    device: str | None = None,
    db: PathArgument | None = None,
    settings: ProfileSettings | None = None,
    progress: ProgressCallback = ignore_progress,
) -> ProfileResult:
    """Measure what fitting iGniter's coefficients takes: eleven configurations of each model, 2 to 5 copies at once.

    Parameters and errors are those of `profile`; ``batches`` are those that a model must be able to run at.
    """
    settings = settings or ProfileSettings()
    target = _choose_target(device, settings)
    path = database_path(db)
    named = _free_models(models, _check_batches(batches), path)
    return _measure(target, [cell for model in named for cell in igniter_cells(model)], path, settings, progress)


def profile_ops(
    models: Sequence[PathArgument],
    *,
    batches: Sequence[int] = DEFAULT_BATCHES,
    shares: Sequence[Share | str] | None = None,
    device: str | None = None,
    db: PathArgument | None = None,
    settings: ProfileSettings | None = None,
    progress: ProgressCallback = ignore_progress,
) -> OpProfileResult:
    """Measure each distinct op of all models once, as a model of its own.

    Parameters and errors are those of `profile`; ops are measured one by one, in one process.
    """
    settings = settings or ProfileSettings()
    target = _choose_target(device, settings)
    path = database_path(db)
    sizes = _check_batches(batches)
    named = _free_models(models, sizes, path)
    plans = [
        PerOp(KernelDb.create(path), target.device, target.collector, part, settings.force)
        for part in _resolve_shares(shares, target.device)
    ]
    progress(Progress(target.headline))
    outcomes = {plan.share: _measure_ops(plan, named, sizes, progress) for plan in plans}
    return OpProfileResult(notes=tuple(target.notes), outcomes=outcomes)


def profile_cluster(
    models: Sequence[str],
    *,
    batches: Sequence[int] = DEFAULT_BATCHES,
    options: Sequence[str] = (),
    device: str | None = None,
    address: str = "",
    db: PathArgument | None = None,
    progress: ProgressCallback = ignore_progress,
) -> ProfileResult:
    """Measure models at batch sizes on the GPUs, or machines, of a Ray cluster.

    Parameters
    ----------
    models : sequence of str
        ONNX files, or ``"NAME=FILE"``.
    batches : sequence of int
    options : sequence of str
        Further options of ``gpuprof profile``, for each place.
    device : str, optional
        Use only places with this device.
    address : str
        Of the cluster; empty: the one of this machine.
    db : path, optional
    progress : callable, optional
        Told of rows as they come in, and of what is tried again.

    Raises
    ------
    GpuprofError
        When a model is not there, or something could not be measured; what came before is in the database.
    """
    from gpuprof.profiling.sweep.ray_sweep import RaySweep, task_of

    tasks = [
        task_of(model.name, model.path, size, options)
        for model in planning.parse_models(models)
        for size in _check_batches(batches)
    ]
    path = database_path(db)
    sweep = RaySweep(KernelDb.create(path), address)
    rows: list[Mapping[str, object]] = []
    try:
        for found in sweep.run(tasks, device, lambda message: progress(Progress(message))):
            row = {**found, "share": str(Share(found["sm_share_pct"], found["mig_profile"]))}
            rows.append(row)
            progress(ProfileProgress(f"{len(tasks)} models and batches", len(rows), rows=(row,)))
    finally:
        sweep.close()
    return ProfileResult(
        notes=() if rows else ("everything was measured before; --force measures it again",),
        device=device or "",
        measured=tuple(rows),
        cells=len(rows),
        failures=(),
        unstable=tuple(f"{row['model']}:{row['batch']}:{row['share']}" for row in rows if row["stable"] is False),
        database=path,
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """The device that is measured, and what measures it."""

    device: Device
    collector: Collector
    headline: str
    notes: list[str] = field(default_factory=list)


def _choose_target(device: str | None, settings: ProfileSettings) -> _Target:
    notes: list[str] = []
    here = resolve_local_device(device, settings.collector, notes.append)
    collector, why = choose(settings.collector, here.kind)
    return _Target(here, collector, f"{here.name}, collector {why}", notes)


def _check_batches(batches: Sequence[int]) -> tuple[int, ...]:
    return planning.parse_batches(",".join(map(str, batches)))


def _resolve_shares(shares: Sequence[Share | str] | None, device: Device) -> tuple[Share, ...]:
    if shares is None:
        return planning.parse_shares(None, device)
    units = device.compute_units
    return tuple(sorted({parse_share(one, units) if isinstance(one, str) else one for one in shares}))


def _free_models(models: Sequence[PathArgument], batches: Sequence[int], db: Path) -> list[NamedModel]:
    if not models:
        raise InputError("no model was named", "gpuprof profile MODEL.onnx; gpuprof zoo build makes some")
    parsed = planning.parse_models([str(model) for model in models])
    return [planning.free_batch_model(model, batches, db / COPIES) for model in parsed]


def _measure(
    target: _Target, cells: Sequence[Cell], db: Path, settings: ProfileSettings, progress: ProgressCallback
) -> ProfileResult:
    campaign = Campaign(
        KernelDb.create(db), target.device, target.collector, settings.force, settings.limits(), settings.keep_unstable
    )
    progress(Progress(target.headline))
    outcomes = run_campaign(campaign, cells, progress)
    progress(Progress("what serving adds to a request", len(cells), len(cells)))
    notes = target.notes
    measure_serving(campaign.database, campaign.device, notes.append)
    if old := sum(not outcome.measured_now for outcome in outcomes):
        notes.append(f"{old} of {len(outcomes)} were measured before; --force measures them again")
    notes += _describe_mixing(campaign, cells)
    return ProfileResult(
        notes=tuple(notes),
        device=target.device.name,
        measured=tuple(row for outcome in outcomes for row in _rows(outcome)),
        cells=len(outcomes),
        failures=tuple(outcome.row.error for outcome in outcomes if outcome.row.error),
        unstable=tuple(str(outcome.cell) for outcome in outcomes if outcome.row.stable is False),
        database=db,
    )


def run_campaign(
    campaign: Campaign, cells: Sequence[Cell], progress: ProgressCallback, ceilings: Sequence[Share] | None = None
) -> list[CellResult]:
    """Measure ``cells`` and what the device can do at best under their shares, or under those of ``ceilings``."""
    outcomes: list[CellResult] = []
    begin: Callable[[Cell], None] = lambda cell: progress(Progress(str(cell), len(outcomes), len(cells)))  # noqa: E731
    for outcome in campaign.run(cells, begin):
        outcomes.append(outcome)
        progress(ProfileProgress(str(outcome.cell), len(outcomes), len(cells), tuple(_rows(outcome))))
    progress(Progress("what the device can do at best", len(cells), len(cells)))
    campaign.measure_ceilings([cell.job.share for cell in cells] if ceilings is None else ceilings)
    return outcomes


def _measure_ops(
    plan: PerOp, models: Sequence[NamedModel], batches: Sequence[int], progress: ProgressCallback
) -> tuple[OpOutcome, ...]:
    missing, outcomes = plan.pending(models, batches)
    known, step = len(outcomes), f"ops on {plan.share}"
    for outcome in plan.run(missing):
        outcomes.append(outcome)
        progress(Progress(step, len(outcomes) - known, len(missing)))
    return tuple(outcomes)


def _describe_mixing(campaign: Campaign, cells: Sequence[Cell]) -> list[str]:
    from gpuprof.runtime.batch_verdicts import describe_mixing

    graphs = {cell.job.graph.name: cell.job.graph for cell in cells}.values()
    mixed = ((graph.name, campaign.verdicts.mixed_output(graph.sha256)) for graph in graphs)
    return [
        f"{describe_mixing(name, output)}; place and serve give it batches of 1"
        for name, output in mixed
        if output is not None
    ]


def _rows(outcome: CellResult) -> list[dict[str, object]]:
    return [
        {**asdict(row), "share": str(Share(row.sm_share_pct, row.mig_profile)), "measured_now": outcome.measured_now}
        for row in (outcome.row, *outcome.others)
    ]


def _sum_by_type(outcomes: Sequence[OpOutcome], share: str) -> list[dict[str, object]]:
    types: dict[str, list[OpOutcome]] = {}
    for outcome in outcomes:
        types.setdefault(outcome.row.op_type, []).append(outcome)
    rows: list[dict[str, object]] = [
        {
            "op_type": op_type,
            "share": share,
            "ops": len(ops),
            "new": sum(one.measured_now for one in ops),
            "untimed": sum(one.row.duration_p50_ns is None for one in ops),
            "sum_ms": sum((one.row.duration_p50_ns or 0) for one in ops) / 1e6,
        }
        for op_type, ops in types.items()
    ]
    return sorted(rows, key=lambda row: -float(str(row["sum_ms"])))
