"""Costs of ops by type: floating-point operations and compulsory memory traffic.

Convention: an addition, a multiplication, a division, a comparison or selection, and a call of exp, log, sqrt, tanh,
erf etc. count 1 each, a multiply-add 2 at any width. Integer arithmetic counts like floating point, since quantised
networks consist of it. Traffic is compulsory: each input is read once, each output written once; views have no traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod

from gpuprof.domain.model import Tensor


@dataclass(frozen=True, slots=True)
class OpCall:
    """A node with its shapes."""

    op_type: str
    domain: str
    #: ``inputs``, ``outputs``: Tensors by ONNX's positions; None for absent optional tensors.
    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    attributes: Mapping[str, object]

    @property
    def x(self) -> Tensor:
        """The first input."""
        return self.input(0)

    @property
    def y(self) -> Tensor:
        """The first output."""
        tensor = self.outputs[0] if self.outputs else None
        if tensor is None:
            raise ValueError(f"{self.op_type} has no first output")
        return tensor

    def input(self, position: int) -> Tensor:
        """Return a required input of the op. Raises `ValueError` if absent."""
        tensor = self.optional(position)
        if tensor is None:
            raise ValueError(f"{self.op_type} lacks its input {position}")
        return tensor

    def optional(self, position: int) -> Tensor | None:
        """Return an input, or None when it is absent."""
        return self.inputs[position] if position < len(self.inputs) else None

    def has(self, position: int) -> bool:
        """Return whether an input is given."""
        return self.optional(position) is not None

    def whole(self, name: str, default: int) -> int:
        """Return an integer attribute."""
        value = self.attributes.get(name, default)
        return value if isinstance(value, int) else default

    def number(self, name: str, default: float) -> float:
        """Return a float attribute."""
        value = self.attributes.get(name, default)
        return float(value) if isinstance(value, int | float) else default

    def text(self, name: str, default: str) -> str:
        """Return a string attribute."""
        value = self.attributes.get(name, default)
        return value if isinstance(value, str) else default

    def wholes(self, name: str) -> tuple[int, ...]:
        """Return a list of integers, empty when absent."""
        value = self.attributes.get(name, ())
        return tuple(int(item) for item in value) if isinstance(value, list | tuple) else ()


def count_slices(tensor: Tensor, first_axis: int) -> int:
    """Return the number of slices of ``tensor`` before ``first_axis`` (negative: from the end)."""
    axis = first_axis + len(tensor.shape) if first_axis < 0 else first_axis
    return prod(tensor.shape[:axis])


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


def projected_attention(call: OpCall, mask: int = 3, scales: int = 0) -> int:
    """Return the FLOPs of ONNX Runtime's Attention, which includes the projection to Q, K and V.

    ``mask``: position of the mask; ``scales``: extra multiplications per projected value, for quantised inputs.
    """
    batch, length, features = call.x.shape
    wide = call.input(1).shape[1]
    heads = call.whole("num_heads", 1)
    projection = batch * length * wide * (2 * features + call.has(2) + scales)
    width = wide // 3 // heads
    return projection + _scores(batch, heads, length, length, width, width, masked=call.has(mask))


def _scores(batch: int, heads: int, queries: int, keys: int, width: int, value_width: int, masked: bool = False) -> int:
    rows = batch * heads * queries
    cells = rows * keys
    return 2 * cells * (width + value_width) + cells * (1 + masked) + softmax_flops(cells, rows)


def softmax_flops(elements: int, rows: int) -> int:
    """Return FLOPs of a stable softmax: maximum, difference, exponential, sum, quotient."""
    return 5 * elements - 2 * rows


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of an op at given shapes."""

    flops: int | None  #: None without a known formula.
    bytes_read: int
    bytes_written: int


def cost_of(
    op_type: str,
    domain: str,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    attributes: Mapping[str, object],
) -> OpCost:
    """Return FLOPs and bytes of a node; FLOPs are None for an op type without a formula.

    ``inputs`` and ``outputs``: tensors by position, None for absent optional tensors.
    """
    call = OpCall(op_type, domain, inputs, outputs, attributes)
    read_bytes, written_bytes = _traffic(call)
    return OpCost(_flops(call), read_bytes, written_bytes)


def _flops(call: OpCall) -> int | None:
    formula = _TABLES.get(call.domain, {}).get(call.op_type)
    if formula is None:
        return None
    try:
        return formula(call)
    except (ValueError, IndexError, ZeroDivisionError):
        return None  # unexpected operands: better unknown than wrong


_VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Shape", "Size", "Dropout"}
#: Ops that read only as much of their first input as they write.
_TAKING = {"Gather", "GatherElements", "GatherND", "Slice", "Compress"}


def _traffic(call: OpCall) -> tuple[int, int]:
    # Views change the shape without moving data.
    if call.op_type in _VIEWS and call.domain == "":
        return 0, 0
    inputs = {tensor.name: tensor.bytes for tensor in call.inputs if tensor is not None}
    written_bytes = sum(tensor.bytes for tensor in call.outputs if tensor is not None)
    if call.op_type in _TAKING and call.inputs and call.inputs[0] is not None:
        # By name: an op with the same tensor twice (x * x) reads the tensor once.
        source = call.inputs[0].name
        inputs[source] = min(inputs[source], written_bytes)
    return sum(inputs.values()), written_bytes


_Formula = Callable[[OpCall], int]


def _each(count: int) -> _Formula:
    """Return a formula of ``count`` FLOPs for each output element."""
    return lambda call: count * call.y.elements


def _variadic(extra: int) -> _Formula:
    return lambda call: (sum(tensor is not None for tensor in call.inputs) - 1 + extra) * call.y.elements


def _reduction(before: int, after: int) -> _Formula:
    """Return the formula of a reduction with ``before`` FLOPs per input element and ``after`` per output element."""
    return lambda call: (before + 1) * call.x.elements - call.y.elements + after * call.y.elements


def _softmax(call: OpCall) -> int:
    axis = call.whole("axis", -1)
    shape = call.x.shape
    # Before opset 13 a row comprises all axes from the axis on; only the number of rows differs.
    groups = call.x.elements // shape[axis] if shape and shape[axis] else 0
    return softmax_flops(call.x.elements, groups)


def _pool(each_tap: int, after: int) -> _Formula:
    """Return the formula of pooling windows; padding counts as data."""
    return lambda call: (each_tap * prod(call.wholes("kernel_shape")) + after - 1) * call.y.elements


def _layer_norm(call: OpCall) -> int:
    """Count mean, difference, variance (square, mean), scaling, weight and bias; per row ε, root and reciprocal."""
    return (6 + call.has(2)) * call.x.elements + 3 * count_slices(call.x, call.whole("axis", -1))


def _rms_norm(call: OpCall) -> int:
    return 4 * call.x.elements + 3 * count_slices(call.x, call.whole("axis", -1))


def _channel_norm(call: OpCall) -> int:
    groups = call.whole("num_groups", call.x.shape[1])
    return 7 * call.x.elements + 3 * call.x.shape[0] * groups


def _resize(call: OpCall) -> int:
    """Count multiply-adds of 2 (linear) or 4 (cubic) taps for each resized axis."""
    taps = {"linear": 2, "bilinear": 2, "cubic": 4}.get(call.text("mode", "nearest"), 0)
    axes = sum(a != b for a, b in zip(call.x.shape, call.y.shape, strict=True))
    return call.y.elements * (2 * taps**axes - 1) if taps and axes else 0


def _grid_sample(call: OpCall) -> int:
    mode = call.text("mode", "linear")
    taps = {"bilinear": 2, "linear": 2, "bicubic": 4, "cubic": 4}.get(mode, 0)
    return call.y.elements * 2 * taps ** (len(call.x.shape) - 2) if taps else 0


def _dft(call: OpCall) -> int:
    """Return the customary 5·n·log2(n) for a fast Fourier transform of n complex numbers."""
    points = call.y.elements // 2
    length = call.x.shape[call.whole("axis", -2)]
    return round(5 * points * log2(length)) if length > 1 else 0


