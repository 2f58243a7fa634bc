"""Calibration of interference on a device, including iGniter's coefficients of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from gpuprof.domain.share import Share
from gpuprof.domain.validation import Positive
from gpuprof.errors import InputError, UnavailableError
from gpuprof.kernel_db.store import COPIES, KernelDb
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.devices import database_path, resolve_device, resolve_local_device
from gpuprof.pipeline.profile import ProfileSettings, run_campaign
from gpuprof.pipeline.result import NoteList, Progress, ProgressCallback, Result, say_nothing
from gpuprof.pipeline.settings import Settings, option

if TYPE_CHECKING:
    from gpuprof.domain.device import Device
    from gpuprof.estimators.interference.colocation import RankedModel

#: Networks of ``quick``: small, of several kinds, and enough of them for an interval of their own.
_QUICK_NETWORKS = ("squeezenet", "shufflenet", "unet", "transformer_encoder")


@dataclass(frozen=True, kw_only=True)
class CalibrateResult(Result):
    """The coefficients and interference models fitted to a device.

    Attributes
    ----------
    coefficients : tuple of mapping
        iGniter's coefficients of a GPU and its models, or of each network measured by ``quick`` the median of measured
        over predicted times: their owner, name, value and unit.
    ranking : tuple of RankedModel
        Interference models, the best first, by the error with each victim left out; empty without co-located
        measurements.
    """

    device: str
    coefficients: tuple[Mapping[str, object], ...] = ()
    ranking: tuple[RankedModel, ...] = ()

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return the coefficients, without them a row for each interference model."""
        return self.coefficients or self.ranking_rows()

    def ranking_rows(self) -> list[dict[str, object]]:
        """Return a row for each interference model."""
        return [_ranked_row(model) for model in self.ranking]


class CalibrateOptions(Settings):
    """Device, database, and the measurement of models."""

    title: ClassVar[str] = "Fit and database"

    device: str | None = option(
        None, "Device of the catalogue or the database; with MODELs one of this machine.", values="devices"
    )
    quick: bool = option(
        False, "Measure a few small networks here, two batches each, which scale the estimates for all others."
    )
    db: Path | None = option(None, "Kernel database; default: GPUPROF_DB, or gpuprof-db.")
    time_limit_s: Positive = option(5.0, "Longest time to measure one row.", "--time-limit", unit="s")


def calibrate(
    models: Sequence[PathArgument] = (),
    options: CalibrateOptions | None = None,
    *,
    progress: ProgressCallback = say_nothing,
    **fields: Any,
) -> CalibrateResult:
    """Fit the interference between workloads on a device, for estimates with neighbours.

    Missing measurements of ``models`` come first: on a GPU iGniter's eleven configurations and concurrent copies, on a
    CPU two to four co-located models. On a GPU iGniter's coefficients are fitted and stored in the database; on any
    device the interference models are fitted to the co-located measurements and judged by leaving out each victim. With
    ``quick``, a few small networks are measured alone instead: they scale the estimates for other models on this
    device, and narrow their intervals. Raises `InputError` when too little was measured, or a file cannot be read;
    `UnavailableError` when a measurement failed.

    Parameters
    ----------
    models : sequence of path
        ONNX files, or ``"NAME=FILE"``, to measure here first.
    options : CalibrateOptions, optional
        Fields may be given as keywords instead.

    Examples
    --------
    >>> import gpuprof
    >>> files = [gpuprof.build_model("random_mlp", f"mlp{seed}.onnx", seed=seed) for seed in range(2)]
    >>> fitted = gpuprof.calibrate(files, device="cpu", db="db", time_limit_s=0.2)
    >>> bool((fitted.to_frame()["mean_pct"] >= 0).all())
    True
    """
    chosen = CalibrateOptions.collect(options, fields)
    path = database_path(chosen.db)
    with NoteList() as notes:
        if chosen.quick:
            return _calibrate_quickly(models, chosen, notes, progress)
        target = _measure(models, chosen, notes, progress) if models else resolve_device(chosen.device, KernelDb(path))
        database = KernelDb(path)
        if target.kind != "gpu":
            return CalibrateResult(notes=notes.all(), device=target.name, ranking=_rank(database, target, progress))
        # Co-located measurements suffice for the interference models, with or without iGniter's coefficients.
        colocated = database.read_table("colocations", ["device"], {"device": target.name}).num_rows
        fitted = _fit_igniter(database, target, notes, required=not colocated)
        ranking = _rank(database, target, progress) if colocated else ()
        return CalibrateResult(notes=notes.all(), device=target.name, coefficients=fitted, ranking=ranking)


def _calibrate_quickly(
    models: Sequence[PathArgument], options: CalibrateOptions, notes: NoteList, progress: ProgressCallback
) -> CalibrateResult:
    """Measure small networks alone; return their ratios of measured over predicted times."""
    from gpuprof.estimators.database import DatabaseEstimator
    from gpuprof.zoo.architecture import find_architecture
    from gpuprof.zoo.build import build

    if models:
        raise InputError("--quick measures networks of its own and no MODEL", "leave out --quick, or the models")
    folder = database_path(options.db) / COPIES
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.onnx" for name in _QUICK_NETWORKS]
    for name, file in zip(_QUICK_NETWORKS, files, strict=True):
        if not file.is_file():
            build(find_architecture(name), file)
    target = _measure(files, options, notes, progress)
    ratios = DatabaseEstimator(KernelDb(database_path(options.db))).list_ratios(target)
    medians = [
        _describe_coefficient(name, "measured / predicted", median(ratios[name]))
        for name in _QUICK_NETWORKS
        if name in ratios
    ]
    notes.add(f"estimates of models without measurements on {target.name} are scaled by {len(ratios)} measured ones")
    return CalibrateResult(notes=notes.all(), device=target.name, coefficients=tuple(medians))


