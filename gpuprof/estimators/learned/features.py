"""What decides how long an op takes, as numbers: its work, its shapes, its kind, and the device."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.device import Device
from gpuprof.estimators.roofline.op_work import MATRIX_OPS, GraphWork, steps_of
from gpuprof.estimators.roofline.roofline import bandwidth, op_times_s
from gpuprof.model import Op
from gpuprof.share import Share

Array = NDArray[Any]
#: Channels that runtimes keep together in blocks: layers of other widths take slower paths.
_LANES = 16
#: Beyond these logarithms of working set over cache, all of it comes from a nearer cache, or all from memory.
_FAR = (-6.0, 1.0)
Shape = tuple[int, ...]

#: Kinds of ops that runtimes implement alike; what is in none is "other".
KINDS: Mapping[str, frozenset[str]] = {
    "matrix": frozenset({"Gemm", "MatMul", "MatMulInteger", "Einsum", "FusedMatMul", "FusedGemm", "Attention"}),
    "pool": frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool"}),
    "norm": frozenset({"LayerNormalization", "InstanceNormalization", "GroupNormalization",
                       "SimplifiedLayerNormalization", "RMSNormalization", "LpNormalization"}),
    "local_norm": frozenset({"LRN"}),  # a power for each element: nothing costs like it
    "reduce": frozenset({"Softmax", "LogSoftmax", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2",
                         "ArgMax", "ArgMin", "TopK", "CumSum"}),
    "recurrent": frozenset({"LSTM", "GRU", "RNN"}),
    "function": frozenset({"Sigmoid", "Tanh", "Erf", "Exp", "Log", "Gelu", "Sqrt", "Pow", "HardSwish", "HardSigmoid",
                           "Softplus", "Mish", "Elu", "Selu", "Swish", "Reciprocal", "Sin", "Cos"}),
    "elementwise": frozenset({"Add", "Sub", "Mul", "Div", "Relu", "Clip", "Sum", "LeakyRelu", "PRelu", "Neg", "Abs",
                              "Min", "Max", "Where", "Equal", "Cast", "Not", "And", "Or", "Less", "Greater",
                              "BatchNormalization"}),  # at inference a multiplication and an addition
    "copy": frozenset({"Concat", "Split", "Slice", "Pad", "Gather", "Expand", "Tile", "Resize", "ScatterND",
                       "Transpose", "DepthToSpace", "SpaceToDepth", "GatherND", "GatherElements", "Upsample"}),
    "view": frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Shape"}),
}  # fmt: skip
_CONVOLUTIONS = ("conv", "pointwise", "depthwise", "grouped")
_KIND_NAMES = (*_CONVOLUTIONS, *KINDS, "other")
_KIND_OF = {op_type: kind for kind, members in KINDS.items() for op_type in members}

FEATURES = (
    "log_flops", "log_bytes_read", "log_bytes_written", "log_weight_bytes", "log_intensity", "log_inputs",
    "log_outputs", "log_batch", "log_rows", "log_columns", "log_depth", "log_window", "stride", "log_groups",
    "log_columns_in_group", "log_channels_in_group", "aligned", "last_dimension", "inputs", "dtype_bytes",
    "blocked", "log_fused", "fused_functions", "fused_inputs",
    "log_roofline_ns", "log_balance", "log_peak", "log_bandwidth", "log_units", "log_residency",
    *(f"is_{kind}" for kind in _KIND_NAMES),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpFacts:
    """An op as the graph and the table ``ops`` of the database both know it.

    Attributes
    ----------
    inputs, outputs : tuple of tuple of int
        Shapes.
    flops, bytes_read, bytes_written, weight_bytes : float
        0 flops where no formula is known.
    fused, fused_functions, fused_inputs : int
        How many ops are executed as one with it, itself among them; how many of the others are transcendental
        functions; and how many activations those read besides.
    working_set : float
        Bytes that the whole model touches from one execution of the op to its next; infinite where nobody knows.
    """

    op_type: str
    dtype: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    attributes: Mapping[str, Any]
    flops: float
    bytes_read: float
    bytes_written: float
    weight_bytes: float
    batch: int
    fused: int = 1
    fused_functions: int = 0
    fused_inputs: int = 0
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


def facts_of_row(row: Mapping[str, Any]) -> OpFacts:
    """Return the facts of a row of the table ``ops``."""
    before, _, after = (row["shapes"] or "->").partition("->")
    return OpFacts(
        row["op_type"],
        row["dtype"] or "float32",
        _shapes(before),
        _shapes(after),
        json.loads(row["attributes"] or "{}"),
        float(row["flops"] or 0),
        float(row["bytes_read"] or 0),
        float(row["bytes_written"] or 0),
        float(row["weight_bytes"] or 0),
        row["batch"],
    )


def kind_of(facts: OpFacts) -> str:
    """Return the kind of an op, convolutions by their window and groups."""
    if facts.op_type not in ("Conv", "ConvTranspose", "FusedConv", "ConvInteger"):
        return _KIND_OF.get(facts.op_type, "other")
    if _int(facts.attributes.get("group"), 1) > 1:
        return "depthwise" if _channels_in_group(facts) == 1 else "grouped"
    return "pointwise" if _window(facts) == 1 else "conv"


def feature_matrix(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the features of ops on a share of a device.

    Returns
    -------
    ndarray of shape (len(ops), len(FEATURES))
    """
    roofline = roofline_ns(ops, device, share)
    fraction = device.fraction(share)
    own = np.array([_op_features(facts) for facts in ops]).reshape(len(ops), -1)
    flops = np.array([facts.flops for facts in ops])
    moved = np.array([facts.bytes_read + facts.bytes_written for facts in ops])
    peak = device.flops_per_s["float32"] * fraction
    width = bandwidth(device, share)
    shared = np.column_stack(
        [
            np.log(roofline + 1.0),
            np.log((flops + 1.0) / peak) - np.log((moved + 1.0) / width),
            np.full(len(ops), math.log(peak)),
            np.full(len(ops), math.log(width)),
            np.full(len(ops), math.log(device.compute_units * fraction)),
            np.array([_residency(facts.working_set, device) for facts in ops]),
        ]
    )
    kinds = np.array([[float(kind_of(facts) == kind) for kind in _KIND_NAMES] for facts in ops])
    return np.hstack([own, shared, kinds.reshape(len(ops), -1)])


