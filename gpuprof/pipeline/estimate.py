"""Predictions of a model's requirements at any batch, share and device, with the source of each figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    MEASURED,
    Estimate,
    Estimator,
    Figure,
    Workload,
    describe_unknown_ops,
    read_neighbour,
)
from gpuprof.domain.mig import count_profiles, maximal_layouts
from gpuprof.domain.number_format import GIB
from gpuprof.domain.share import Share, parse_share
from gpuprof.domain.sizes import combine_sizes, describe_sizes, require_dimensions, sized_name, split_name
from gpuprof.domain.validation import Count, Positive
from gpuprof.errors import InputError
from gpuprof.pipeline.arguments import PathArgument, name_models
from gpuprof.pipeline.devices import (
    database_path,
    describe_choice,
    describe_empty,
    make_database_estimator,
    make_named_estimator,
    open_database,
    read_own_devices,
    resolve_device,
)
from gpuprof.pipeline.result import NoteList, Result
from gpuprof.pipeline.settings import DEVICE_FILE, HOST_US, PRECISION, RUNTIME, Batches, ManyDims, Settings, option

_ESTIMATOR = "Estimator and database"


class EstimateOptions(Settings):
    """Workloads to predict, and the estimator."""

    title: ClassVar[str] = "Workloads"

    batches: Batches | None = option(
        None, "Batch sizes, separated by commas; default: 1, or the batch that a model fixes.", "--batch"
    )
    device: str | None = option(
        None,
        "Device of the catalogue, the database or --device-file, or cpu; default: the one with most measurements.",
        values="devices",
    )
    device_file: Path | None = option(None, DEVICE_FILE, metavar="FILE")
    share: Share | str = option("100", "Part of the device: 50, 50%, 1core, 3g.40gb or 3g.40gb:50.")
    dims: ManyDims = option(
        {},
        "Sizes of a free dimension, in every combination; default: measured or usual ones. May be repeated.",
        "--dim",
        metavar="NAME=SIZE[,SIZE...]",
        repeated=True,
    )
    processes: Count = option(1, "Processes in the share.")
    beside: tuple[str | Workload, ...] = option(
        (),
        "Model that runs on the device at the same time, by default at batch 1 under an equal part of the rest; may be "
        "repeated.",
        metavar="MODEL[@BATCH[:SHARE]]",
        repeated=True,
    )
    estimator: str | Estimator = option(
        "database", "Estimator: database, gk, an installed one, or package.module:Class.", panel=_ESTIMATOR
    )
    precision: str | None = option(None, PRECISION, panel=_ESTIMATOR)
    runtime: str | None = option(None, RUNTIME, panel=_ESTIMATOR)
    host_us: Positive | None = option(None, HOST_US, panel=_ESTIMATOR)
    strict: bool = option(False, "Refuse estimates with unknown ops or wide intervals.", panel=_ESTIMATOR)
    db: Path | None = option(
        None, "Kernel database, optional for ONNX files; default: GPUPROF_DB, or gpuprof-db.", panel=_ESTIMATOR
    )


@dataclass(frozen=True, kw_only=True)
class EstimateResult(Result):
    """Estimates in the order of models, then batch sizes.

    Attributes
    ----------
    beside : tuple of Workload
        Assumed neighbours on the device.
    """

    estimates: tuple[Estimate, ...]
    beside: tuple[Workload, ...] = ()

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each estimate."""
        beside = " + ".join(f"{short_name(w.model)}@{w.batch}:{w.share}" for w in self.beside) or None
        return [{**_row(estimate), "beside": beside} for estimate in self.estimates]


