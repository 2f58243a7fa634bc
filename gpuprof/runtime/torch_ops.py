"""ONNX operators in PyTorch: what a model needs to run where ONNX Runtime has no provider for the GPU.

Each function takes the node's attributes, the model's opset and the inputs (None for one that is left out), and
returns one tensor or a tuple of them. Semantics are those of the ONNX operator specification of that opset. What
describes a shape (axes, sizes, starts) is read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpuprof.errors import InputError

Attributes = Mapping[str, Any]
Operator = Callable[[Attributes, int, list[Any]], Any]

OPERATORS: dict[str, Operator] = {}
#: Operator → positions of inputs that are read on the host: axes, sizes, bounds. Were they on the GPU, every run
#: would wait for it to send them; all other inputs belong there.
HOST_READ: dict[str, tuple[int, ...]] = {
    "Clip": (1, 2), "ConstantOfShape": (0,), "CumSum": (1,), "Expand": (1,), "Pad": (1, 2, 3), "Range": (0, 1, 2),
    "Reshape": (1,), "Resize": (1, 2, 3), "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "Tile": (1,),
    "TopK": (1,), "Unsqueeze": (1,), "Upsample": (1,),
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"), (1,)),
}  # fmt: skip

_DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Register a function for operators."""

    def register(function: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def _register_plain() -> None:
    """Register what PyTorch has under another name, with no attributes."""
    unary: dict[str, Callable[[Tensor], Tensor]] = {
        "Abs": torch.abs, "Ceil": torch.ceil, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp,
        "Floor": torch.floor, "Identity": lambda x: x, "Log": torch.log, "Mish": functional.mish, "Neg": torch.neg,
        "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round,
        "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Softplus": functional.softplus,
        "Sqrt": torch.sqrt, "Tanh": torch.tanh, "HardSwish": functional.hardswish, "IsNaN": torch.isnan,
    }  # fmt: skip
    binary: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "Add": torch.add, "And": torch.logical_and, "Div": lambda x, y: _divide(x, y), "Equal": torch.eq,
        "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
        "MatMul": torch.matmul, "Mod": torch.remainder, "Mul": torch.mul, "Or": torch.logical_or, "Sub": torch.sub,
        "Xor": torch.logical_xor, "PRelu": lambda x, slope: torch.where(x >= 0, x, x * slope),
    }  # fmt: skip
    for name, one in unary.items():
        # ``f=one`` binds now: the loop's variable would be its last value in all of them.
        OPERATORS[name] = lambda a, v, x, f=one: f(x[0])  # type: ignore[misc]
    for name, two in binary.items():
        OPERATORS[name] = lambda a, v, x, f=two: f(*_promote_types(x))  # type: ignore[misc]
    for name, fold in {"Sum": torch.add, "Max": torch.maximum, "Min": torch.minimum}.items():
        OPERATORS[name] = lambda a, v, x, f=fold: _fold_values(f, x)  # type: ignore[misc]


def _divide(x: Tensor, y: Tensor) -> Tensor:
    # Whole numbers: ONNX truncates as C does, PyTorch would give a fraction.
    return torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _fold_values(function: Callable[[Tensor, Tensor], Tensor], values: Sequence[Any]) -> Tensor:
    values = _promote_types(values)
    total: Tensor = values[0]
    for value in values[1:]:
        total = function(total, value)
    return total


