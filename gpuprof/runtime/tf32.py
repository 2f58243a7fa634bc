"""Whether PyTorch computes products and convolutions of float32 in TF32, by whichever name its version has for it."""

from __future__ import annotations

from typing import Any


def set_tf32(torch: Any, wanted: bool) -> None:
    """Let PyTorch compute products and convolutions of float32 in TF32, or not.

    By itself PyTorch computes convolutions in TF32 and products in float32, where ONNX Runtime computes both in TF32.
    From PyTorch 2.9 on each kind has a precision of its own, which must not be mixed with the older switches.
    """
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(products, "fp32_precision"):
        for kind in (products, cudnn.conv, cudnn.rnn):
            kind.fp32_precision = "tf32" if wanted else "ieee"
    else:
        products.allow_tf32 = cudnn.allow_tf32 = wanted