_ONE = (
    "Add Sub Mul Div Neg Abs Sqrt Reciprocal Exp Log Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh Erf "
    "Floor Ceil Round Sign Relu Mod Pow Equal Less LessOrEqual Greater GreaterOrEqual And Or Not Xor Where BitShift "
    "BitwiseAnd BitwiseOr BitwiseNot BitwiseXor IsNaN IsInf ThresholdedRelu CumSum CumProd Shrink"
)
_MOVES = (
    "Reshape Squeeze Unsqueeze Identity Flatten Shape Size Dropout Transpose Concat Split Slice Gather GatherElements "
    "GatherND Pad Tile Expand DepthToSpace SpaceToDepth Cast CastLike OneHot ConstantOfShape EyeLike Trilu Compress "
    "NonZero ReverseSequence Range CenterCropPad MaxUnpool Col2Im BitCast TensorScatter"
)
_FORMULAS: dict[str, _Formula] = {
    **dict.fromkeys(_ONE.split(), _each(1)),
    **dict.fromkeys(_MOVES.split(), _each(0)),
    **dict.fromkeys(["Sum", "Max", "Min"], _variadic(0)),
    "Mean": _variadic(1),
    "Clip": lambda call: (
        sum(call.has(i) or name in call.attributes for i, name in ((1, "min"), (2, "max"))) * call.y.elements
    ),
    **dict.fromkeys(["LeakyRelu", "PRelu", "DequantizeLinear"], _each(2)),
    **dict.fromkeys(["Elu", "Sigmoid", "HardSigmoid"], _each(4)),
    **dict.fromkeys(["Selu", "Celu", "HardSwish", "Swish", "Mish", "QuantizeLinear"], _each(5)),
    **dict.fromkeys(["Softplus", "Softsign", "RotaryEmbedding"], _each(3)),
    "Gelu": lambda call: (9 if call.text("approximate", "none") == "tanh" else 5) * call.y.elements,
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    **dict.fromkeys(["Hardmax", "ReduceMean", "ReduceLogSum", "GlobalAveragePool"], _reduction(0, 1)),
    **dict.fromkeys(
        ["ArgMax", "ArgMin", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "GlobalMaxPool"], _reduction(0, 0)
    ),
    "TopK": lambda call: call.x.elements,
    **dict.fromkeys(("ReduceL1", "ReduceSumSquare"), _reduction(1, 0)),
    **dict.fromkeys(["ReduceL2", "ReduceLogSumExp", "GlobalLpPool"], _reduction(1, 1)),
    "MaxPool": _pool(1, 0),
    "AveragePool": _pool(1, 1),
    "LpPool": _pool(2, 1),
    "BatchNormalization": _each(2),  # scale and shift; the rest depends on weights alone
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"), _channel_norm),
    "MeanVarianceNormalization": lambda call: 5 * call.x.elements,
    "LpNormalization": lambda call: 3 * call.x.elements,
    # Squares, their sum over the window, scaling, bias, power and division.
    "LRN": lambda call: call.x.elements * (call.whole("size", 1) + 4),
    "Conv": convolution,
    # The third input is a zero point, not a bias: an absent position stands for "no bias".
    "ConvInteger": lambda call: convolution(call, bias=99),
    "QLinearConv": lambda call: convolution(call, weight=3, bias=8) + 5 * call.y.elements,
    "ConvTranspose": transposed_convolution,
    "DeformConv": deformable_convolution,
    "Gemm": gemm,
    **dict.fromkeys(("MatMul", "MatMulInteger"), matmul),
    "QLinearMatMul": lambda call: matmul(call) + 5 * call.y.elements,
    "Einsum": einsum,
    "LSTM": lstm,
    "GRU": gru,
    "RNN": rnn,
    "Attention": attention,
    "DynamicQuantizeLinear": _each(7),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "GridSample": _grid_sample,
    **dict.fromkeys(
        ["Scatter", "ScatterElements", "ScatterND"],
        lambda call: call.input(2).elements if call.text("reduction", "none") != "none" else 0,
    ),
    "DFT": _dft,
    "SimplifiedLayerNormalization": _rms_norm,  # ONNX Runtime's own op, in ONNX's domain
}


def _skip_norm(call: OpCall) -> int:
    """Return the FLOPs of summing two inputs (and a bias), then normalising the last axis."""
    simplified = "Simplified" in call.op_type
    sums = 1 + call.has(3 if simplified else 4)
    each = 4 if simplified else 6 + call.has(3)
    return (sums + each) * call.x.elements + 3 * count_slices(call.x, -1)


def _quantise_formula(formula: _Formula) -> _Formula:
    """Return the formula of an op on 8-bit tensors, with 2 FLOPs per element read and 5 per element written."""
    return lambda call: formula(call) + 2 * call.x.elements + 5 * call.y.elements


def _embedding_norm(call: OpCall) -> int:
    """Return the sum of two or three embeddings, of the last axis' normalisation, and of scaling where quantised."""
    words = 3 if call.optional(1) is not None else 2
    quantised = 2 * words if call.op_type.startswith("Q") else 0
    return (words - 1 + quantised + 7) * call.y.elements + 3 * count_slices(call.y, -1)


