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

from dataclasses import replace

from gpuprof.domain.estimate import Figure
from gpuprof.estimators.constants import constant

SOURCE = "weights and live activations, scaled"
#: Begin of the source of a whole process's memory, with its context.
PROCESS = "process, "


def predict_reserved(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return the memory reserved by a process without its CUDA context; the interval is at least the weights.

    ``precision``: type of the counted bytes, to be named in the figure's source; None: the types of the file.
    """
    value = constant("memory", "weights") * weight_bytes + constant("memory", "activations") * activation_bytes
    source = SOURCE if precision is None else f"{SOURCE}, in {precision}"
    low, high = constant("memory", "low") * value, constant("memory", "high") * value
    return Figure(value, source, max(weight_bytes, low), high)


def predict_held(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return the GPU memory of a process of ONNX Runtime, with its interval; ``precision`` as in `predict_reserved`."""
    context, held = constant("memory", "process_bytes"), constant("memory", "held_activations") * activation_bytes
    value = context + weight_bytes + held
    source = f"{PROCESS}{SOURCE}" if precision is None else f"{PROCESS}{SOURCE}, in {precision}"
    low = constant("memory", "least_process_bytes") + weight_bytes + constant("memory", "low") * held
    return Figure(value, source, low, context + constant("memory", "high") * (value - context))


def predict_process(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return the GPU memory of a process of PyTorch or a compiler: reserved memory, CUDA context and code.

    ``precision``: as `predict_reserved`.
    """
    reserved, context = predict_reserved(weight_bytes, activation_bytes, precision), constant("memory", "process_bytes")
    low = constant("memory", "least_process_bytes") + (reserved.low or 0.0)
    return Figure(context + reserved.value, f"{PROCESS}{reserved.source}", low, 2.0 * context + reserved.upper())


def context_fraction(granted_fraction: float) -> float:
    """Return the size of the context of a client that gets a part of the SMs, as a fraction of a whole GPU's."""
    return 1.0 - constant("memory", "context_by_sms") * (1.0 - granted_fraction)


def shrink_context(figure: Figure, granted_fraction: float) -> Figure:
    """Return a process's memory with the context of a client that gets a part of the SMs.

    A context reserves local memory for the threads of each granted SM. The upper end is kept.
    """
    saved = 1.0 - context_fraction(granted_fraction)
    value = figure.value - saved * constant("memory", "process_bytes")
    low = None if figure.low is None else figure.low - saved * constant("memory", "least_process_bytes")
    return replace(figure, value=value, low=low)
