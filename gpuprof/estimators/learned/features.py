"""Facts of ops, their features and their expected times on a device, for regressors.

The expected time is the sum of arithmetic and traffic. On a CPU the parts add up: a core waits for data outside its
caches, and little of the wait is hidden behind arithmetic (of a product of 16 rows by 2048 x 2048 weights on one core,
1.40 ms are arithmetic, 0.35 ms traffic, and 1.70 ms were measured). On a GPU, whose threads hide one behind the other,
the expected time is the roofline. Regressors learn the ratio of an op's time to it, which differs far less from op to
op than the time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.model import Op
from gpuprof.domain.share import Share
from gpuprof.estimators.roofline import (
    MATRIX_OPS,
    GraphWork,
    bandwidth,
    op_times_s,
    reread_bandwidth,
)
from gpuprof.kernel_db.schema import OpRow

Shape = tuple[int, ...]


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


def facts_of_row(row: OpRow) -> OpFacts:
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


#: Float32 values in a vector register of 512 bits: kernels block channels by them.
_LANES = 16


Array = NDArray[Any]
#: Kinds of ops with similar implementations in runtimes; all others are "other".
KINDS: Mapping[str, frozenset[str]] = {
    "matrix": frozenset({"Gemm", "MatMul", "MatMulInteger", "Einsum", "FusedMatMul", "FusedGemm", "Attention"}),
    "pool": frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool"}),
    "norm": frozenset({"LayerNormalization", "InstanceNormalization", "GroupNormalization",
                       "SimplifiedLayerNormalization", "RMSNormalization", "LpNormalization"}),
    "local_norm": frozenset({"LRN"}),  # a power for each element: no other op has such a cost
    "reduce": frozenset({"Softmax", "LogSoftmax", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2",
                         "ArgMax", "ArgMin", "TopK", "CumSum"}),
    "recurrent": frozenset({"LSTM", "GRU", "RNN"}),
    "function": frozenset({"Sigmoid", "Tanh", "Erf", "Exp", "Log", "Gelu", "Sqrt", "Pow", "HardSwish", "HardSigmoid",
                           "Softplus", "Mish", "Elu", "Selu", "Swish", "Reciprocal", "Sin", "Cos"}),
    "elementwise": frozenset({"Add", "Sub", "Mul", "Div", "Relu", "Clip", "Sum", "LeakyRelu", "PRelu", "Neg", "Abs",
                              "Min", "Max", "Where", "Equal", "Cast", "Not", "And", "Or", "Less", "Greater",
                              "BatchNormalization"}),  # in inference a multiplication and an addition
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
    "log_fused", "fused_functions", "fused_inputs",
    "log_roofline_ns", "log_balance", "log_peak", "log_bandwidth", "log_units",
    *(f"is_{kind}" for kind in _KIND_NAMES),
)  # fmt: skip


def kind_of(facts: OpFacts) -> str:
    """Return the kind of an op, convolutions by their window and groups."""
    if facts.op_type not in ("Conv", "ConvTranspose", "FusedConv", "ConvInteger"):
        return _KIND_OF.get(facts.op_type, "other")
    if integer(facts.attributes.get("group"), 1) > 1:
        return "depthwise" if channels_in_group(facts) == 1 else "grouped"
    return "pointwise" if window(facts) == 1 else "conv"


def feature_matrix(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the features of ops on a share of a device.

    Returns
    -------
    ndarray of shape (len(ops), len(FEATURES))
    """
    roofline = roofline_ns(ops, device, share)
    fraction = device.fraction(share)
    of_op = np.array([_op_features(facts) for facts in ops]).reshape(len(ops), -1)
    flops = np.array([facts.flops for facts in ops])
    traffic = np.array([facts.bytes_read + facts.bytes_written for facts in ops])
    peak = device.flops_per_s["float32"] * fraction
    width = bandwidth(device, share)
    shared = np.column_stack(
        [
            np.log(roofline + 1.0),
            np.log((flops + 1.0) / peak) - np.log((traffic + 1.0) / width),
            np.full(len(ops), math.log(peak)),
            np.full(len(ops), math.log(width)),
            np.full(len(ops), math.log(device.compute_units * fraction)),
        ]
    )
    kinds = np.array([[float(kind_of(facts) == kind) for kind in _KIND_NAMES] for facts in ops])
    return np.hstack([of_op, shared, kinds.reshape(len(ops), -1)])


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
    )
    return op_times_s(work, device, share) * 1e9


