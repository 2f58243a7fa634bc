"""Constant folding of small integer tensors: most shapes in exported models are computed by ops.

With bound input shapes, values that depend only on shapes and constants are known. ONNX's reference implementation
computes the ops of such chains; the value of any other op stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, NodeProto, ValueInfoProto

Array = npt.NDArray[np.generic]
#: Values larger than this are data, not shapes.
MOST_ELEMENTS = 1024
#: Ops whose value follows from their inputs alone and is computed here.
KNOWN_OPS = frozenset(
    {
        "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Concat", "ConstantOfShape", "Div", "Equal",
        "Exp", "Expand", "Flatten", "Floor", "Gather", "Greater", "GreaterOrEqual", "Identity", "Less",
        "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "OneHot", "Or", "Pow", "Range",
        "Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Round", "Sign",
        "Slice", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip


def known_value(node: NodeProto, values: Mapping[str, Array], opset: int) -> Array | None:
    """Return the value of a single-output node of ONNX's own domain for known ``values``, or None where unknown."""
    names = list(dict.fromkeys(name for name in node.input if name))
    if node.op_type not in KNOWN_OPS or not names or not all(name in values for name in names):
        return None
    from onnx.reference import ReferenceEvaluator  # a quarter of the reading time of a model without such ops

    infos = [ValueInfoProto(name=name) for name in names]
    graph = GraphProto(name="op", node=[node], input=infos, output=[ValueInfoProto(name=node.output[0])])
    try:
        if _count_elements(node.op_type, [values[name] for name in node.input if name]) > MOST_ELEMENTS:
            return None
        with np.errstate(all="ignore"):
            (value,) = ReferenceEvaluator(graph, opsets={"": opset}).run(None, {name: values[name] for name in names})
    except Exception:  # an invalid op, on which the reference raises anything: shape inference gives a better error
        return None
    result = np.asarray(value)
    return result if result.size <= MOST_ELEMENTS else None


def _count_elements(op_type: str, inputs: Sequence[Array]) -> int:
    """Return the elements of a result that may be far larger than the inputs; 0 for other ops."""
    if op_type == "ConstantOfShape":
        return prod(inputs[0].tolist())
    if op_type == "Expand":
        return prod(np.broadcast_shapes(inputs[0].shape, tuple(inputs[1].tolist())))
    if op_type == "OneHot":
        return inputs[0].size * int(inputs[1].item())
    if op_type == "Range":
        start, limit, delta = (array.item() for array in inputs)
        return int((limit - start) / delta)
    shapes = [array.shape for array in inputs]
    try:
        return prod(np.broadcast_shapes(*shapes))  # of an element-wise op
    except ValueError:
        return 0
