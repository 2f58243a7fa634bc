"""``gpuprof estimate``: what a model needs at any batch, share and device, and how that is known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.estimate_options import ScenarioOptions, SourceOptions
from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import (
    Column,
    CsvOption,
    JsonOption,
    chosen_format,
    mebibytes,
    number,
    print_rows,
    say,
    say_note,
)
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuprof.domain.device import Device
    from gpuprof.domain.estimate import Estimate, Estimator, Figure, Workload
    from gpuprof.domain.share import Share


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


@with_groups
def estimate(
    running: ScenarioOptions,
    knowledge: SourceOptions,
    models: Annotated[
        list[str] | None, typer.Argument(help="Names in the database or ONNX files; none: all of the database.")
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Predict latency, throughput and memory: measured where measured, interpolated between, else from a roofline."""
    from gpuprof.pipeline.devices import (
        database_path,
        describe_superseded,
        describe_variants,
        open_database,
        resolve_device,
    )

    chosen = chosen_format(as_json, as_csv)
    sizes = running.sizes()
    database = open_database(knowledge.db, needed=not models)
    target = resolve_device(running.device, database)
    part = running.part(target)
    asked = knowledge.made(database)
    names = list(models or getattr(asked, "models", []))
    if not names:
        where = database_path(knowledge.db)
        raise InputError(f"the kernel database {where} holds no models", "gpuprof profile MODEL.onnx")
    for remark in (*describe_superseded(asked, names), *describe_variants(asked, names, [target.name])):
        say_note(remark)
    others = running.neighbours(target, part)
    found = _estimates(asked, names, target, sizes, part, running.processes, others, knowledge.strict)
    shown = [column for column in _COLUMNS if others or column.key != "beside"]
    print_rows([{**_row(one), "beside": " + ".join(map(_label, others)) or None} for one in found], shown, chosen)


def _label(workload: Workload) -> str:
    return f"{_short(workload.model)}@{workload.batch}:{workload.share}"


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
        "executed_by": one.variant,
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
