"""Memory that PyTorch's allocator reserves for a model without measurements, from its weights and live activations.

Fitted by ``python -m bench.creq`` to Table A.1 of Elvinger's thesis (ETH, 2024): thirteen models on a V100, batches of
4 to 128. Memory there is a line in the batch. It begins at the weights, held once: neither copies of them nor the CUDA
context are in it. What it grows by is more than the activations alive at once, since an allocator keeps the blocks that
it once asked for, and convolutions take workspaces: 0.9 (bert) to 4.2 times as much (alexnet), 6.9 for gpt2, whose
logits and cache the exported classifier lacks.
"""

from __future__ import annotations

from gpuprof.domain.estimate import Figure

SOURCE = "weights and live activations, scaled"
#: Bytes held for a byte of weights, and for one of activations alive at once; least squares of relative errors, each
#: model with the same weight.
_WEIGHTS, _ACTIVATIONS = 1.34, 1.63
#: All measured figures of a model were between these multiples of what is predicted without it. With thirteen models
#: that is an interval of 86% for another; made of twelve, it held 88% of the rows of the thirteenth.
_LOW, _HIGH = 0.49, 3.07


def predict_reserved(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return what a process reserves, its CUDA context left out, with its interval; the weights are in it at least.

    ``precision``: what the source says that the bytes are counted in; left out, the types of the file.
    """
    value = _WEIGHTS * weight_bytes + _ACTIVATIONS * activation_bytes
    source = SOURCE if precision is None else f"{SOURCE}, in {precision}"
    return Figure(value, source, max(weight_bytes, _LOW * value), _HIGH * value)
