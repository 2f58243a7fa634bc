"""Whether PyTorch computes products and convolutions of float32 in TF32."""

from __future__ import annotations

from typing import Any


def set_tf32(torch: Any, wanted: bool) -> None:
    """Let PyTorch compute products and convolutions of float32 in TF32, or not.

    By itself PyTorch computes convolutions in TF32 and products in float32, where ONNX Runtime computes both in TF32.
    These are the switches that every version has. Those that PyTorch 2.9 added for each kind of operation, set to
    "ieee", leave the older ones in a state in which PyTorch cannot read them: ``torch.export`` does, and fails.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wanted
