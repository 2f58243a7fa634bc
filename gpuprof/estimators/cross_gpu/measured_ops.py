"""Measured ops of a GPU in the kernel database: a few of them correct the estimates of all its ops."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.adaptation import adapt, name_alike
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuModel
from gpuprof.estimators.cross_gpu.execution import PRECISIONS
from gpuprof.estimators.cross_gpu.intervals import launched_as, name_kinds
from gpuprof.estimators.cross_gpu.kernels import LaunchMode, list_kernels
from gpuprof.estimators.cross_gpu.op_table import OpTable
from gpuprof.estimators.cross_gpu.rates import rates_of
from gpuprof.kernel_db.schema import PER_OP
from gpuprof.kernel_db.store import KernelDb

#: Maximum rows, drawn at random: more add time but no information.
_MOST_ROWS = 200
#: Maximum nodes of a row: more than a product with its bias and activation is no longer the op of the row.
_MOST_FUSED = 3
_PRECISIONS: Mapping[str, str] = {**PRECISIONS, "fp8_block": "float8", "float8e4m3fn": "float8"}
_FRAMEWORKS: Mapping[str, float] = {"vllm": 0.0, "tensorrt-llm": 1.0, "sglang": 2.0}
#: Runtimes that time an op by itself with its launch; profiles of models time kernels.
_LAUNCHED = frozenset({"pytorch", "onnxruntime"})


@dataclass(frozen=True, slots=True)
class TimedOp:
    """Columns of the table ``ops`` that describe an op and its time."""

    model: str
    op_type: str
    shapes: str | None
    dtype: str | None
    attributes: str | None
    flops: int | None
    bytes_read: int | None
    bytes_written: int | None
    fused: int
    duration_mean_ns: int
    runtime: str | None
    precision: str | None


def read_timed_ops(database: KernelDb, device: str) -> list[TimedOp]:
    """Return ops measured on the whole of a device, a sample where there are many.

    Raises `InputError` when a file of the database is damaged.
    """
    columns = [field.name for field in fields(TimedOp)]
    table = database.read_table("ops", columns, {"device": device, "sm_share_pct": 100.0, "mig_profile": None})
    timed_rows = np.flatnonzero(table.column("duration_mean_ns").is_valid().to_numpy(zero_copy_only=False))
    if len(timed_rows) > _MOST_ROWS:
        timed_rows = np.sort(np.random.default_rng(0).choice(timed_rows, _MOST_ROWS, replace=False))
    rows = [TimedOp(**row) for row in table.take(timed_rows).to_pylist()]
    return [row for row in rows if row.duration_mean_ns > 0 and row.fused <= _MOST_FUSED]


def adapt_model(model: CrossGpuModel, device: Device, timed: Sequence[TimedOp]) -> CrossGpuModel:
    """Return the model corrected by the measurements of ``device``; unchanged where no row is usable.

    An op that was timed with its launch counts where the launch takes the smaller part of its time.
    """
    alike, ratios, scales = [], [], []
    for row in timed:
        for table, precision in _describe(row, device):
            rates = rates_of(device, precision)
            kinds = name_kinds(table, rates.tensor)
            kernel_s = float(model.costs.kernel_times(table, rates)[0])
            is_launched = row.model == PER_OP and row.runtime in _LAUNCHED
            launch_s = model.costs.floor_s.get(launched_as(str(kinds[0])), 0.0) if is_launched else 0.0
            if launch_s < kernel_s:
                alike.append(name_alike(table, kinds)[0])
                ratios.append(row.duration_mean_ns / 1e9 / (kernel_s + launch_s))
                scales.append(model.scales.scale_ops(kinds)[0])
    if not alike:
        return model
    return replace(model, adaptation=adapt(np.array(alike), np.array(ratios), np.array(scales)))


def _describe(row: TimedOp, device: Device) -> list[tuple[OpTable, str]]:
    """Return the kernel of a row and its precision; nothing unless the row is a single kernel of known cost."""
    precision = _PRECISIONS.get(row.precision or row.dtype or "")
    op = _read_op(row)
    if op is None or precision not in device.flops_per_s or op.outputs[0].elements <= 1:
        return []
    graph = ModelGraph(op.name, 1, (op,), op.inputs, op.outputs, (), 0, "", "")
    try:
        kernels = list_kernels(graph, str(precision), LaunchMode.EAGER)
    except (InputError, IndexError, KeyError, ValueError, TypeError, ZeroDivisionError):  # rows of other tools
        return []
    if len(kernels.ops) != 1 or kernels.count != (1,) or kernels.unknown:
        return []
    framework = _FRAMEWORKS.get(row.runtime or "")
    table = kernels.ops
    if framework is not None:
        column = "stride" if op.op_type == "Attention" else "extra"
        table = replace(table, **{column: np.full(1, framework)})
    return [(table, str(precision))]


def _read_op(row: TimedOp) -> Op | None:
    if not row.shapes or "->" not in row.shapes or row.dtype is None:
        return None
    try:
        sides = zip("xy", row.shapes.split("->"), strict=True)
        inputs, outputs = (_read_tensors(part, row.dtype, place) for place, part in sides)
        attributes: dict[str, Any] = json.loads(row.attributes or "{}")
    except ValueError:
        return None
    traffic = (row.bytes_read or 0, row.bytes_written or 0)
    return Op(row.op_type, row.op_type, "", inputs, outputs, (), attributes, row.flops, *traffic)


def _read_tensors(text: str, dtype: str, name: str) -> tuple[Tensor, ...]:
    shapes = [tuple(int(size) for size in shape.strip("()").split("x") if size) for shape in text.split(",")]
    return tuple(Tensor(f"{name}{place}", dtype, shape) for place, shape in enumerate(shapes))