def estimate(
    models: Sequence[PathArgument] | PathArgument = (), options: EstimateOptions | None = None, **fields: Any
) -> EstimateResult:
    """Predict latency, throughput and memory from measurements, a model trained on other GPUs, or a CPU roofline.

    Raises `InputError` when a model, device, share or estimator is unknown, no model was named and the database is
    empty, or an estimate is too uncertain for ``strict``; `InfeasibleError` when a model does not fit into the device's
    memory.

    Parameters
    ----------
    models : sequence of str or path, or one of them
        Names in the database, such as ``"bert[seq=64]"``, or ONNX files; by default all models of the database.
    options : EstimateOptions, optional
        Fields may be given as keywords instead.

    Examples
    --------
    An unprofiled file on a GPU of the catalogue; no GPU is needed:

    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> whole = gpuprof.estimate([file], batches=(1, 256), device="a100-40")
    >>> [one.latency_ms.source for one in whole.estimates][:1]
    ['cross-gpu: tfloat32, onnxruntime, never compared on this board']
    >>> half = gpuprof.estimate([file], batches=(256,), device="a100-40", share="50")
    >>> half.estimates[0].latency_ms.value > whole.estimates[1].latency_ms.value
    True
    """
    from gpuprof.estimators.cross_gpu.kernels import parse_execution

    chosen = EstimateOptions.collect(options, fields)
    with NoteList() as notes:
        if chosen.batches == ():
            raise InputError("an estimate needs a batch size", "name at least one, such as 1")
        database = open_database(chosen.db, needed=not models)
        notes.add(*describe_empty(chosen.db, database))
        target = resolve_device(chosen.device, database, read_own_devices(chosen.device_file), notes.add)
        part = parse_share(chosen.share, target.compute_units) if isinstance(chosen.share, str) else chosen.share
        target.fraction(part)  # raises where the device has no such part
        source = chosen.estimator
        if isinstance(source, str):
            execution = parse_execution(chosen.precision, chosen.runtime, chosen.host_us)
            source = make_named_estimator(
                source, database, note=notes.add, execution=execution, alone=not chosen.beside
            )
        names = name_models(models) or list(make_database_estimator(database).models)
        names, remarks = _size_models(names, source, chosen.dims)
        if not names:
            path = database_path(chosen.db)
            raise InputError(f"the kernel database {path} holds no models", "gpuprof profile MODEL.onnx")
        notes.add(*remarks)
        notes.add(*describe_choice(source, names, [target.name]))
        neighbours = _resolve_neighbours(chosen.beside, target, part)
        inside = tuple(other for other in neighbours if not _is_apart(other.share, part))
        estimates = []
        for name in names:
            for size in chosen.batches or (_find_only_batch(source, name) or 1,):
                estimates.append(source.estimate(name, target, size, part, inside, chosen.processes))
                _check_memory(estimates[-1], target)
                if chosen.strict:
                    require_sure(estimates[-1])
            if unknown := estimates[-1].unknown_ops:
                notes.add(describe_unknown_ops(name, unknown))
        notes.add(*describe_full_occupancy(estimate.creq("max_occupancy") for estimate in estimates))
        return EstimateResult(notes=notes.all(), estimates=tuple(estimates), beside=neighbours)


def describe_full_occupancy(figures: Iterable[Figure | None]) -> list[str]:
    """Return a note if most measured workloads have a maximum occupancy of 100%, which then ranks nothing."""
    measured_pct = [round(figure.value, 1) for figure in figures if figure is not None and figure.source == MEASURED]
    full = sum(value >= 100.0 for value in measured_pct)
    if len(measured_pct) < 2 or full <= len(measured_pct) / 2:
        return []
    return [
        f"maximum occupancy is 100% for {full} of {len(measured_pct)}: a policy that adds it up gives each of these a "
        "GPU; WAO and WSM tell them apart, and ncu's counters (--collector cupti+ncu) each kernel's share of the cycles"
    ]


def short_name(model: object) -> str:
    """Return a model's name without sizes, of a file its stem."""
    name, _ = split_name(str(model))
    return Path(name).stem if name.endswith(".onnx") else name


def _size_models(
    names: Sequence[str], source: Estimator, dims: Mapping[str, int | Sequence[int]]
) -> tuple[list[str], list[str]]:
    """Return the models at every combination of their sizes, and remarks on assumed sizes.

    Raises `InputError` when no model has a given dimension, or the estimator has no sizes.
    """
    from gpuprof.estimators.database import DatabaseEstimator

    sweep = combine_sizes(dims)
    if not isinstance(source, DatabaseEstimator):
        return [sized_name(name, sizes) for name in names for sizes in sweep], []
    models = source.known
    free = {name: models.list_dims(name) for name in names} if dims else {}
    require_dimensions(dims, free.values())
    sized: list[str] = []
    for name in names:
        model, named_dims = split_name(name)
        for sizes in dict.fromkeys(tuple(size for size in sizes if size[0] in free[name]) for sizes in sweep if sizes):
            sized.append(sized_name(model, {**dict(named_dims), **dict(sizes)}.items()))
        if not dims:
            sized.append(name)
    remarks = [remark for name in sized if (remark := models.describe_sizes(name))]
    return [sized_name(split_name(name)[0], models.find_model(name).sizes) for name in sized], remarks


def _find_only_batch(source: Estimator, model: str) -> int | None:
    """Return the batch that a model's file fixes; None where it fixes none, or the estimator reads no files."""
    from gpuprof.estimators.database import DatabaseEstimator

    return source.known.read_fixed_batch(model) if isinstance(source, DatabaseEstimator) else None


def _resolve_neighbours(neighbours: Sequence[str | Workload], device: Device, share: Share) -> tuple[Workload, ...]:
    parts = [_parse_neighbour(neighbour, device) for neighbour in neighbours]
    if share.mig is not None or any(part is not None and part.mig is not None for _, _, part in parts):
        sized = tuple(Workload(model, batch, part or Share(mig=share.mig)) for model, batch, part in parts)
        _require_instances(device, [share, *(each.share for each in sized if _is_apart(each.share, share))])
        return sized
    total_pct = share.sm_pct + sum(part.sm_pct for _, _, part in parts if part)
    open_parts = sum(part is None for _, _, part in parts)
    if device.kind == "gpu" and share.is_whole and parts and all(part == share for _, _, part in parts):
        return tuple(Workload(model, batch, share) for model, batch, _ in parts)  # nobody is held to a share
    if total_pct > 100.0 + 1e-6 or (open_parts and total_pct >= 100.0):
        raise InputError(
            f"shares of {total_pct:g}% leave nothing of the device for all that runs beside them",
            "give smaller shares, --share and @batch:share",
        )
    rest_pct = (100.0 - total_pct) / max(open_parts, 1)
    return tuple(Workload(model, batch, part or Share(rest_pct)) for model, batch, part in parts)


