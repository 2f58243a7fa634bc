"""Features that determine an op's time: its work, its shapes, its kind, and the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.estimators.learned.convolution import LANES, is_blocked, unfolded_bytes
from gpuprof.estimators.learned.op_facts import OpFacts, channels_in_group, integer, integers, window
from gpuprof.estimators.roofline.op_work import MATRIX_OPS, GraphWork, steps_of
from gpuprof.estimators.roofline.roofline import bandwidth, op_times_s

Array = NDArray[Any]
#: Range of log(working set / cache): outside it all data come from a nearer cache, or all from memory.
_FAR = (-6.0, 1.0)

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
    "blocked", "log_unfolded", "log_fused", "fused_functions", "fused_inputs",
    "log_roofline_ns", "log_balance", "log_peak", "log_bandwidth", "log_units", "log_residency",
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
            np.array([_residency(facts.working_set, device) for facts in ops]),
        ]
    )
    kinds = np.array([[float(kind_of(facts) == kind) for kind in _KIND_NAMES] for facts in ops])
    return np.hstack([of_op, shared, kinds.reshape(len(ops), -1)])


def _residency(working_set: float, device: Device) -> float:
    """Return the logarithm of the working set over the last cache, clipped to `_FAR`."""
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
        float(columns % LANES == 0) + float(channels_in_group(facts) % LANES == 0),
        math.log1p(facts.outputs[0][-1] if facts.outputs and facts.outputs[0] else 1),
        float(len(facts.inputs)),
        traffic / max(1.0, inputs + outputs),
        float(is_blocked(facts)),
        math.log1p(unfolded_bytes(facts)),
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