def _fit_igniter(database: KernelDb, device: Device, notes: NoteList, required: bool) -> tuple[dict[str, object], ...]:
    """Fit iGniter's coefficients to the database's measurements, store them there, and return a row for each.

    Where the measurements are too few, return none with a note; raises `InputError` when the coefficients are
    ``required``, because no other model can be fitted.
    """
    from gpuprof.estimators.igniter.igniter import (
        coefficients_path,
        fit_hardware,
        fit_workload,
        profile_of,
        write_coefficients,
    )

    try:
        profile, profiles = profile_of(database, device)
        hardware = fit_hardware(profile)
        workloads = {name: fit_workload(each, hardware) for name, each in profiles.items()}
    except InputError as error:
        if required:
            raise
        notes.add(f"iGniter's coefficients were not fitted: {error}")
        return ()
    path = coefficients_path(database.path, device.name)
    write_coefficients(path, device.name, hardware, workloads)
    notes.add(f"wrote {path}")
    units = {"max_power_w": "W", "max_clock_mhz": "MHz", "idle_power_w": "W", "pcie_bytes_per_ms": "bytes/ms"}
    units |= {"alpha_f": "MHz/W", "alpha_sch": "ms a workload", "beta_sch": "ms", "share_unit": "fraction"}
    rows = [_describe_coefficient(device.name, name, getattr(hardware, name), unit) for name, unit in units.items()]
    for model, fitted in workloads.items():
        values = {f"k{i}": value for i, value in enumerate(fitted.active, 1)}
        values |= {"alpha_cache": fitted.cache, "k_sch": fitted.launch_ms, "kernels": float(fitted.kernels)}
        values |= {"alpha_power": fitted.power[0], "beta_power": fitted.power[1]}
        values |= {"alpha_cacheutil": fitted.l2[0], "beta_cacheutil": fitted.l2[1]}
        rows += [_describe_coefficient(model, name, value) for name, value in values.items()]
    return tuple(rows)


def _describe_coefficient(owner: str, name: str, value: float, unit: str = "") -> dict[str, object]:
    return {"of": owner, "coefficient": name, "value": value, "unit": unit}


def _measure(
    models: Sequence[PathArgument], options: CalibrateOptions, notes: NoteList, progress: ProgressCallback
) -> Device:
    """Measure the workloads that the device's interference models need and the database lacks; return the device."""
    from gpuprof.profiling.collector import choose_collector
    from gpuprof.profiling.sweep import planning
    from gpuprof.profiling.sweep.campaign import Campaign, Cell

    settings = ProfileSettings(time_limit_s=options.time_limit_s)
    path, here = database_path(options.db), resolve_local_device(options.device, settings.collector, notes.add)
    collector, why = choose_collector(settings.collector, here.kind)
    named_models = planning.parse_models([str(model) for model in models])
    if options.quick:
        cells = tuple(Cell(model.job(batch, Share())) for model in named_models for batch in planning.COLOCATED_BATCHES)
    elif here.kind == "gpu":
        batches = sorted({batch for batch, _ in planning.CONFIGURATIONS})
        free_models = [planning.free_batch_model(model, batches, path / COPIES) for model in named_models]
        cells = tuple(cell for model in free_models for cell in planning.igniter_cells(model))
    else:
        sizes = planning.COLOCATED_BATCHES
        cells = planning.colocation_cells(
            [planning.free_batch_model(model, sizes, path / COPIES) for model in named_models]
        )
    progress(Progress(f"{here.name}, collector {why}"))
    campaign = Campaign(KernelDb.create(path), here, collector, limits=settings.limits())
    outcomes = run_campaign(campaign, cells, progress, [Share()])
    failed = [outcome.row.error for outcome in outcomes if outcome.row.error]
    old = sum(not outcome.measured_now for outcome in outcomes)
    notes.add(
        f"{len(outcomes) - old} measured, {old} {'was' if old == 1 else 'were'} there before, {len(failed)} failed"
    )
    if failed:
        raise UnavailableError(f"{len(failed)} of {len(outcomes)} could not be measured: {failed[0]}")
    return resolve_device(here.name, KernelDb(path))


def _rank(database: KernelDb, device: Device, progress: ProgressCallback) -> tuple[RankedModel, ...]:
    """Return the interference models of the device, best first."""
    from gpuprof.estimators.database import DatabaseEstimator

    progress(Progress("fitting interference models", 0, 1))
    colocations = DatabaseEstimator(database).colocations
    ranked = colocations.rank_models(device)
    if not ranked:
        raise InputError(
            f"too little was co-located on {device.name} to fit an interference model: "
            f"{len(colocations.list_measured(device))} latencies",
            "gpuprof calibrate ONE.onnx TWO.onnx, or gpuprof profile --beside",
        )
    return tuple(ranked)


def _ranked_row(ranked: RankedModel) -> dict[str, object]:
    weights = getattr(ranked.model, "weights_", None)
    return {
        "interference": ranked.name,
        **{name: getattr(ranked, name) for name in ("left_out", "rows", "mean_pct", "p95_pct", "low", "high")},
        "interval": f"{ranked.low:.2f} … {ranked.high:.2f}",
        "coefficients": None if weights is None else ", ".join(f"{float(weight):.3g}" for weight in weights),
    }
