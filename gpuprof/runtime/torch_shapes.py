"""ONNX operators that make, cut and rearrange tensors in PyTorch: the second part of `gpuprof.runtime.torch_ops`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpuprof.runtime.torch_ops import (
    OPERATORS,
    Attributes,
    decode_text,
    move_to_one_device,
    numbers,
    operator,
    read_axes,
)

__all__ = ["OPERATORS"]


OPERATORS |= {
    "Concat": lambda a, v, x: torch.cat(move_to_one_device(x), a["axis"]),
    "Tile": lambda a, v, x: torch.tile(x[0], numbers(x[1])),
    # Runtimes that transpose move the values: a view only would leave that to whatever comes next.
    "Transpose": lambda a, v, x: x[0].permute(a.get("perm", tuple(reversed(range(x[0].dim()))))).contiguous(),
}


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


@operator("Squeeze")
def _squeeze(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    axes = read_axes(attributes, x)
    return torch.squeeze(x[0]) if axes is None else torch.squeeze(x[0], tuple(axes))


@operator("Unsqueeze")
def _unsqueeze(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    value: Tensor = x[0]
    axes = read_axes(attributes, x) or []
    rank = value.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        value = torch.unsqueeze(value, axis)
    return value


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
    data, index = move_to_one_device(x)
    axis = attributes.get("axis", 0) % data.dim()
    # ONNX counts negative indices from the end; index_select refuses them.
    index = torch.where(index < 0, index + data.shape[axis], index)
    found = torch.index_select(data, axis, index.flatten().to(torch.int64))
    return found.reshape(*data.shape[:axis], *index.shape, *data.shape[axis + 1 :])


@operator("GatherElements")
def _gather_elements(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    data, index = move_to_one_device(x)
    axis = attributes.get("axis", 0)
    return torch.gather(data, axis, torch.where(index < 0, index + data.shape[axis], index))


@operator("GatherND")
def _gather_nd(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    data, index = move_to_one_device(x)
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


@operator("Pad")
def _pad(attributes: Attributes, opset: int, x: list[Any]) -> Tensor:
    sides = numbers(x[1]) if len(x) > 1 else list(attributes["pads"])
    value = x[2].item() if len(x) > 2 and x[2] is not None else attributes.get("value", 0.0)
    rank = x[0].dim()
    axes = [axis % rank for axis in numbers(x[3])] if len(x) > 3 and x[3] is not None else list(range(rank))
    before, after = dict(zip(axes, sides, strict=False)), dict(zip(axes, sides[len(axes) :], strict=True))
    pads = [side for axis in reversed(range(rank)) for side in (before.get(axis, 0), after.get(axis, 0))]
    mode = decode_text(attributes.get("mode", "constant"))
    if mode == "constant":
        return functional.pad(x[0], pads, value=value)
    while pads and pads[-2:] == [0, 0]:  # PyTorch reflects the last axes only
        pads = pads[:-2]
    return functional.pad(x[0], pads, mode={"edge": "replicate"}.get(mode, mode))
