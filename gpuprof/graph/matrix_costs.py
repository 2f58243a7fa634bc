"""FLOPs of ops that multiply and add: convolutions, matrix products, Einsum, recurrent cells, attention.

A multiply-add counts two at any width; adding a bias counts one for each output.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from gpuprof.graph.op_call import OpCall


def convolution(call: OpCall, weight: int = 1, bias: int = 2) -> int:
    """Return 2·taps·(channels / groups) + bias for each output element; padding counts as data."""
    kernel = call.input(weight).shape
    return call.y.elements * (2 * prod(kernel[1:]) + call.has(bias))


def transposed_convolution(call: OpCall) -> int:
    """Return 2·taps·(output channels / groups) for each input element, and the bias."""
    return 2 * call.x.elements * prod(call.input(1).shape[1:]) + call.y.elements * call.has(2)


def deformable_convolution(call: OpCall) -> int:
    """Return the FLOPs of the convolution and of bilinear sampling of each tap (four multiply-adds)."""
    x, kernel, y = call.x.shape, call.input(1).shape, call.y.shape
    taps = y[0] * x[1] * prod(kernel[2:]) * prod(y[2:])
    return call.y.elements * (2 * prod(kernel[1:]) + call.has(3)) + taps * (8 + call.has(4))


def gemm(call: OpCall) -> int:
    """Return 2·M·N·K, plus M·N for C, plus M·N for each of α and β other than 1."""
    a = call.x.shape
    depth = a[0] if call.whole("transA", 0) else a[1]
    # Exactly 1: runtimes omit the factor only then.
    scaled = (call.number("alpha", 1.0) != 1.0) + (call.has(2) and call.number("beta", 1.0) != 1.0)
    return call.y.elements * (2 * depth + call.has(2) + scaled)


def matmul(call: OpCall) -> int:
    """Return 2·K for each output element, with any broadcasting."""
    transposed = call.whole("transA", 0) and len(call.x.shape) > 1
    return 2 * call.y.elements * call.x.shape[-2 if transposed else -1]


def matmul_nbits(call: OpCall) -> int:
    """Return 2·K for each output element; the quantised matrix hides its own shape."""
    return 2 * call.y.elements * call.whole("K", call.x.shape[-1])


def einsum(call: OpCall) -> int:
    """Return, for each point of the labels' grid, a multiplication per further operand and an addition.

    The count is 2 per point for two operands; a single operand is only summed, or moved where no label is summed.
    """
    operands, _, result = call.text("equation", "").replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, operand in zip(operands.split(","), call.inputs, strict=False):
        if operand is not None:
            _label(term, operand.shape, sizes)
    points = prod(sizes.values())
    if "->" not in call.text("equation", ""):
        letters = operands.replace(",", "").replace("...", "")
        result = "".join(letter for letter in letters if letters.count(letter) == 1)
    summed = any(label not in result for label in sizes if len(label) == 1)
    return points * (len(call.inputs) - 1 + summed)


def _label(term: str, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Record the size of each label of a term in ``sizes``; the axes of an ellipsis are labelled from the right."""
    before, dots, after = term.partition("...")
    hidden = len(shape) - len(before) - len(after)
    labels = list(before) + ([f"...{i - hidden}" for i in range(hidden)] if dots else []) + list(after)
    for label, size in zip(labels, shape, strict=False):
        sizes[label] = max(size, sizes.get(label, 1))


def _recurrent(gates: int, pointwise: int, transposed: bool = False) -> Callable[[OpCall], int]:
    """Return the FLOP formula of a cell; ``transposed``: weights are [directions, features, gates]."""
    across, along = (2, 1) if transposed else (1, 2)

    def count(call: OpCall) -> int:
        steps = call.x.shape[0] * call.x.shape[1]
        directions, features = call.input(1).shape[0], call.input(1).shape[along]
        hidden = call.input(2).shape[along]
        if call.input(2).shape[across] != gates * hidden:
            raise ValueError(f"{call.op_type} has weights of another layout")
        products = 2 * gates * hidden * (features + hidden)
        sums = gates * hidden * (1 + call.has(3))  # input's and state's parts, and the bias
        return steps * directions * (products + sums + pointwise * hidden)

    return count


#: Three sigmoids of four, two tanh, three products and a sum.
lstm = _recurrent(4, 18)
#: ONNX Runtime's quantised LSTM, with transposed 8-bit weights.
dynamic_lstm = _recurrent(4, 18, transposed=True)
#: Two sigmoids of four, a tanh, the reset product, and (1 - z)·h' + z·h.
gru = _recurrent(3, 14)
rnn = _recurrent(1, 1)


