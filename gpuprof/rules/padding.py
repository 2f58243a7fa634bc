"""Padding of partial batches for models run by ONNX Runtime on a GPU.

ONNX Runtime (from 1.20 on) caches cuDNN's execution plan of a convolution only for the last input shape, and rebuilds
the plan at every change of shape. On an H200 a change of batch size took 130 ms for ResNet-50 and 1.3 s for
MobileNetV2, whose batches take 3 and 1.5 ms (`docs/gpu.md`). So partial batches of such models are padded with copies
of their last row, whose outputs are dropped: all batches have the same shape and take the same time.
"""

from __future__ import annotations

from collections.abc import Collection

#: Ops with an execution plan for each shape, as named by exporters and ONNX Runtime's optimizer.
_PLANNED_BY_SHAPE = frozenset({"Conv", "ConvTranspose", "FusedConv", "NhwcConv", "NhwcFusedConv"})


def needs_padding(op_types: Collection[str]) -> bool:
    """Return whether partial batches of a model with these ops are padded on a GPU.

    Examples
    --------
    >>> needs_padding({"Conv", "Relu"}), needs_padding({"MatMul", "Softmax"})
    (True, False)
    """
    return not _PLANNED_BY_SHAPE.isdisjoint(op_types)
