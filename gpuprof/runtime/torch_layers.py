"""ONNX operators with windows, statistics or memory in PyTorch: the third part of `gpuprof.runtime.torch_ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpuprof.errors import InputError
from gpuprof.runtime.torch_ops import Attributes, numbers, operator
from gpuprof.runtime.torch_shapes import OPERATORS

__all__ = ["OPERATORS"]

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_MAX_POOLS = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)


OPERATORS |= {
    "GlobalAveragePool": lambda a, v, x: torch.mean(x[0], dim=tuple(range(2, x[0].dim())), keepdim=True),
    "GlobalMaxPool": lambda a, v, x: torch.amax(x[0], dim=tuple(range(2, x[0].dim())), keepdim=True),
    "InstanceNormalization": lambda a, v, x: functional.instance_norm(
        x[0], weight=x[1], bias=x[2], eps=a.get("epsilon", 1e-5)
    ),
    "LRN": lambda a, v, x: functional.local_response_norm(
        x[0], a["size"], a.get("alpha", 1e-4), a.get("beta", 0.75), a.get("bias", 1.0)
    ),
}


def _window(
    attributes: Attributes, x: Tensor, sides: Sequence[int]
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Return strides, dilations, and what is padded before and after each axis."""
    rank = len(sides)
    strides = list(attributes.get("strides", [1] * rank))
    dilations = list(attributes.get("dilations", [1] * rank))
    how = attributes.get("auto_pad", b"NOTSET")
    how = how.decode() if isinstance(how, bytes) else how
    if how in ("NOTSET", "VALID"):
        pads = list(attributes.get("pads", [0] * 2 * rank)) if how == "NOTSET" else [0] * 2 * rank
        return strides, dilations, list(zip(pads[:rank], pads[rank:], strict=True))
    both = []
    for length, side, stride, dilation in zip(x.shape[2:], sides, strides, dilations, strict=True):
        # SAME: as many outputs as steps of the stride fit, rounded up (ONNX, Conv, auto_pad).
        missing = max(0, (-(-length // stride) - 1) * stride + dilation * (side - 1) + 1 - length)
        both.append((missing // 2, missing - missing // 2)[:: 1 if how == "SAME_UPPER" else -1])
    return strides, dilations, [(before, after) for before, after in both]


def _pad_evenly(x: Tensor, pads: Sequence[tuple[int, int]], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Return the tensor and equal pads for both ends of each axis; it is padded itself where the ends differ."""
    if all(before == after for before, after in pads):
        return x, [before for before, _ in pads]
    flat = [side for pair in reversed(pads) for side in pair]
    return functional.pad(x, flat, value=value), [0] * len(pads)


@operator("Conv")
def _conv(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    strides, dilations, pads = _window(attributes, x[0], x[1].shape[2:])
    value, equal = _pad_evenly(x[0], pads)
    bias = x[2] if len(x) > 2 else None
    convolve = _CONVOLUTIONS[x[1].dim() - 3]
    return convolve(value, x[1], bias, strides, equal, dilations, attributes.get("group", 1))


@operator("ConvTranspose")
def _conv_transpose(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    strides, dilations, pads = _window(attributes, x[0], x[1].shape[2:])
    if "output_shape" in attributes or any(before != after for before, after in pads):
        raise InputError("a ConvTranspose with an output_shape or unequal pads is not run by PyTorch here")
    extra = list(attributes.get("output_padding", [0] * len(pads)))
    bias = x[2] if len(x) > 2 else None
    convolve = _TRANSPOSED[x[1].dim() - 3]
    equal = [before for before, _ in pads]
    return convolve(x[0], x[1], bias, strides, equal, extra, attributes.get("group", 1), dilations)


def _pool_pads(
    attributes: Attributes, x: Tensor, sides: Sequence[int]
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """As `_window`, with the ends padded until the last window fits where the model rounds up."""
    strides, dilations, pads = _window(attributes, x, sides)
    if not attributes.get("ceil_mode", 0):
        return strides, dilations, pads
    longer = []
    for length, side, stride, dilation, (before, after) in zip(
        x.shape[2:], sides, strides, dilations, pads, strict=True
    ):
        spare = (length + before + after - dilation * (side - 1) - 1) % stride
        last = length + before + after - dilation * (side - 1) - 1 + (stride - spare if spare else 0)
        fits = spare and last < length + before  # a window that begins in the padding behind is none
        longer.append((before, after + (stride - spare if fits else 0)))
    return strides, dilations, longer


@operator("MaxPool")
def _max_pool(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    sides = list(attributes["kernel_shape"])
    strides, dilations, pads = _pool_pads(attributes, x[0], sides)
    value, equal = _pad_evenly(x[0], pads, float("-inf"))
    # PyTorch refuses pads of more than half a window, which ONNX allows.
    if any(2 * pad > side for pad, side in zip(equal, sides, strict=True)):
        value, equal = (
            functional.pad(x[0], [s for p in reversed(pads) for s in p], value=float("-inf")),
            [0] * len(pads),
        )
    return _MAX_POOLS[len(sides) - 1](value, sides, strides, equal, dilations)


@operator("AveragePool")
def _average_pool(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    sides = list(attributes["kernel_shape"])
    strides, _, pads = _pool_pads(attributes, x[0], sides)
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(sides) - 1]
    if not any(side for pair in pads for side in pair):
        return pool(x[0], sides, strides)
    flat = [side for pair in reversed(pads) for side in pair]
    # Padded by hand: PyTorch pads both ends of an axis alike.
    total = pool(functional.pad(x[0], flat), sides, strides)
    if attributes.get("count_include_pad", 0):
        return total
    ones = torch.ones((1, 1, *x[0].shape[2:]), dtype=x[0].dtype, device=x[0].device)
    return total / pool(functional.pad(ones, flat), sides, strides)


@operator("BatchNormalization")
def _batch_norm(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    value, scale, shift, mean, variance = x[:5]
    return functional.batch_norm(value, mean, variance, scale, shift, eps=attributes.get("epsilon", 1e-5))


@operator("LayerNormalization")
def _layer_norm(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    axis = attributes.get("axis", -1) % x[0].dim()
    bias = x[2] if len(x) > 2 else None
    return functional.layer_norm(x[0], x[0].shape[axis:], x[1], bias, attributes.get("epsilon", 1e-5))


@operator("Resize", "Upsample")
def _resize(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    mode = attributes.get("mode", b"nearest").decode()
    where = attributes.get("coordinate_transformation_mode", b"half_pixel").decode()
    if mode == "cubic" or (mode == "linear" and where not in ("half_pixel", "align_corners", "pytorch_half_pixel")):
        raise InputError(f"a Resize by {mode}, {where}, is not run by PyTorch here")
    if len(x) > 3 and x[3] is not None:
        size = numbers(x[3])[2:]
    else:
        scales = x[2] if len(x) > 2 else x[1]
        size = [int(side * scale) for side, scale in zip(x[0].shape, scales.tolist(), strict=True)][2:]
    if mode == "nearest":
        return functional.interpolate(x[0], size, mode="nearest")
    return functional.interpolate(x[0], size, mode="bilinear", align_corners=where == "align_corners")


@operator("DepthToSpace")
def _depth_to_space(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    if attributes.get("mode", b"DCR") == b"CRD":
        return functional.pixel_shuffle(x[0], attributes["blocksize"])
    value: Tensor = x[0]
    n, c, h, w = value.shape
    side = attributes["blocksize"]
    parts = value.reshape(n, side, side, c // side**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // side**2, h * side, w * side)


def _recurrent(gates: Sequence[int], states: int) -> Any:
    """Return the function of a recurrent layer whose gates PyTorch wants in the order ``gates``."""

    def run(attributes: Attributes, opset: int, x: list[Any]) -> tuple[Tensor, ...]:
        x = [*x, *[None] * (7 - len(x))]
        value, weights, recurrence, bias = x[:4]
        directions, hidden = weights.shape[0], attributes["hidden_size"]
        if x[4] is not None or attributes.get("direction", b"forward") == b"reverse" or "activations" in attributes:
            raise InputError("a recurrent layer with sequence lengths, reversed or with activations of its own "
                             "is not run by PyTorch here")  # fmt: skip
        if len(gates) == 3 and not attributes.get("linear_before_reset", 0):
            return _gru_reset_before(attributes, x)
        if bias is None:
            bias = torch.zeros(directions, 2 * len(gates) * hidden, dtype=value.dtype, device=value.device)
        flat = []
        for direction in range(directions):
            parts = bias[direction].reshape(2 * len(gates), hidden)
            flat += [
                _reorder_gates(weights[direction], gates, hidden),
                _reorder_gates(recurrence[direction], gates, hidden),
            ]
            flat += [parts[list(gates)].flatten(), parts[[len(gates) + gate for gate in gates]].flatten()]
        first = [s if s is not None else value.new_zeros(directions, value.shape[1], hidden) for s in x[5 : 5 + states]]
        layer = torch.lstm if states == 2 else torch.gru
        start: Any = first if states == 2 else first[0]
        found = layer(value, start, flat, True, 1, 0.0, False, directions == 2, False)
        steps = found[0].reshape(*value.shape[:2], directions, hidden).transpose(1, 2)
        return (steps.contiguous(), *found[1:])

    return run


def _reorder_gates(matrix: Tensor, gates: Sequence[int], hidden: int) -> Tensor:
    return matrix.reshape(len(gates), hidden, -1)[list(gates)].reshape(matrix.shape).contiguous()


def _gru_reset_before(attributes: Attributes, x: list[Any]) -> tuple[Tensor, Tensor]:
    """Step through a GRU that applies its reset gate before the product, which cuDNN has no layer for."""
    value, hidden = x[0], attributes["hidden_size"]
    if x[1].shape[0] != 1:
        raise InputError("a bidirectional GRU that resets before its product is not run by PyTorch here")
    weights, recurrence = x[1][0], x[2][0]
    bias = value.new_zeros(6 * hidden) if x[3] is None else x[3][0]
    state = value.new_zeros(value.shape[1], hidden) if x[5] is None else x[5][0]
    given = value @ weights.T + bias[: 3 * hidden]
    recurrent_bias, last = bias[3 * hidden :], 2 * hidden
    steps = []
    for step in given:
        gates = torch.sigmoid(step[:, :last] + state @ recurrence[:last].T + recurrent_bias[:last])
        update, reset = gates[:, :hidden], gates[:, hidden:]
        fresh = torch.tanh(step[:, last:] + (reset * state) @ recurrence[last:].T + recurrent_bias[last:])
        state = (1 - update) * fresh + update * state
        steps.append(state)
    return torch.stack(steps).unsqueeze(1), state.unsqueeze(0)


# ONNX keeps the gates of an LSTM as input, output, forget, cell; PyTorch as input, forget, cell, output. Those of a
# GRU are update, reset, hidden here and reset, update, new there.
OPERATORS["LSTM"] = _recurrent((0, 2, 3, 1), 2)
OPERATORS["GRU"] = _recurrent((1, 0, 2), 1)