def _op_features(facts: OpFacts) -> list[float]:
    traffic = facts.bytes_read + facts.bytes_written
    rows, columns, depth = _as_matrix(facts)
    group = max(1, integer(facts.attributes.get("group"), 1))
    inputs = sum(prod(shape) for shape in facts.inputs)
    outputs = sum(prod(shape) for shape in facts.outputs)
    return [
        math.log1p(facts.flops),
        math.log1p(facts.bytes_read),
        math.log1p(facts.bytes_written),
        math.log1p(facts.weight_bytes),
        math.log1p(facts.flops / (traffic + 1.0)),
        math.log1p(inputs),
        math.log1p(outputs),
        math.log(facts.batch),
        math.log1p(rows),
        math.log1p(columns),
        math.log1p(depth),
        math.log(window(facts)),
        float(max(integers(facts.attributes.get("strides")), default=1)),
        math.log(group),
        math.log1p(columns / group),
        math.log1p(channels_in_group(facts)),
        float(columns % _LANES == 0) + float(channels_in_group(facts) % _LANES == 0),
        math.log1p(facts.outputs[0][-1] if facts.outputs and facts.outputs[0] else 1),
        float(len(facts.inputs)),
        traffic / max(1.0, inputs + outputs),
        math.log(facts.fused),
        float(facts.fused_functions),
        float(facts.fused_inputs),
    ]


def _as_matrix(facts: OpFacts) -> tuple[float, float, float]:
    """Return the rows, columns and depth of a convolution or matrix product as a product; of other ops the output's."""
    out = facts.outputs[0] if facts.outputs else ()
    if facts.op_type in MATRIX_OPS and out and facts.flops:
        columns = out[1] if "Conv" in facts.op_type and len(out) > 1 else out[-1]
        rows = prod(out) / max(1, columns)
        return rows, float(columns), facts.flops / (2.0 * max(1.0, rows * columns))
    return float(prod(out[:-1])), float(out[-1]) if out else 1.0, 0.0


#: Time of a runtime per node without work.
NODE_NS = 2000.0
#: Names of the columns of `expected_features`.
EXPECTED_FEATURES = ("log_expected_ns", "log_arithmetic_part", "log_traffic_part")


def regressor_features(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the features of ops for the regressors, those of their expected times last.

    Returns
    -------
    ndarray of shape (len(ops), len(FEATURES) + len(EXPECTED_FEATURES))
    """
    return np.hstack([feature_matrix(ops, device, share), expected_features(ops, device, share)])


def expected_features(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the logarithm of the expected time in nanoseconds and its parts for each op, shape (len(ops), 3)."""
    if device.kind == "cpu":
        flops = np.array([facts.flops for facts in ops], dtype=float)
        arithmetic_ns = flops / (device.flops_per_s["float32"] * device.fraction(share)) * 1e9
        traffic_ns = _traffic_s(ops, device, share) * 1e9
    else:
        arithmetic_ns, traffic_ns = roofline_ns(ops, device, share), np.zeros(len(ops))
    expected = NODE_NS + arithmetic_ns + traffic_ns
    parts = [np.log((part_ns + 1.0) / expected) for part_ns in (arithmetic_ns, traffic_ns)]
    return np.column_stack([np.log(expected), *parts])


def expected_ns(features: Array) -> Array:
    """Return the expected times in nanoseconds of N ops from their features of `regressor_features`, shape (N,)."""
    return np.asarray(np.exp(features[:, -len(EXPECTED_FEATURES)]))


def _traffic_s(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the time of each op's traffic: weights at the whole model's reuse distance, the rest at the op's own."""
    weights = np.array([facts.weight_bytes for facts in ops], dtype=float)
    total = np.array([facts.bytes_read + facts.bytes_written for facts in ops], dtype=float)
    activations = np.maximum(total - weights, 0.0)
    since_last_run = np.array([facts.working_set for facts in ops], dtype=float)
    return np.asarray(
        weights / reread_bandwidth(device, share, since_last_run) + activations / reread_bandwidth(device, share, total)
    )