def attention(call: OpCall) -> int:
    """Return the FLOPs of ONNX's Attention: QKᵀ, scaling, mask, softmax, and the product with V."""
    q, k, v = (call.input(i).shape for i in range(3))
    if len(q) == 4:
        batch, heads, queries, width = q
        keys, value_width = k[2], v[3]
    else:
        batch, queries, _ = q
        heads = call.whole("q_num_heads", 1)
        shared = call.whole("kv_num_heads", heads)
        width, keys, value_width = q[2] // heads, k[1], v[2] // shared
    past = call.optional(4)
    keys += past.shape[2] if past is not None else 0
    return _scores(batch, heads, queries, keys, width, value_width, masked=call.has(3))


def multi_head_attention(call: OpCall) -> int:
    """Return the FLOPs of ONNX Runtime's MultiHeadAttention and GroupQueryAttention, with projected inputs."""
    batch, queries, wide = call.x.shape[:3]
    heads = call.whole("num_heads", 1)
    shared = call.whole("kv_num_heads", heads)
    key, value = call.optional(1), call.optional(2)
    if key is None or value is None:  # Q, K and V packed into a single tensor
        width = wide // (heads + 2 * shared) if len(call.x.shape) == 3 else call.x.shape[-1]
        return _scores(batch, heads, queries, queries, width, width)
    keys = key.shape[1] if len(key.shape) == 3 else key.shape[2]
    width, value_width = wide // heads, value.shape[-1] // (shared if len(value.shape) == 3 else 1)
    return _scores(batch, heads, queries, keys, width, value_width)


def quantised_attention(call: OpCall) -> int:
    """Return the FLOPs of ONNX Runtime's QAttention: its Attention on 8-bit inputs, with a scale each."""
    batch, length, features = call.x.shape
    wide = call.input(1).shape[1]
    heads = call.whole("num_heads", 1)
    projection = batch * length * wide * (2 * features + 2)  # the scale, and the bias, which is required
    width = wide // 3 // heads
    return projection + _scores(batch, heads, length, length, width, width, masked=call.has(5))


def mixture_of_experts(call: OpCall) -> int:
    """Return the FLOPs of ONNX Runtime's MoE and QMoE: each row goes through ``k`` experts of two or three products.

    QMoE packs two weights of four bits into a byte along their last axis; the inner width follows from the experts'
    sizes.
    """
    rows, features = prod(call.x.shape[:-1]), call.x.shape[-1]
    experts = call.input(1).shape[1]
    weights = (2, 4, 6) if call.op_type == "MoE" else (2, 5, 8)  # scales lie between those of QMoE
    inner = [_inner_width(call, position, features) for position in weights if call.has(position)]
    chosen = min(call.whole("k", 1), experts)
    return rows * (5 * experts + chosen * sum(2 * features * width for width in inner))


def _inner_width(call: OpCall, position: int, features: int) -> int:
    """Return the number of hidden units of an expert's matrix, of either layout, packed or not."""
    packed = 8 // call.whole("expert_weight_bits", 8) if call.op_type == "QMoE" else 1
    return prod(call.input(position).shape[1:]) * packed // features


def cross_distances(call: OpCall) -> int:
    """Return the FLOPs of ONNX Runtime's CDist: difference, square and sum for each pair of rows and each feature."""
    return 3 * call.y.elements * call.x.shape[-1]


def projected_attention(call: OpCall) -> int:
    """Return the FLOPs of ONNX Runtime's Attention, which includes the projection to Q, K and V."""
    batch, length, features = call.x.shape
    wide = call.input(1).shape[1]
    heads = call.whole("num_heads", 1)
    projection = batch * length * wide * (2 * features + call.has(2))
    width = wide // 3 // heads
    return projection + _scores(batch, heads, length, length, width, width, masked=call.has(3))


def _scores(batch: int, heads: int, queries: int, keys: int, width: int, value_width: int, masked: bool = False) -> int:
    rows = batch * heads * queries
    cells = rows * keys
    return 2 * cells * (width + value_width) + cells * (1 + masked) + softmax_flops(cells, rows)


def softmax_flops(elements: int, rows: int) -> int:
    """Return FLOPs of a stable softmax: maximum, difference, exponential, sum, quotient."""
    return 5 * elements - 2 * rows