def _promote_types(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors on the device that any of them is on besides the host."""
    device = next((value.device for value in values if value.device.type != "cpu"), None)
    return [value if device is None else value.to(device) for value in values]


def numbers(value: Any) -> list[int]:
    """Return a tensor of whole numbers as a list."""
    return [int(number) for number in value.flatten().tolist()]


_register_plain()


@operator("Mean")
def _mean(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    return _fold_values(torch.add, x) / len(x)


@operator("Pow")
def _pow(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    base, exponent = _promote_types(x)
    # ONNX keeps the base's type, PyTorch promotes both.
    return torch.pow(base, exponent).to(base.dtype)


@operator("LeakyRelu")
def _leaky(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    return functional.leaky_relu(x[0], attributes.get("alpha", 0.01))


@operator("Elu")
def _elu(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    return functional.elu(x[0], attributes.get("alpha", 1.0))


@operator("HardSigmoid")
def _hard_sigmoid(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    return torch.clamp(attributes.get("alpha", 0.2) * x[0] + attributes.get("beta", 0.5), 0.0, 1.0)


@operator("Gelu")
def _gelu(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    return functional.gelu(x[0], approximate=_text(attributes.get("approximate", "none")))


@operator("Clip")
def _clip(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    low = x[1].item() if len(x) > 1 and x[1] is not None else attributes.get("min")
    high = x[2].item() if len(x) > 2 and x[2] is not None else attributes.get("max")
    return x[0] if low is None and high is None else torch.clamp(x[0], low, high)


@operator("Cast")
def _cast(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    if attributes["to"] not in _DTYPES:
        raise InputError(f"PyTorch has no tensors of ONNX type {attributes['to']}")
    value: Tensor = x[0].to(_DTYPES[attributes["to"]])
    return value


@operator("Where")
def _where(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    condition, yes, no = _promote_types(x)
    return torch.where(condition, yes, no)


@operator("Dropout")
def _dropout(attributes: Attributes, opset: int, x: list[Any]) -> tuple[Tensor, Tensor]:
    return x[0], torch.ones_like(x[0], dtype=torch.bool)


@operator("Shape")
def _shape(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    shape = list(x[0].shape)[attributes.get("start", 0) : attributes.get("end")]
    return torch.tensor(shape, dtype=torch.int64)


@operator("Size")
def _size(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    return torch.tensor(x[0].numel(), dtype=torch.int64)


@operator("Constant")
def _constant(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    for name in ("value_float", "value_floats", "value_int", "value_ints"):
        if name in attributes:
            return torch.tensor(attributes[name], dtype=torch.float32 if "float" in name else torch.int64)
    value: Tensor = attributes["value"]
    return value


@operator("ConstantOfShape")
def _constant_of_shape(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    value = attributes.get("value", torch.zeros(1))
    return torch.full(numbers(x[0]) if x[0].numel() else [], value.flatten()[0].item(), dtype=value.dtype)


@operator("Range")
def _range(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    return torch.arange(*(value.item() for value in x), dtype=x[0].dtype)


@operator("Reshape")
def _reshape(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    shape = numbers(x[1]) if len(x) > 1 else list(attributes["shape"])
    if not attributes.get("allowzero", 0):
        # A 0 means "as the input has it" unless the model says that it is one.
        shape = [x[0].shape[i] if side == 0 else side for i, side in enumerate(shape)]
    return torch.reshape(x[0], shape)


@operator("Flatten")
def _flatten(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    axis = attributes.get("axis", 1)
    axis += x[0].dim() if axis < 0 else 0
    return torch.reshape(x[0], (math.prod(x[0].shape[:axis]), -1))


def _axes(attributes: Attributes, x: list[Any]) -> list[int] | None:
    """Return the axes, which are an attribute in older opsets and the second input in newer ones."""
    if len(x) > 1 and x[1] is not None:
        return numbers(x[1])
    return list(attributes["axes"]) if "axes" in attributes else None


@operator("Squeeze")
def _squeeze(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    axes = _axes(attributes, x)
    return torch.squeeze(x[0]) if axes is None else torch.squeeze(x[0], tuple(axes))


@operator("Unsqueeze")
def _unsqueeze(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    value: Tensor = x[0]
    axes = _axes(attributes, x) or []
    rank = value.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        value = torch.unsqueeze(value, axis)
    return value


@operator("Transpose")
def _transpose(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    # Runtimes that transpose move the values: a view only would leave that to whatever comes next.
    return x[0].permute(attributes.get("perm", tuple(reversed(range(x[0].dim()))))).contiguous()


@operator("Concat")
def _concat(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    return torch.cat(_promote_types(x), attributes["axis"])


@operator("Split")
def _split(attributes: Attributes, opset: int, x: list[Any]) -> tuple[Tensor, ...]:
    axis = attributes.get("axis", 0)
    sizes = numbers(x[1]) if len(x) > 1 and x[1] is not None else attributes.get("split")
    if sizes is None:
        parts = attributes["outputs"]
        sizes = [math.ceil(x[0].shape[axis] / parts)] * (parts - 1)
        sizes.append(x[0].shape[axis] - sum(sizes))
    return tuple(torch.split(x[0], list(sizes), axis))


@operator("Slice")
def _slice(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    given = [numbers(value) if value is not None else None for value in x[1:]]
    given += [None] * (4 - len(given))
    starts = given[0] if given[0] is not None else list(attributes["starts"])
    ends = given[1] if given[1] is not None else list(attributes["ends"])
    axes = given[2] if given[2] is not None else attributes.get("axes", range(len(starts)))
    steps = given[3] if given[3] is not None else [1] * len(starts)
    value: Tensor = x[0]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        side = value.shape[axis]
        # PyTorch has no slices with negative steps.
        if step > 0:
            index = [slice(None)] * value.dim()
            index[axis] = slice(start, min(end, side), step)
            value = value[tuple(index)]
        else:
            chosen = torch.tensor(list(range(side))[slice(start, end, step)], dtype=torch.int64, device=value.device)
            value = torch.index_select(value, axis, chosen)
    return value


@operator("Gather")
def _gather(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    data, index = _promote_types(x)
    axis = attributes.get("axis", 0) % data.dim()
    # ONNX counts negative indices from the end; index_select refuses them.
    index = torch.where(index < 0, index + data.shape[axis], index)
    found = torch.index_select(data, axis, index.flatten().to(torch.int64))
    return found.reshape(*data.shape[:axis], *index.shape, *data.shape[axis + 1 :])


@operator("GatherElements")
def _gather_elements(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    data, index = _promote_types(x)
    axis = attributes.get("axis", 0)
    return torch.gather(data, axis, torch.where(index < 0, index + data.shape[axis], index))


@operator("GatherND")
def _gather_nd(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    data, index = _promote_types(x)
    shared = attributes.get("batch_dims", 0)
    if shared:
        flat, places = data.flatten(0, shared - 1), index.flatten(0, shared - 1)
        found = torch.stack([one[tuple(place.movedim(-1, 0))] for one, place in zip(flat, places, strict=True)])
        return found.reshape(*data.shape[:shared], *found.shape[1:])
    return data[tuple(index.movedim(-1, 0))]


@operator("Expand")
def _expand(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    shape = torch.broadcast_shapes(x[0].shape, numbers(x[1]))
    value: Tensor = x[0].expand(shape).contiguous()
    return value


@operator("Tile")
def _tile(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    return torch.tile(x[0], numbers(x[1]))


@operator("Pad")
def _pad(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    sides = numbers(x[1]) if len(x) > 1 else list(attributes["pads"])
    value = x[2].item() if len(x) > 2 and x[2] is not None else attributes.get("value", 0.0)
    rank = x[0].dim()
    axes = [axis % rank for axis in numbers(x[3])] if len(x) > 3 and x[3] is not None else list(range(rank))
    before, after = dict(zip(axes, sides, strict=False)), dict(zip(axes, sides[len(axes) :], strict=True))
    pads = [side for axis in reversed(range(rank)) for side in (before.get(axis, 0), after.get(axis, 0))]
    mode = _text(attributes.get("mode", "constant"))
    if mode == "constant":
        return functional.pad(x[0], pads, value=value)
    while pads and pads[-2:] == [0, 0]:  # PyTorch reflects the last axes only
        pads = pads[:-2]
    return functional.pad(x[0], pads, mode={"edge": "replicate"}.get(mode, mode))


@operator("CumSum")
def _cumulative(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    axis = int(x[1].item())
    value = torch.flip(x[0], [axis]) if attributes.get("reverse") else x[0]
    total = torch.cumsum(value, axis, dtype=value.dtype)
    total = total - value if attributes.get("exclusive") else total
    return torch.flip(total, [axis]) if attributes.get("reverse") else total


@operator("Einsum")
def _einsum(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    return torch.einsum(_text(attributes["equation"]), *_promote_types(x))


@operator("Gemm")
def _gemm(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    a = x[0].T if attributes.get("transA") else x[0]
    b = x[1].T if attributes.get("transB") else x[1]
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    if len(x) > 2 and x[2] is not None:
        return torch.addmm(x[2], a, b, beta=beta, alpha=alpha)
    product: Tensor = alpha * torch.mm(a, b)
    return product


def _softmax_like(function: Callable[[Tensor, int], Tensor]) -> Operator:
    def run(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
        if opset >= 13:
            return function(x[0], attributes.get("axis", -1))
        axis = attributes.get("axis", 1)
        return function(x[0].reshape(math.prod(x[0].shape[:axis]), -1), -1).reshape(x[0].shape)

    return run


OPERATORS["Softmax"] = _softmax_like(torch.softmax)
OPERATORS["LogSoftmax"] = _softmax_like(torch.log_softmax)


def _reduction(function: Callable[..., Tensor]) -> Operator:
    def run(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
        axes = _axes(attributes, x)
        if not axes:
            if attributes.get("noop_with_empty_axes"):
                return x[0]
            axes = list(range(x[0].dim()))
        return function(x[0], dim=tuple(axes), keepdim=bool(attributes.get("keepdims", 1)))

    return run


for _name, _function in {
    "ReduceMean": torch.mean, "ReduceSum": torch.sum, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
    "ReduceL2": torch.linalg.vector_norm,
}.items():  # fmt: skip
    OPERATORS[_name] = _reduction(_function)


def _argument(function: Callable[..., Tensor]) -> Operator:
    def run(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
        axis, keep = attributes.get("axis", 0), bool(attributes.get("keepdims", 1))
        if not attributes.get("select_last_index"):
            return function(x[0], dim=axis, keepdim=keep)
        last: int = x[0].shape[axis] - 1
        return last - function(torch.flip(x[0], [axis]), dim=axis, keepdim=keep)

    return run


OPERATORS["ArgMax"] = _argument(torch.argmax)
OPERATORS["ArgMin"] = _argument(torch.argmin)


@operator("TopK")
def _top(attributes: Attributes, opset: int, x: list[Any]) -> tuple[Tensor, Tensor]:
    top = torch.topk(
        x[0], int(x[1].item()), attributes.get("axis", -1), bool(attributes.get("largest", 1)), sorted=True
    )
    return top.values, top.indices


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