def _real_transform(call: OpCall) -> int:
    """Return half of the customary 5·n·log2(n) of a complex transform: one side is real."""
    longest = max(call.x.elements, call.y.elements)
    length = max(2, *(tensor.shape[-2] for tensor in (call.x, call.y) if len(tensor.shape) > 1))
    return round(2.5 * longest * log2(length))


#: ONNX Runtime's own ops in optimised and quantised models.
_RUNTIME_FORMULAS: dict[str, _Formula] = {
    "Gelu": _each(5),
    **dict.fromkeys(("QuickGelu", "BiasGelu"), _each(6)),
    "FastGelu": lambda call: (9 + call.has(1)) * call.y.elements,
    "BiasAdd": _each(2),
    "FusedConv": convolution,
    "FusedGemm": gemm,
    "FusedMatMul": matmul,
    "GemmFastGelu": lambda call: matmul(call) + (9 + call.has(2)) * call.y.elements,
    "MatMulNBits": matmul_nbits,
    "MatMulIntegerToFloat": lambda call: matmul(call) + 2 * call.y.elements,
    "DynamicQuantizeMatMul": lambda call: matmul(call) + 7 * call.x.elements + 2 * call.y.elements,
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _each(10)),
    "QLinearConcat": _each(7),
    "QLinearSigmoid": _quantise_formula(_each(4)),
    "QLinearLeakyRelu": _quantise_formula(_each(2)),
    "QLinearSoftmax": _quantise_formula(_softmax),
    **dict.fromkeys(("QLinearGlobalAveragePool", "QLinearReduceMean"), _quantise_formula(_reduction(0, 1))),
    "QLinearAveragePool": _quantise_formula(_pool(1, 1)),
    "QGemm": lambda call: (2 * call.x.shape[0 if call.whole("transA", 0) else 1] + call.has(6) + 5) * call.y.elements,
    "DynamicQuantizeLSTM": _quantise_formula(dynamic_lstm),
    "RotaryEmbedding": _each(3),
    "Attention": projected_attention,
    **dict.fromkeys(("MultiHeadAttention", "GroupQueryAttention"), multi_head_attention),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_norm),
    "GroupNorm": _channel_norm,
    "SimplifiedLayerNormalization": _rms_norm,
    "QAttention": lambda call: projected_attention(call, mask=5, scales=1),
    **dict.fromkeys(("EmbedLayerNormalization", "QEmbedLayerNormalization"), _embedding_norm),
    **dict.fromkeys(("MoE", "QMoE"), mixture_of_experts),
    **dict.fromkeys(("NhwcConv", "NhwcFusedConv"), convolution),
    "NhwcMaxPool": _pool(1, 1),
    "SkipGroupNorm": lambda call: (8 + call.has(4)) * call.x.elements + 3 * call.x.shape[0] * call.whole("groups", 1),
    "FusedMatMulActivation": lambda call: matmul(call) + 4 * call.y.elements,
    **dict.fromkeys(("TransposeMatMul", "MatMulInteger16"), matmul),
    **dict.fromkeys(("MatMulBnb4", "MatMulFpQ4"), matmul_nbits),
    "ConvTransposeWithDynamicPads": transposed_convolution,
    # Difference, square and sum for each pair of rows and each feature.
    "CDist": lambda call: 3 * call.y.elements * call.x.shape[-1],
    **dict.fromkeys(("Rfft", "Irfft"), _real_transform),
    "BiasSoftmax": lambda call: _softmax(call) + call.x.elements,
    "BiasDropout": lambda call: (1 + call.has(2)) * call.y.elements,
    "BiasSplitGelu": _each(7),
    "QuantizeLinear": _each(5),
    **dict.fromkeys(("DequantizeLinear", "GatherBlockQuantized"), _each(2)),
    "MulInteger": _each(1),
    "GridSample": _grid_sample,
    **dict.fromkeys(("ExpandDims", "Pad", "Trilu", "Unique", "Range", "GatherND"), _each(0)),
}

#: ONNX Runtime's ops for convolutional networks with channels in blocks.
_BLOCKED_FORMULAS: dict[str, _Formula] = {
    **{name: _FORMULAS[name] for name in ("Conv", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")},
    "ReorderInput": _each(0),
    "ReorderOutput": _each(0),
}
_TABLES = {
    "": _FORMULAS,
    "ai.onnx": _FORMULAS,
    "com.microsoft": _RUNTIME_FORMULAS,
    "com.microsoft.nchwc": _BLOCKED_FORMULAS,
}
