"""``gpuprof estimate``: what a model needs at any batch, share and device, and how that is known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import Column, CsvOption, JsonOption, chosen_format, mebibytes, number, print_rows, say
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuprof.device import Device
    from gpuprof.estimate import Estimate, Estimator, Figure, Workload
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.share import Share

_LARGEST_BATCH = 1_000_000
_NEIGHBOUR = re.compile(r"(?P<model>.+?)(?:[@:](?P<batch>\d+)(?::(?P<share>.+))?)?")


def _short(model: object) -> str:
    return Path(str(model)).stem if str(model).endswith(".onnx") else str(model)


_COLUMNS = (
    Column("model", "model", _short, right=False),
    Column("device", "device", right=False),
    Column("share", "share", right=False),
    Column("batch", "batch"),
    Column("beside", "beside", right=False),
    Column("latency_ms", "latency ms", number(4)),
    Column("latency_interval", "90% interval"),
    Column("latency_source", "from", right=False),
    Column("throughput_rps", "requests/s", number(4)),
    Column("memory_bytes", "memory MiB", mebibytes),
    Column("memory_source", "from", right=False),
)


def estimate(
    models: Annotated[
        list[str] | None, typer.Argument(help="Names in the database or ONNX files; none: all of the database.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, 1,8,32.")] = "1",
    device: Annotated[str | None, typer.Option(help="Device of the catalogue or the database, or cpu.")] = None,
    share: Annotated[str, typer.Option(help="Part of the device: 50, 50%, 1core, 3g.40gb or 3g.40gb:50.")] = "100",
    processes: Annotated[int, typer.Option(help="Copies in the share.")] = 1,
    beside: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL[@BATCH[:SHARE]]", help="With this running on the device, too; repeatable."),
    ] = None,
    estimator: Annotated[
        str, typer.Option(help="database, gk, one that was installed, or package.module:Class.")
    ] = "database",
    strict: Annotated[bool, typer.Option(help="Refuse models with ops that nothing is known of.")] = False,
    db: Annotated[Path | None, typer.Option(help="Kernel database.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Predict latency, throughput and memory: measured where measured, interpolated between, else from a roofline."""
    from gpuprof.cli.devices import database_path, open_database, resolve_device, say_superseded
    from gpuprof.share import parse_share

    chosen = chosen_format(as_json, as_csv)
    sizes = _sizes(batch)
    database = open_database(db, needed=not models)
    target = resolve_device(device, database)
    part = parse_share(share, target.compute_units)
    target.fraction(part)
    asked = _estimator(estimator, database)
    names = list(models or getattr(asked, "models", []))
    if not names:
        raise InputError(f"the kernel database {database_path(db)} holds no models", "gpuprof profile MODEL.onnx")
    say_superseded(asked, names)
    others = _neighbours(beside or (), target, part)
    found = _estimates(asked, names, target, sizes, part, processes, others, strict)
    shown = [column for column in _COLUMNS if others or column.key != "beside"]
    print_rows([{**_row(one), "beside": " + ".join(map(_label, others)) or None} for one in found], shown, chosen)


def _estimator(name: str, database: KernelDb | None) -> Estimator:
    from gpuprof.cli.devices import estimator_of
    from gpuprof.estimators.builtin import make_estimator

    if name == "database":
        return estimator_of(database)
    return make_estimator(name, database)


def _neighbours(texts: Sequence[str], device: Device, share: Share) -> tuple[Workload, ...]:
    """Read ``"resnet50@8:50"``: batch 1 where none is said, and an equal part of what is left of the device."""
    from gpuprof.estimate import Workload
    from gpuprof.share import Share, parse_share

    read = []
    for text in texts:
        match = _NEIGHBOUR.fullmatch(text)
        if match is None:
            raise InputError(f"cannot read the neighbour {text!r}", "write MODEL, MODEL@batch or MODEL@batch:share")
        given = parse_share(match["share"], device.compute_units) if match["share"] else None
        read.append((match["model"], int(match["batch"] or 1), given))
    taken = share.sm_pct + sum(given.sm_pct for _, _, given in read if given)
    open_parts = sum(given is None for _, _, given in read)
    if share.mig is None and (taken > 100.0 + 1e-6 or (open_parts and taken >= 100.0)):
        raise InputError(
            f"shares of {taken:g}% leave no room beside them", "give smaller shares, --share and @batch:share"
        )
    left = (100.0 - taken) / max(open_parts, 1)
    return tuple(Workload(model, batch, given or Share(left)) for model, batch, given in read)


def _label(workload: Workload) -> str:
    return f"{_short(workload.model)}@{workload.batch}:{workload.share}"


def _sizes(text: str) -> list[int]:
    """Read ``"1,8,32"``."""
    sizes = []
    for word in text.split(","):
        if not word.strip().isdigit() or not 1 <= int(word) <= _LARGEST_BATCH:
            raise InputError(
                f"--batch must be whole numbers from 1 to {_LARGEST_BATCH:,} but got {text!r}", "write it as 1,8,32"
            )
        sizes.append(int(word))
    return sizes


def _estimates(
    estimator: Estimator,
    names: Sequence[str],
    device: Device,
    sizes: Sequence[int],
    share: Share,
    processes: int,
    beside: Sequence[Workload],
    strict: bool,
) -> list[Estimate]:
    from gpuprof.estimators.fit import check_memory

    found = []
    for name in names:
        for size in sizes:
            one = estimator.estimate(name, device, size, share, beside, processes)
            check_memory(one, device)
            found.append(one)
        if found[-1].unknown_ops:
            _unknown(name, found[-1].unknown_ops, strict)
    return found


def _unknown(name: str, ops: Sequence[str], strict: bool) -> None:
    if strict:
        raise InputError(
            f"{name} has ops that nothing is known of: {', '.join(ops)}", "profile it, or leave out --strict"
        )
    say(f"gpuprof: {name}: nothing is known of {', '.join(ops)}; counted by their traffic alone")


def _row(one: Estimate) -> dict[str, object]:
    workload, throughput = one.workload, one.throughput_rps
    return {
        "model": workload.model,
        "device": one.device,
        "share": str(workload.share),
        "batch": workload.batch,
        "processes": workload.processes,
        **_figure("latency", "ms", one.latency_ms),
        "latency_interval": _interval(one.latency_ms),
        "latency_cv": one.latency_cv,
        "throughput_rps": throughput.value,
        "throughput_low_rps": throughput.low,
        "throughput_high_rps": throughput.high,
        **_figure("memory", "bytes", one.memory_bytes),
        "weight_bytes": one.weight_bytes,
        **{f"creq_{metric}_pct": figure.value for metric, figure in one.creq_pct},
        **_figure("dram", "pct", one.dram_pct),
        **_figure("l2", "pct", one.l2_pct),
        **_figure("power", "w", one.power_w),
        "unknown_ops": list(one.unknown_ops),
    }


def _figure(name: str, unit: str, figure: Figure | None) -> dict[str, object]:
    return {
        f"{name}_{unit}": None if figure is None else figure.value,
        f"{name}_low_{unit}": None if figure is None else figure.low,
        f"{name}_high_{unit}": None if figure is None else figure.high,
        f"{name}_source": None if figure is None else figure.source,
    }


def _interval(figure: Figure) -> str | None:
    if figure.low is None or figure.high is None:
        return None
    show = number(3)
    return f"{show(figure.low)} … {show(figure.high)}"
