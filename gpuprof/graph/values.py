"""Constant folding of small integer tensors: most shapes in exported models are computed by ops.

With bound input shapes, values that depend only on shapes and constants are known. This module implements the ops of
such chains on NumPy arrays; the value of any other op stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
#: Values larger than this are data, not shapes.
MOST_ELEMENTS = 1024


def known_value(op_type: str, inputs: Sequence[Array | None], attributes: Mapping[str, object]) -> Array | None:
    """Return the value of a single-output op for ``inputs`` (None: absent), or None where unknown."""
    rule = _RULES.get(op_type)
    if rule is None or not inputs or inputs[0] is None:
        return None
    try:
        with np.errstate(all="ignore"):
            value = np.asarray(rule(inputs, attributes))
    except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError, KeyError):
        return None  # an invalid op: shape inference gives a better error
    return value if value.size <= MOST_ELEMENTS else None


_Rule = Callable[[Sequence[Array | None], Mapping[str, object]], object]


def _int_attribute(attributes: Mapping[str, object], name: str, default: int) -> int:
    value = attributes.get(name, default)
    return value if isinstance(value, int) else default


def _elementwise(function: Callable[..., object]) -> _Rule:
    def rule(x: Sequence[Array | None], _: Mapping[str, object]) -> object:
        if any(operand is None for operand in x):
            raise ValueError("an operand is absent")
        if np.prod(np.broadcast_shapes(*(operand.shape for operand in x if operand is not None))) > MOST_ELEMENTS:
            raise ValueError("too large to be a shape")
        return function(*x)

    return rule


def _divide(a: Array, b: Array) -> object:
    if a.dtype.kind in "iu":  # ONNX truncates towards zero, NumPy floors
        return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)
    return np.divide(a, b)


def _gather(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    return np.take(
        _require_input(x, 0), _require_input(x, 1).astype(np.int64), axis=_int_attribute(attributes, "axis", 0)
    )


def _require_input(x: Sequence[Array | None], position: int) -> npt.NDArray[np.int64]:
    value = x[position]
    if value is None:
        raise ValueError("an operand is absent")
    return value  # type: ignore[return-value]


def _int_list(
    x: Sequence[Array | None], position: int, attributes: Mapping[str, object], name: str
) -> list[int] | None:
    """Return a list given as an input or, in older opsets, as an attribute; None where absent."""
    if len(x) > position and x[position] is not None:
        return [int(value) for value in _require_input(x, position).ravel()]
    value = attributes.get(name)
    return list(value) if isinstance(value, list | tuple) else None


def _slice(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    data = _require_input(x, 0)
    starts, ends = _int_list(x, 1, attributes, "starts"), _int_list(x, 2, attributes, "ends")
    if starts is None or ends is None:
        raise ValueError("bounds are not known")
    axes = _int_list(x, 3, attributes, "axes") or range(len(starts))
    steps = _int_list(x, 4, attributes, "steps") or [1] * len(starts)
    index = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # A negative end below -size means "past the first element" when walking backwards.
        stop = None if step < 0 and end < -data.shape[axis] else end
        index[axis] = slice(start, stop, step)
    return data[tuple(index)]


def _squeeze(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    axes = _int_list(x, 1, attributes, "axes")
    return np.squeeze(_require_input(x, 0), tuple(axes) if axes is not None else None)


def _unsqueeze(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    axes = _int_list(x, 1, attributes, "axes")
    if axes is None:
        raise ValueError("axes are not known")
    return np.expand_dims(_require_input(x, 0), tuple(axes))


def _reshape(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    data, shape = _require_input(x, 0), _int_list(x, 1, attributes, "shape")
    if shape is None:
        raise ValueError("shape is not known")
    if not _int_attribute(attributes, "allowzero", 0):
        shape = [data.shape[i] if dim == 0 else dim for i, dim in enumerate(shape)]
    return data.reshape(shape)


def _concat(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    return np.concatenate([_require_input(x, i) for i in range(len(x))], axis=_int_attribute(attributes, "axis", 0))


def _cast(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    from onnx.helper import tensor_dtype_to_np_dtype

    return _require_input(x, 0).astype(tensor_dtype_to_np_dtype(_int_attribute(attributes, "to", 1)))


def _one_hot(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    indices, depth, values = _require_input(x, 0), int(_require_input(x, 1).item()), _require_input(x, 2)
    if indices.size * depth > MOST_ELEMENTS:
        raise ValueError("too large to be a shape")
    hot = np.arange(depth) == np.where(indices < 0, indices + depth, indices)[..., None]
    return np.moveaxis(np.where(hot, values[1], values[0]), -1, _int_attribute(attributes, "axis", -1))


def _range(x: Sequence[Array | None], _: Mapping[str, object]) -> object:
    start, limit, delta = (_require_input(x, i).item() for i in range(3))
    if (limit - start) / delta > MOST_ELEMENTS:
        raise ValueError("too large to be a shape")
    return np.arange(start, limit, delta, dtype=_require_input(x, 0).dtype)


def _constant_of_shape(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    shape = _int_list(x, 0, attributes, "")
    fill = attributes.get("value")
    if shape is None or np.prod(shape) > MOST_ELEMENTS:
        raise ValueError("too large to be a shape")
    return np.full(shape, fill if isinstance(fill, np.ndarray) else np.zeros(1, np.float32))


def _expand(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    data, shape = _require_input(x, 0), _int_list(x, 1, attributes, "")
    whole = np.broadcast_shapes(data.shape, tuple(shape or ()))
    if shape is None or np.prod(whole) > MOST_ELEMENTS:
        raise ValueError("too large to be a shape")
    return np.broadcast_to(data, whole)


def _reduction(function: Callable[..., object]) -> _Rule:
    def rule(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
        axes = _int_list(x, 1, attributes, "axes")
        keep = bool(_int_attribute(attributes, "keepdims", 1))
        if axes is None and _int_attribute(attributes, "noop_with_empty_axes", 0):
            return x[0]
        return np.asarray(function(x[0], axis=tuple(axes) if axes else None, keepdims=keep), _require_input(x, 0).dtype)

    return rule


def _transpose(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    return np.transpose(_require_input(x, 0), _int_list(x, 1, attributes, "perm"))


def _clip(x: Sequence[Array | None], attributes: Mapping[str, object]) -> object:
    low, high = (x[i] if len(x) > i else attributes.get(name) for i, name in ((1, "min"), (2, "max")))
    data = _require_input(x, 0)
    return data if low is None and high is None else np.clip(data, low, high).astype(data.dtype)  # type: ignore[call-overload]


#: Ops with the same name in NumPy.
_ALIKE = (
    "Abs",
    "Sign",
    "Floor",
    "Ceil",
    "Round",
    "Sqrt",
    "Log",
    "Exp",
    "Reciprocal",
    "Equal",
    "Less",
    "Greater",
    "Where",
)
_RULES: dict[str, _Rule] = {
    **{name: _elementwise(getattr(np, name.lower())) for name in _ALIKE},
    "Identity": lambda x, _: x[0],
    "Add": _elementwise(np.add),
    "Sub": _elementwise(np.subtract),
    "Mul": _elementwise(np.multiply),
    "Div": _elementwise(_divide),
    "Mod": _elementwise(np.mod),
    "Pow": _elementwise(lambda a, b: np.power(a, b).astype(a.dtype)),
    "Min": _elementwise(lambda *x: np.minimum.reduce(np.broadcast_arrays(*x))),
    "Max": _elementwise(lambda *x: np.maximum.reduce(np.broadcast_arrays(*x))),
    "Neg": _elementwise(np.negative),
    "LessOrEqual": _elementwise(np.less_equal),
    "GreaterOrEqual": _elementwise(np.greater_equal),
    "Clip": _clip,
    "Relu": _elementwise(lambda a: np.maximum(a, 0).astype(a.dtype)),
    "And": _elementwise(np.logical_and),
    "Or": _elementwise(np.logical_or),
    "Not": _elementwise(np.logical_not),
    "Gather": _gather,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "Flatten": lambda x, a: _require_input(x, 0).reshape(
        int(np.prod(_require_input(x, 0).shape[: _int_attribute(a, "axis", 1)])), -1
    ),
    "Transpose": _transpose,
    "Concat": _concat,
    "Cast": _cast,
    "CastLike": lambda x, _: _require_input(x, 0).astype(_require_input(x, 1).dtype),
    "OneHot": _one_hot,
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "ReduceProd": _reduction(np.prod),
    "ReduceSum": _reduction(np.sum),
    "ReduceMax": _reduction(np.max),
    "ReduceMin": _reduction(np.min),
}
#: Ops whose value follows from their inputs alone and is computed here.
KNOWN_OPS = frozenset(_RULES)
