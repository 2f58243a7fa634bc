"""Which models are given full batches only, where they are run by ONNX Runtime on a GPU.

ONNX Runtime (from 1.20 on) keeps cuDNN's execution plan of a convolution for the last shape of its input only, and
makes it anew whenever another comes. On an H200 a batch of another size than the one before took 130 ms longer for
ResNet-50 and 1.3 s for MobileNetV2, whose batches take 3 and 1.5 ms (`docs/gpu.md`). So partial batches of such models
are filled up with copies of their last row, whose outputs are dropped: every batch has one shape, and takes one time.
"""

from __future__ import annotations

from collections.abc import Collection

#: Ops of which a plan is made for each shape, as exporters and ONNX Runtime's optimizer write them.
_PLANNED_BY_SHAPE = frozenset({"Conv", "ConvTranspose", "FusedConv", "NhwcConv", "NhwcFusedConv"})


def needs_padding(op_types: Collection[str]) -> bool:
    """Return whether partial batches of a model with these ops are filled up on a GPU.

    Examples
    --------
    >>> needs_padding({"Conv", "Relu"}), needs_padding({"MatMul", "Softmax"})
    (True, False)
    """
    return not _PLANNED_BY_SHAPE.isdisjoint(op_types)