def _is_apart(neighbour: Share, share: Share) -> bool:
    """Return whether a neighbour is in another MIG instance: a whole instance, or one of another profile."""
    return neighbour.mig != share.mig or (share.mig is not None and neighbour.sm_pct == 100.0)


def _require_instances(device: Device, shares: Sequence[Share]) -> None:
    """Raise `InputError` unless a board can be cut into the instances of the shares."""
    if not all(share.mig for share in shares):
        raise InputError(f"{device.name} is cut into MIG instances or has none", "give every neighbour an instance")
    needed = Counter(device.mig_profile(str(share.mig)).name for share in shares)
    if not any(needed <= Counter(dict(count_profiles(layout))) for layout in maximal_layouts(device)):
        names = " + ".join(f"{count} × {name}" for name, count in needed.items())
        raise InputError(f"{device.name} cannot be cut into {names}", "name fewer neighbours, or smaller instances")


def _parse_neighbour(neighbour: str | Workload, device: Device) -> tuple[str, int, Share | None]:
    if isinstance(neighbour, Workload):
        return neighbour.model, neighbour.batch, neighbour.share
    model, batch, part = read_neighbour(neighbour, device)
    return model, 1 if batch is None else batch, part


def _row(estimate: Estimate) -> dict[str, object]:
    workload, throughput = estimate.workload, estimate.throughput_rps
    return {
        "model": split_name(workload.model)[0],
        "dims": describe_sizes(split_name(workload.model)[1]) or None,
        "device": estimate.device,
        "share": str(workload.share),
        "batch": workload.batch,
        "processes": workload.processes,
        **_figure_columns("latency", "ms", estimate.latency_ms),
        "latency_cv": estimate.latency_cv,
        "throughput_rps": throughput.value,
        "throughput_low_rps": throughput.low,
        "throughput_high_rps": throughput.high,
        **_figure_columns("memory", "bytes", estimate.memory_bytes),
        "weight_bytes": estimate.weight_bytes,
        **{f"creq_{metric}_pct": figure.value for metric, figure in estimate.creq_pct},
        **_figure_columns("dram", "pct", estimate.dram_pct),
        **_figure_columns("l2", "pct", estimate.l2_pct),
        **_figure_columns("power", "w", estimate.power_w),
        "executed_by": estimate.variant,
        "unknown_ops": list(estimate.unknown_ops),
    }


def _figure_columns(name: str, unit: str, figure: Figure | None) -> dict[str, object]:
    columns = {f"{name}_{unit}": "value", f"{name}_low_{unit}": "low", f"{name}_high_{unit}": "high"}
    return {column: getattr(figure, end, None) for column, end in (columns | {f"{name}_source": "source"}).items()}


def _check_memory(estimate: Estimate, device: Device) -> None:
    """Check that the processes of ``estimate`` fit into the memory of their share.

    Raises `InputError` with the needed and the available memory.
    """
    workload, memory = estimate.workload, estimate.memory_bytes
    limit = device.memory_bytes(workload.share)
    if memory is None or memory.value * workload.processes <= limit:
        return
    needed = memory.value * workload.processes
    raise InputError(
        f"{workload.model} at batch {workload.batch} needs {needed / GIB:.1f} GiB ({memory.source}), "
        f"but {device.name} at {workload.share} has {limit / GIB:.1f} GiB",
        "choose a smaller batch or another device",
    )


#: A 90% interval of a latency that exceeds this multiple of the value is wide.
WIDE = 2.0
_FIX = "profile it there, or leave out --strict"


def require_sure(estimate: Estimate) -> None:
    """Raise `InputError` for an estimate with unknown ops or a wide interval, with the device."""
    name, _ = split_name(estimate.workload.model)
    if estimate.unknown_ops:
        unknown = ", ".join(estimate.unknown_ops)
        raise InputError(f"{name}: nothing is known of {unknown} on {estimate.device}", _FIX)
    latency = estimate.latency_ms
    if latency.value > 0.0 and latency.upper() > WIDE * latency.value:
        low = 0.0 if latency.low is None else latency.low
        raise InputError(
            f"{name} on {estimate.device} at batch {estimate.workload.batch} is estimated at {latency.value:.3g} ms, "
            f"but may take {low:.3g} to {latency.upper():.3g} ({latency.source}): more than {WIDE:g} times as long",
            _FIX,
        )
