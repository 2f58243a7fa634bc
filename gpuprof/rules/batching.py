"""The rules of batch formation: pure functions called by the router and the simulator, assumed by the queueing model.

Partial batches of models with convolutions are padded on a GPU with copies of their last row, whose outputs are
dropped: to the full batch or, where the runtime keeps a plan for each, to the next power of two
(`gpuprof.runtime.gpu_session`). ONNX Runtime (from 1.20 on) caches cuDNN's execution plan of a convolution only for the
last input shape. On an H200 a change of batch size took 130 ms for ResNet-50 and 1.3 s for MobileNetV2, whose batches
take 3 and 1.5 ms (`docs/gpu.md`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpuprof.domain.runtime_variant import Padding


def batch_size_now(waiting: int, batch: int, oldest_wait_ms: float, max_wait_ms: float) -> int:
    """Return the number of oldest requests that an idle process takes now; 0: the process waits for more.

    ``waiting``: requests in the queue; ``batch``: largest batch; ``oldest_wait_ms`` and ``max_wait_ms``: current and
    longest allowed wait of the oldest request.
    """
    if waiting >= batch:
        return batch
    return waiting if waiting and oldest_wait_ms >= max_wait_ms else 0


def wait_limit_ms(max_wait_ms: float, deadline_ms: float, latency_ms: Sequence[float]) -> float:
    """Return the longest wait for a full batch at which the oldest request still meets its deadline.

    ``max_wait_ms``: longest wait at the replica; ``deadline_ms``: the request's deadline, from its arrival on;
    ``latency_ms``: expected time of a batch of 1, 2, …; the longest is used, because requests may join until the start.
    """
    if max_wait_ms <= 0.0:  # the common case; called three times per request
        return 0.0
    # Negative slack: even an immediate batch is late, so the request does not wait.
    slack = deadline_ms - max(latency_ms, default=0.0)
    return max(0.0, min(max_wait_ms, slack))


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
