"""Facts of an op, available from the graph of a model and from a row of the database."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from gpuprof.domain.model import Op
from gpuprof.kernel_db.schema import OpRow

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpCostRow:
    """Columns of the table ``ops`` that describe an op's computation."""

    signature: str
    op_type: str
    batch: int
    shapes: str | None
    dtype: str | None
    attributes: str | None
    flops: int | None
    bytes_read: int | None
    bytes_written: int | None
    weight_bytes: int | None


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts of an op that the graph and the table ``ops`` of the database share."""

    op_type: str
    dtype: str
    #: ``inputs``, ``outputs``: Shapes.
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    attributes: Mapping[str, Any]
    #: ``flops``, ``bytes_read``, ``bytes_written``, ``weight_bytes``: 0 flops where no formula is known.
    flops: float
    bytes_read: float
    bytes_written: float
    weight_bytes: float
    batch: int
    #: ``fused``, ``fused_functions``, ``fused_inputs``: Number of ops executed together, this op included; number of
    #: transcendental functions among the other ops; number of further activations read by the other ops.
    fused: int = 1
    fused_functions: int = 0
    fused_inputs: int = 0
    #: Bytes touched by the whole model between two executions of the op; infinite where unknown.
    working_set: float = math.inf


def facts_of_op(op: Op, batch: int) -> OpFacts:
    """Return the facts of a node of a graph read at ``batch``."""
    return OpFacts(
        op.op_type,
        (op.inputs or op.outputs)[0].dtype if op.inputs or op.outputs else "float32",
        tuple(tensor.shape for tensor in op.inputs),
        tuple(tensor.shape for tensor in op.outputs),
        op.attributes,
        float(op.flops or 0),
        float(op.bytes_read),
        float(op.bytes_written),
        float(op.weight_bytes),
        batch,
    )


def facts_of_row(row: OpRow | OpCostRow) -> OpFacts:
    """Return the facts of a row of the table ``ops``."""
    before, _, after = (row.shapes or "->").partition("->")
    return OpFacts(
        row.op_type,
        row.dtype or "float32",
        _shapes(before),
        _shapes(after),
        json.loads(row.attributes or "{}"),
        float(row.flops or 0),
        float(row.bytes_read or 0),
        float(row.bytes_written or 0),
        float(row.weight_bytes or 0),
        row.batch,
    )


def channels_in_group(facts: OpFacts) -> int:
    """Return the input channels per output channel of a convolution; 1 for other ops."""
    is_convolution = "Conv" in facts.op_type and len(facts.inputs) > 1 and len(facts.inputs[1]) > 1
    return max(1, facts.inputs[1][1]) if is_convolution else 1


def window(facts: OpFacts) -> int:
    """Return the elements of the window of a convolution or pooling, 1 for other ops."""
    sides = integers(facts.attributes.get("kernel_shape"))
    if not sides and "Conv" in facts.op_type and len(facts.inputs) > 1:
        sides = list(facts.inputs[1][2:])
    return max(1, prod(sides))


def integers(value: object) -> list[int]:
    """Return the items of an attribute that is a list of numbers, an empty list otherwise."""
    return [int(item) for item in value] if isinstance(value, list | tuple) else []


def integer(value: object, default: int) -> int:
    """Return the value of a numeric attribute, else ``default``."""
    return int(value) if isinstance(value, int | float) else default


def _shapes(text: str) -> tuple[Shape, ...]:
    """Return the shapes in ``"1x3x224x224,64x3x7x7,()"``; the last is a scalar."""
    parts = text.split(",") if text else ()
    return tuple(tuple(int(side) for side in part.strip("()").split("x") if side) for part in parts)
