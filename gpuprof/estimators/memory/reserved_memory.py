"""Memory of a model without measurements, from its weights and live activations.

What PyTorch's allocator reserves was fitted by ``python -m bench.creq`` to Table A.1 of Elvinger's thesis (ETH, 2024):
thirteen models on a V100, batches of 4 to 128. Memory there is a line in the batch. It begins at the weights, held
once: neither copies of them nor the CUDA context are in it. What it grows by is more than the activations alive at
once, since an allocator keeps the blocks that it once asked for, and convolutions take workspaces: 0.9 (bert) to 4.2
times as much (alexnet), 6.9 for gpt2, whose logits and cache the exported classifier lacks.

A process of ONNX Runtime was measured whole, by NVML: four networks at batch 1 to 64 on an H200
(`bench/gpu/results`). It begins with the CUDA context and the code of cuDNN and cuBLAS.
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
#: Of a process of ONNX Runtime: what it holds without a model, 660 to 720 MiB for four networks, and bytes for one of
#: activations alive at once, 2.3 to 4.5. With these the 17 measured figures are off by 9% in the mean, at most by 16%,
#: on the one GPU that they were read off: elsewhere a context may be half as large.
_PROCESS_BYTES, _LEAST_PROCESS_BYTES = 700.0 * 2**20, 300.0 * 2**20
_HELD_ACTIVATIONS = 3.0


def predict_reserved(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return what a process reserves, its CUDA context left out, with its interval; the weights are in it at least.

    ``precision``: what the source says that the bytes are counted in; left out, the types of the file.
    """
    value = _WEIGHTS * weight_bytes + _ACTIVATIONS * activation_bytes
    source = SOURCE if precision is None else f"{SOURCE}, in {precision}"
    return Figure(value, source, max(weight_bytes, _LOW * value), _HIGH * value)


def predict_held(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return what a process of ONNX Runtime holds of a GPU, with its interval; ``precision`` as `predict_reserved`."""
    value = _PROCESS_BYTES + weight_bytes + _HELD_ACTIVATIONS * activation_bytes
    source = f"process, {SOURCE}" if precision is None else f"process, {SOURCE}, in {precision}"
    low = _LEAST_PROCESS_BYTES + weight_bytes + _LOW * _HELD_ACTIVATIONS * activation_bytes
    return Figure(value, source, low, _PROCESS_BYTES + _HIGH * (value - _PROCESS_BYTES))


def predict_process(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return what a process of PyTorch or a compiler holds of a GPU: what it reserves, and its CUDA context and code.

    ``precision``: as `predict_reserved`.
    """
    reserved = predict_reserved(weight_bytes, activation_bytes, precision)
    low = _LEAST_PROCESS_BYTES + (reserved.low or 0.0)
    return Figure(
        _PROCESS_BYTES + reserved.value, f"process, {reserved.source}", low, 2.0 * _PROCESS_BYTES + reserved.upper()
    )
