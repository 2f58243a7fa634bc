"""Padding of partial batches for models run by ONNX Runtime on a GPU.

ONNX Runtime (from 1.20 on) caches cuDNN's execution plan of a convolution only for the last input shape, and rebuilds
the plan at every change of shape. On an H200 a change of batch size took 130 ms for ResNet-50 and 1.3 s for
MobileNetV2, whose batches take 3 and 1.5 ms (`docs/gpu.md`). So partial batches of such models are padded with copies
of their last row, whose outputs are dropped: to the full batch or, where the runtime keeps a plan for each, to the
next power of two (`gpuprof.runtime.gpu_session`).
"""

from __future__ import annotations

from collections.abc import Collection

from gpuprof.domain.runtime_variant import Padding

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


def padded_size(rows: int, batch: int, padding: Padding) -> int:
    """Return the size at which a batch of ``rows`` requests is run by a replica with batches of at most ``batch``.

    Examples
    --------
    >>> [padded_size(rows, 6, Padding.POWERS_OF_TWO) for rows in (1, 2, 3, 4, 5, 6)]
    [1, 2, 4, 4, 6, 6]
    >>> padded_size(1, 6, Padding.FULL), padded_size(3, 6, Padding.NONE)
    (6, 3)
    """
    if padding is Padding.NONE:
        return rows
    return batch if padding is Padding.FULL else min(batch, 1 << (rows - 1).bit_length())
