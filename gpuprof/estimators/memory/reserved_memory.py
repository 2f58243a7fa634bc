"""Memory of a model without measurements, from its weights and live activations.

The memory reserved by PyTorch's allocator was fitted by ``python -m bench.creq`` to Table A.1 of Elvinger's thesis
(ETH, 2024): thirteen models on a V100, batches of 4 to 128. Memory there is linear in the batch. Its constant part is
the weights, held once, without copies and without the CUDA context. Its slope exceeds the live activations, since an
allocator keeps the blocks that it once requested, and convolutions need workspaces: 0.9 (bert) to 4.2 times as much
(alexnet), 6.9 for gpt2, whose logits and cache the exported classifier lacks.

Whole processes of ONNX Runtime were measured by NVML: four networks at batch 1 to 64 on an H200 (`bench/gpu/results`).
Their constant part is the CUDA context and the code of cuDNN and cuBLAS.
"""

from __future__ import annotations

from gpuprof.domain.estimate import Figure

SOURCE = "weights and live activations, scaled"
#: Bytes reserved per byte of weights, and per byte of live activations; least squares of relative errors, each model
#: with the same weight.
_WEIGHTS, _ACTIVATIONS = 1.34, 1.63
#: Range of measured over predicted figures of a model held out of the fit. With thirteen models this is an interval of
#: 86% for another; made of twelve, it held 88% of the rows of the thirteenth.
_LOW, _HIGH = 0.49, 3.07
#: Constants of a process of ONNX Runtime: its memory without a model, 660 to 720 MiB for four networks, and bytes per
#: byte of live activations, 2.3 to 4.5. With them the 17 measured figures are off by 9% in the mean, at most by 16%, on
#: the one GPU of the fit: elsewhere a context may be half as large.
_PROCESS_BYTES, _LEAST_PROCESS_BYTES = 700.0 * 2**20, 300.0 * 2**20
_HELD_ACTIVATIONS = 3.0


def predict_reserved(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return the memory reserved by a process, without its CUDA context, with its interval, at least the weights.

    ``precision``: named in the source as the type of the counted bytes; None: the types of the file.
    """
    value = _WEIGHTS * weight_bytes + _ACTIVATIONS * activation_bytes
    source = SOURCE if precision is None else f"{SOURCE}, in {precision}"
    return Figure(value, source, max(weight_bytes, _LOW * value), _HIGH * value)


def predict_held(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return the GPU memory of a process of ONNX Runtime, with its interval; ``precision`` as in `predict_reserved`."""
    value = _PROCESS_BYTES + weight_bytes + _HELD_ACTIVATIONS * activation_bytes
    source = f"process, {SOURCE}" if precision is None else f"process, {SOURCE}, in {precision}"
    low = _LEAST_PROCESS_BYTES + weight_bytes + _LOW * _HELD_ACTIVATIONS * activation_bytes
    return Figure(value, source, low, _PROCESS_BYTES + _HIGH * (value - _PROCESS_BYTES))


def predict_process(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return the GPU memory of a process of PyTorch or a compiler: reserved memory, CUDA context and code.

    ``precision``: as `predict_reserved`.
    """
    reserved = predict_reserved(weight_bytes, activation_bytes, precision)
    low = _LEAST_PROCESS_BYTES + (reserved.low or 0.0)
    return Figure(
        _PROCESS_BYTES + reserved.value, f"process, {reserved.source}", low, 2.0 * _PROCESS_BYTES + reserved.upper()
    )