def _residency(working_set: float, device: Device) -> float:
    """Return how much larger the working set is than the last cache, as a logarithm that ends where it is far."""
    if working_set <= 0.0 or math.isinf(working_set) or not device.l2_bytes:
        return _FAR[1]
    return min(max(math.log(working_set / device.l2_bytes), _FAR[0]), _FAR[1])


def roofline_ns(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the least time of each op in nanoseconds."""
    work = GraphWork(
        tuple(facts.op_type for facts in ops),
        tuple(facts.dtype for facts in ops),
        np.array([facts.flops for facts in ops]),
        np.array([facts.bytes_read + facts.bytes_written for facts in ops]),
        (),
        0.0,
        0,
        tuple(
            steps_of(facts.op_type, facts.inputs[0] if facts.inputs else (), facts.attributes.get("layout"))
            for facts in ops
        ),
    )
    return op_times_s(work, device, share) * 1e9


def _op_features(facts: OpFacts) -> list[float]:
    moved = facts.bytes_read + facts.bytes_written
    rows, columns, depth = _as_matrix(facts)
    group = max(1, _int(facts.attributes.get("group"), 1))
    inputs = sum(prod(shape) for shape in facts.inputs)
    outputs = sum(prod(shape) for shape in facts.outputs)
    return [
        math.log1p(facts.flops),
        math.log1p(facts.bytes_read),
        math.log1p(facts.bytes_written),
        math.log1p(facts.weight_bytes),
        math.log1p(facts.flops / (moved + 1.0)),
        math.log1p(inputs),
        math.log1p(outputs),
        math.log(facts.batch),
        math.log1p(rows),
        math.log1p(columns),
        math.log1p(depth),
        math.log(_window(facts)),
        float(max(_ints(facts.attributes.get("strides")), default=1)),
        math.log(group),
        math.log1p(columns / group),
        math.log1p(_channels_in_group(facts)),
        float(columns % _LANES == 0) + float(_channels_in_group(facts) % _LANES == 0),
        math.log1p(facts.outputs[0][-1] if facts.outputs and facts.outputs[0] else 1),
        float(len(facts.inputs)),
        moved / max(1.0, inputs + outputs),
        float(_is_blocked(facts)),
        math.log(facts.fused),
        float(facts.fused_functions),
        float(facts.fused_inputs),
    ]


def _is_blocked(facts: OpFacts) -> bool:
    """Return whether a convolution can run with its channels in blocks; others unfold their input into a matrix."""
    if "Conv" not in facts.op_type or len(facts.inputs) < 2 or len(facts.inputs[1]) != 4:
        return False
    group, (channels, in_group, *_) = max(1, _int(facts.attributes.get("group"), 1)), facts.inputs[1]
    if group == 1 or (in_group == 1 and group == channels):
        return group == 1 or channels % _LANES == 0
    return in_group % _LANES == 0 and channels // group % _LANES == 0


def _as_matrix(facts: OpFacts) -> tuple[float, float, float]:
    """Return the rows, columns and depth of the product that a convolution or matrix product is; else its output."""
    out = facts.outputs[0] if facts.outputs else ()
    if facts.op_type in MATRIX_OPS and out and facts.flops:
        columns = out[1] if "Conv" in facts.op_type and len(out) > 1 else out[-1]
        rows = prod(out) / max(1, columns)
        return rows, float(columns), facts.flops / (2.0 * max(1.0, rows * columns))
    return float(prod(out[:-1])), float(out[-1]) if out else 1.0, 0.0


def _channels_in_group(facts: OpFacts) -> int:
    """Return the input channels that each output channel of a convolution sees; 1 for anything else."""
    is_convolution = "Conv" in facts.op_type and len(facts.inputs) > 1 and len(facts.inputs[1]) > 1
    return max(1, facts.inputs[1][1]) if is_convolution else 1


def _window(facts: OpFacts) -> int:
    """Return the elements of the window of a convolution or pooling, 1 for anything else."""
    sides = _ints(facts.attributes.get("kernel_shape"))
    if not sides and "Conv" in facts.op_type and len(facts.inputs) > 1:
        sides = list(facts.inputs[1][2:])
    return max(1, prod(sides))


def _ints(value: object) -> list[int]:
    return [int(item) for item in value] if isinstance(value, list | tuple) else []


def _int(value: object, default: int) -> int:
    return int(value) if isinstance(value, int | float) else default


def _shapes(text: str) -> tuple[Shape, ...]:
    """Read ``"1x3x224x224,64x3x7x7,()"``; the last is a scalar."""
    parts = text.split(",") if text else ()
    return tuple(tuple(int(side) for side in part.strip("()").split("x") if side) for part in parts)
