"""NeuSight's measurements (ASPLOS'25), in gpuprof's tables of them: single ops with their kernels, and transformers.

``ops.parquet`` and ``models.csv`` are made of ``data/dataset/train/collect`` and ``data/label`` of its repository. All
values are float32 on CUDA cores (PyTorch eager, TF32 off).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from gpuprof.domain.catalogue import devices
from gpuprof.errors import InputError
from gpuprof.kernel_db.importers.published_op import describe_op, op_row
from gpuprof.kernel_db.importers.source import Source
from gpuprof.kernel_db.schema import PER_OP, KernelRow, ModelRow, OpRow, RunRow
from gpuprof.kernel_db.store import Run

LICENCE = "MIT, (c) 2025 Georgia Institute of Technology and Microsoft Corporation"
_NOTES = f"sitar-lab/NeuSight, data of ASPLOS'25; {LICENCE}; PyTorch eager, float32 without TF32"
_TABLE = {"op", "device", "latency_ms", "kernel", "grid_x", "block_x", "torch"}
_MODELS = {"device", "model", "sequence", "batch", "fused", "latency_ms"}
_SIZES = ["b", "m", "n", "k", "h", "in_channels", "out_channels", "kernel_size", "input_size", "stride", "padding"]
_LAUNCH = ["grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"]


def recognizes(source: Source) -> bool:
    """Return whether ``source`` is a table listed in the module's docstring."""
    return set(source.columns()) >= _TABLE or set(source.header()) >= _MODELS


def read_runs(source: Source, device: str | None) -> Iterable[Run]:
    """Return a run for each GPU and version of PyTorch of the file.

    Raises `InputError` for a GPU missing from the catalogue, an invalid number, or an unknown op.
    """
    if not source.columns():
        yield from _read_models(source, device)
        return
    groups: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for line, row in enumerate(source.records(), 1):
        groups[_name_device(source, line, row, device), str(row["torch"])].append((line, row))
    for (name, version), rows in groups.items():
        run = source.run(name, "import:neusight", _NOTES, PER_OP, **_describe_conditions(version, "eager"))
        pairs = [_read_op(source, run, line, row) for line, row in rows]
        yield Run(run, ops=[op for op, _ in pairs], kernels=[kernel for _, kernel in pairs])


def _describe_conditions(version: str, mode: str) -> dict[str, str]:
    return {
        "runtime": "pytorch",
        "runtime_version": version,
        "provider": f"cuda, {mode}",
        "precision": "float32",
        "settings": json.dumps({"allow_tf32": False}),
    }


def _name_device(source: Source, line: int, row: Mapping[str, Any], device: str | None) -> str:
    if row["device"] not in devices() and device is None:
        raise InputError(f"{source.path}:{line}: no GPU of the catalogue is called {row['device']!r}", "give --device")
    return str(row["device"]) if row["device"] in devices() else str(device)


def _read_op(source: Source, run: RunRow, line: int, row: Mapping[str, Any]) -> tuple[OpRow, KernelRow]:
    latency_ms = source.record_number(line, row, "latency_ms")
    sizes = {name: int(source.record_number(line, row, name)) for name in _SIZES if _is_given(row.get(name))}
    try:
        op = describe_op(str(row["op"]), sizes, "float32")
    except KeyError as error:
        raise InputError(f"{source.path}:{line}: op {row['op']!r} with {sizes} lacks {error}") from None
    batch = sizes.get("b", 1)
    launch = {name: int(source.record_number(line, row, name)) for name in _LAUNCH if _is_given(row.get(name))}
    kernel = KernelRow(
        run_id=run.run_id,
        model=PER_OP,
        device=run.device,
        batch=batch,
        name=str(row["kernel"]),
        position=0,
        op_signature=op.signature,
        op_type=op.op_type,
        op_name=op.name,
        runtime=run.runtime,
        execution="eager",
        precision=run.precision,
        **launch,  # type: ignore[arg-type]
    )
    kernels = [name for name in str(row.get("kernels") or "").split(";") if name and name != "nan"]
    note = f"{len(kernels)} kernels: {'; '.join(kernels)}" if len(kernels) > 1 else None
    return op_row(run, op, batch, latency_ms, "eager", note), kernel


def _read_models(source: Source, device: str | None) -> Iterable[Run]:
    models: dict[tuple[str, bool], list[tuple[int, dict[str, str]]]] = defaultdict(list)
    for line, row in source.rows():
        models[_name_device(source, line, row, device), row["fused"].lower() == "true"].append((line, row))
    for (name, fused), rows in models.items():
        mode = "torch.compile" if fused else "eager"
        run = source.run(name, "import:neusight", _NOTES, **_describe_conditions("2.1.0", mode))
        yield Run(
            run,
            models=[
                ModelRow(
                    run_id=run.run_id,
                    model=f"{row['model']}@{row['sequence']}",
                    device=name,
                    batch=int(source.require_number(line, row, "batch")),
                    latency_mean_ms=source.require_number(line, row, "latency_ms"),
                    runtime=run.runtime,
                    execution="fused" if fused else "eager",
                    precision=run.precision,
                )
                for line, row in rows
            ],
        )


def _is_given(value: object) -> bool:
    return value is not None and value == value  # NaN: Parquet's value for a column of another op
