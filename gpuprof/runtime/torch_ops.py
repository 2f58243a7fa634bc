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
        OPERATORS[name] = lambda a, v, x, f=two: f(*move_to_one_device(x))  # type: ignore[misc]
    for name, fold in {"Sum": torch.add, "Max": torch.maximum, "Min": torch.minimum}.items():
        OPERATORS[name] = lambda a, v, x, f=fold: _fold_values(f, x)  # type: ignore[misc]


def _divide(x: Tensor, y: Tensor) -> Tensor:
    # Whole numbers: ONNX truncates as C does, PyTorch would give a fraction.
    return torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _fold_values(function: Callable[[Tensor, Tensor], Tensor], values: Sequence[Any]) -> Tensor:
    values = move_to_one_device(values)
    total: Tensor = values[0]
    for value in values[1:]:
        total = function(total, value)
    return total


def move_to_one_device(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors on the device that any of them is on besides the host."""
    device = next((value.device for value in values if value.device.type != "cpu"), None)
    return [value if device is None else value.to(device) for value in values]


def numbers(value: Any) -> list[int]:
    """Return a tensor of whole numbers as a list."""
    return [int(number) for number in value.flatten().tolist()]


_register_plain()
OPERATORS |= {
    "Mean": lambda a, v, x: _fold_values(torch.add, x) / len(x),
    "LeakyRelu": lambda a, v, x: functional.leaky_relu(x[0], a.get("alpha", 0.01)),
    "Elu": lambda a, v, x: functional.elu(x[0], a.get("alpha", 1.0)),
    "HardSigmoid": lambda a, v, x: torch.clamp(a.get("alpha", 0.2) * x[0] + a.get("beta", 0.5), 0.0, 1.0),
    "Gelu": lambda a, v, x: functional.gelu(x[0], approximate=decode_text(a.get("approximate", "none"))),
    "Where": lambda a, v, x: torch.where(*move_to_one_device(x)),
    "Dropout": lambda a, v, x: (x[0], torch.ones_like(x[0], dtype=torch.bool)),
    "Einsum": lambda a, v, x: torch.einsum(decode_text(a["equation"]), *move_to_one_device(x)),
}


@operator("Pow")
def _pow(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    base, exponent = move_to_one_device(x)
    # ONNX keeps the base's type, PyTorch promotes both.
    return torch.pow(base, exponent).to(base.dtype)


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


def read_axes(attributes: Attributes, x: list[Any]) -> list[int] | None:
    """Return the axes, which are an attribute in older opsets and the second input in newer ones."""
    if len(x) > 1 and x[1] is not None:
        return numbers(x[1])
    return list(attributes["axes"]) if "axes" in attributes else None


@operator("CumSum")
def _cumulative(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    axis = int(x[1].item())
    value = torch.flip(x[0], [axis]) if attributes.get("reverse") else x[0]
    total = torch.cumsum(value, axis, dtype=value.dtype)
    total = total - value if attributes.get("exclusive") else total
    return torch.flip(total, [axis]) if attributes.get("reverse") else total


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
        axes = read_axes(attributes, x)
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


def _arg_reduction(function: Callable[..., Tensor]) -> Operator:
    def run(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
        axis, keep = attributes.get("axis", 0), bool(attributes.get("keepdims", 1))
        if not attributes.get("select_last_index"):
            return function(x[0], dim=axis, keepdim=keep)
        last: int = x[0].shape[axis] - 1
        return last - function(torch.flip(x[0], [axis]), dim=axis, keepdim=keep)

    return run


OPERATORS["ArgMax"] = _arg_reduction(torch.argmax)
OPERATORS["ArgMin"] = _arg_reduction(torch.argmin)


@operator("TopK")
def _top_k(attributes: Attributes, opset: int, x: list[Any]) -> tuple[Tensor, Tensor]:
    top = torch.topk(
        x[0], int(x[1].item()), attributes.get("axis", -1), bool(attributes.get("largest", 1)), sorted=True
    )
    return top.values, top.indices


def decode_text(value: Any) -> str:
    """Return an attribute of text, which ONNX keeps as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
