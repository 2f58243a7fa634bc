"""FLOPs against counts made by hand, or by NumPy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from gpuprof.domain.model import Tensor
from gpuprof.errors import InputError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.graph.op_costs import OpCost, cost_of
from tests.small_models import floats, write_text

Shape = tuple[int, ...]


def cost(op_type: str, inputs: Sequence[Shape | None], output: Shape, domain: str = "", **attributes: object) -> OpCost:
    operands = [None if s is None else Tensor(f"i{i}", "float32", s) for i, s in enumerate(inputs)]
    return cost_of(op_type, domain, operands, [Tensor("y", "float32", output)], attributes)


def flops(op_type: str, inputs: Sequence[Shape | None], output: Shape, domain: str = "", **attributes: object) -> int:
    operations = cost(op_type, inputs, output, domain, **attributes).flops
    assert operations is not None
    return operations


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(3, 4), (4, 5)]),
        ("ibnd,jbnd->bnij", [(3, 2, 4, 5), (6, 2, 4, 5)]),
        ("bhqk,bhkd->bqhd", [(2, 3, 4, 5), (2, 3, 5, 6)]),
        ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]),
        ("ij,jk", [(3, 4), (4, 5)]),
    ],
)
def test_einsum_of_two_is_as_numpy_counts_it(equation: str, shapes: list[Shape]) -> None:
    operands = [np.zeros(shape) for shape in shapes]
    report = np.einsum_path(equation, *operands, optimize=False)[1]
    naive = next(float(line.split(":")[1]) for line in report.splitlines() if "Naive FLOP count" in line)
    # NumPy prints three or four digits.
    assert flops("Einsum", shapes, np.einsum(equation, *operands).shape, equation=equation) == pytest.approx(
        naive, 1e-2
    )


def test_gelu_written_out_in_ops_costs_what_the_op_costs() -> None:
    shape = (3, 5)
    written = ("Div", "Erf", "Add", "Mul", "Mul")
    assert sum(flops(op, [shape, ()], shape) for op in written) == flops("Gelu", [shape], shape)


def test_attention_is_its_parts() -> None:
    batch, heads, queries, keys, width = 2, 3, 4, 6, 5
    scores = (batch, heads, queries, keys)
    parts = (
        flops("MatMul", [(2, 3, 4, 5), (2, 3, 5, 6)], scores)
        + flops("Mul", [scores, ()], scores)
        + flops("Softmax", [scores], scores, axis=-1)
        + flops("MatMul", [scores, (2, 3, 6, 5)], (2, 3, 4, 5))
    )
    q, k = (batch, heads, queries, width), (batch, heads, keys, width)
    assert flops("Attention", [q, k, k], q) == parts
    flat_q, flat_k = (batch, queries, heads * width), (batch, keys, heads * width)
    assert flops("Attention", [flat_q, flat_k, flat_k], flat_q, q_num_heads=3, kv_num_heads=3) == parts
    assert flops("MultiHeadAttention", [flat_q, flat_k, flat_k], flat_q, "com.microsoft", num_heads=3) == parts


_MS = {"domain": "com.microsoft"}
_TABLE = (100, 8)
#: FLOPs of a step of an LSTM of 3 features and 5 hidden: four gates of (3 + 5) products, each 5 wide.
_STEP = 2 * 4 * 5 * (3 + 5) + 4 * 5 + 18 * 5
_LSTM = [(7, 2, 3), (1, 20, 3), (1, 20, 5)]


@pytest.mark.parametrize(
    ("op_type", "inputs", "output", "attributes", "expected"),
    [
        # 96 filters of 11×11×3 at 55×55 positions: 105,415,200 (Krizhevsky et al. 2012, table of layers).
        ("Conv", [(1, 3, 227, 227), (96, 3, 11, 11)], (1, 96, 55, 55), {}, 2 * 105_415_200),
        # 6 filters in 2 groups, each of 3×3 taps on 2 channels, and a bias.
        ("Conv", [(2, 4, 4, 4), (6, 2, 3, 3), (6,)], (2, 6, 2, 2), {"group": 2}, 48 * (2 * 18 + 1)),
        *(("MatMul", [a, b], y, {}, 2 * product) for a, b, y, product in [
            ((5, 7), (7, 3), (5, 3), 5 * 7 * 3), ((2, 4, 5, 7), (2, 4, 7, 3), (2, 4, 5, 3), 2 * 4 * 5 * 7 * 3),
            ((2, 4, 5, 7), (7, 3), (2, 4, 5, 3), 2 * 4 * 5 * 7 * 3), ((7,), (7, 3), (3,), 7 * 3),
            ((5, 7), (7,), (5,), 5 * 7)]),
        # A row of 4: maximum 3, differences 4, exponentials 4, sum 3, quotients 4.
        ("Softmax", [(3, 4)], (3, 4), {"axis": -1}, 3 * (3 + 4 + 4 + 3 + 4)),
        # 2×3 inputs of 5 channels, each to 4 output channels by 3×3 taps.
        ("ConvTranspose", [(1, 5, 2, 3), (5, 4, 3, 3)], (1, 4, 4, 5), {}, 2 * (2 * 3 * 5) * 4 * 9),
        ("ConvTranspose", [(1, 5, 2, 3), (5, 4, 3, 3), (4,)], (1, 4, 4, 5), {}, 2 * 30 * 36 + 80),
        ("FusedMatMul", [(7, 5), (7, 3)], (5, 3), {**_MS, "transA": 1}, 2 * 5 * 7 * 3),
        ("Gemm", [(5, 7), (7, 3)], (5, 3), {}, 2 * 105),
        ("Gemm", [(7, 5), (3, 7), (3,)], (5, 3), {"transA": 1, "transB": 1}, 2 * 105 + 15),
        ("Gemm", [(5, 7), (7, 3), (3,)], (5, 3), {"alpha": 0.5, "beta": 2.0}, 2 * 105 + 15 + 30),
        ("Einsum", [(3, 4)], (4, 3), {"equation": "ij->ji"}, 0),
        ("Einsum", [(3, 4)], (3,), {"equation": "ij->i"}, 12),
        ("Einsum", [(3,), (4,)], (3, 4), {"equation": "i,j->ij"}, 12),
        ("AveragePool", [(1, 1, 5, 5)], (1, 1, 3, 3), {"kernel_shape": (3, 3), "strides": (2, 2)}, 9 * 9),
        ("MaxPool", [(2, 3, 5, 5)], (2, 3, 3, 3), {"kernel_shape": (3, 3), "strides": (2, 2)}, 8 * 54),
        ("GlobalAveragePool", [(2, 3, 4, 5)], (2, 3, 1, 1), {}, 2 * 3 * (19 + 1)),
        ("GlobalMaxPool", [(2, 3, 4, 5)], (2, 3, 1, 1), {}, 2 * 3 * 19),
        ("NhwcMaxPool", [(1, 8, 8, 3)], (1, 4, 4, 3), {**_MS, "kernel_shape": (2, 2)}, 4 * 48),
        # A row of 4: mean 3+1, differences 4, squares 4, their mean 3+1, ε, root and reciprocal 3, scaled 4, weights 4.
        ("LayerNormalization", [(5, 4), (4,)], (5, 4), {}, 5 * (4 + 4 + 4 + 4 + 3 + 4 + 4)),
        ("LayerNormalization", [(5, 4), (4,), (4,)], (5, 4), {}, 5 * (27 + 4)),
        ("RMSNormalization", [(5, 4), (4,)], (5, 4), {}, 5 * (4 + 4 + 3 + 4 + 4)),
        ("BatchNormalization", [(2, 3, 4, 4), *[(3,)] * 4], (2, 3, 4, 4), {}, 2 * 96),
        ("InstanceNormalization", [(2, 3, 4), (3,), (3,)], (2, 3, 4), {}, 7 * 24 + 3 * 6),
        ("GroupNormalization", [(2, 6, 4), (6,), (6,)], (2, 6, 4), {"num_groups": 2}, 7 * 48 + 3 * 4),
        # A window of 5: 1 square, 4 additions, α, k, power, quotient.
        ("LRN", [(1, 8, 2, 2)], (1, 8, 2, 2), {"size": 5}, 32 * 9),
        ("EmbedLayerNormalization", [(2, 5), None, _TABLE, _TABLE, None, (8,), (8,)], (2, 5, 8), _MS, 8 * 80 + 30),
        ("EmbedLayerNormalization", [(2, 5), (2, 5), *[_TABLE] * 3, (8,), (8,)], (2, 5, 8), _MS, 9 * 80 + 30),
        *((op, [(3, 5)], (3, 5), {}, each * 15) for op, each in
          {"Relu": 1, "Sigmoid": 4, "Tanh": 1, "LeakyRelu": 2, "Erf": 1, "HardSwish": 5}.items()),
        *((op, [(3, 5)], (3, 5), _MS, each * 15) for op, each in
          {"QuantizeLinear": 5, "DequantizeLinear": 2, "MulInteger": 1, "Pad": 0}.items()),
        *((op, [(4, 4)], (4, 4), {}, 0) for op in
          ("Transpose", "Concat", "Split", "Slice", "Pad", "Gather", "Reshape", "Cast")),
        ("Add", [(4, 1), (1, 5)], (4, 5), {}, 20),
        ("Sum", [(4, 5)] * 3, (4, 5), {}, 40),
        ("Mean", [(4, 5)] * 3, (4, 5), {}, 60),
        ("Clip", [(4, 5), (), ()], (4, 5), {}, 40),
        ("Clip", [(4, 5), None, ()], (4, 5), {}, 20),
        ("ReduceSum", [(4, 5)], (4, 1), {}, 4 * 4),
        ("ReduceMean", [(4, 5)], (4, 1), {}, 4 * (4 + 1)),
        ("ReduceL2", [(4, 5)], (4, 1), {}, 4 * (5 + 4 + 1)),
        ("ArgMax", [(4, 5)], (4, 1), {}, 4 * 4),
        ("CDist", [(4, 7), (5, 7)], (4, 5), _MS, 3 * 4 * 5 * 7),  # a difference, a square and a sum for each feature
        ("LSTM", _LSTM, (7, 1, 2, 5), {"hidden_size": 5}, 14 * _STEP),
        ("LSTM", [*_LSTM, (1, 40)], (7, 1, 2, 5), {}, 14 * (_STEP + 4 * 5)),
        ("LSTM", [(7, 2, 3), (2, 20, 3), (2, 20, 5)], (7, 2, 2, 5), {"direction": "bidirectional"}, 28 * _STEP),
        ("Resize", [(1, 2, 4, 4)], (1, 2, 8, 8), {"mode": "nearest"}, 0),
        ("Resize", [(1, 2, 4, 4)], (1, 2, 8, 8), {"mode": "linear"}, 128 * 7),
        ("Resize", [(1, 2, 4, 4)], (1, 2, 8, 4), {"mode": "linear"}, 64 * 3),
        # The chosen experts alone; weights of four bits are two to a byte.
        ("MoE", [(3, 8), (3, 4), (4, 16, 8), None, (4, 8, 16)], (3, 8), {**_MS, "k": 2},
         3 * (5 * 4 + 2 * (2 * 8 * 16 + 2 * 16 * 8))),
        ("QMoE", [(3, 8), (3, 4), (4, 16, 4), (4, 16), None, (4, 8, 8)], (3, 8),
         {**_MS, "k": 1, "expert_weight_bits": 4}, 3 * (5 * 4 + 2 * 8 * 16 + 2 * 16 * 8)),
    ],
)  # fmt: skip
def test_flops_are_as_counted_by_hand(
    op_type: str, inputs: list[Shape | None], output: Shape, attributes: dict[str, Any], expected: int
) -> None:
    assert flops(op_type, inputs, output, **attributes) == expected


@pytest.mark.parametrize("op_type", ["Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Shape"])
def test_views_move_nothing(op_type: str) -> None:
    costs = cost(op_type, [(4, 4), (1,)], (16,))
    assert (costs.bytes_read, costs.bytes_written) == (0, 0)


def test_a_lookup_reads_only_the_rows_that_it_takes() -> None:
    indices = Tensor("ids", "int64", (2, 8))
    costs = cost_of(
        "Gather", "", [Tensor("table", "float32", (30000, 16)), indices], [Tensor("y", "float32", (2, 8, 16))], {}
    )
    assert costs.bytes_read == 2 * 8 * 16 * 4 + 2 * 8 * 8
    assert costs.bytes_written == 2 * 8 * 16 * 4


def test_an_input_used_twice_is_read_once() -> None:
    x = Tensor("x", "float16", (10,))
    assert cost_of("Mul", "", [x, x], [Tensor("y", "float16", (10,))], {}) == OpCost(10, 20, 20)


def test_an_op_without_a_formula_is_unknown_and_not_free() -> None:
    assert cost("NonMaxSuppression", [(1, 5, 4), (1, 1, 5)], (3, 3)).flops is None
    assert cost("Conv", [(1, 5, 4), (1, 1, 5)], (3, 3), "someone.else").flops is None


def test_an_op_whose_operands_make_no_sense_is_unknown() -> None:
    assert cost("Conv", [(1, 3, 4, 4)], (1, 3, 4, 4)).flops is None
    assert cost("LSTM", [(7, 2, 3), (20, 3), (20, 5)], (7, 1, 2, 5)).flops is None


def test_quantised_products_count_as_floating_ones() -> None:
    plain = flops("MatMul", [(5, 7), (7, 3)], (5, 3))
    assert flops("MatMulInteger", [(5, 7), (7, 3)], (5, 3)) == plain
    inputs = [(1, 3, 8, 8), (), (), (4, 3, 3, 3), (), (), (), ()]
    y = (1, 4, 6, 6)
    assert flops("QLinearConv", inputs, y) == flops("Conv", [(1, 3, 8, 8), (4, 3, 3, 3)], y) + 5 * 144


def test_quantised_attention_adds_a_scale_to_each_projection() -> None:
    plain = flops("Attention", [(2, 5, 8), (8, 24), (24,)], (2, 5, 8), "com.microsoft", num_heads=2)
    quantised = flops("QAttention", [(2, 5, 8), (8, 24), (24,), (1,), (1,)], (2, 5, 8), "com.microsoft", num_heads=2)
    assert quantised == plain + 2 * 5 * 24


def test_an_op_of_the_runtime_gives_what_the_runtime_says(tmp_path: Path) -> None:
    text = "(float[batch,6] x) => (float[] y) { a = com.microsoft.FusedMatMul <transB = 1> (x, w) y = Relu (a) }"
    fused, relu = load_graph(write_text(tmp_path / "m.onnx", text, {"w": floats(4, 6)}), 3).ops
    assert fused.outputs[0].shape == relu.outputs[0].shape == (3, 4)
    assert fused.outputs[0].dtype == "float32"
    assert fused.flops == 2 * 3 * 4 * 6


def test_a_quantised_product_has_the_shape_type_and_flops_of_its_own(tmp_path: Path) -> None:
    text = "(uint8[batch,6] x) => (uint8[] y) { y = com.microsoft.QGemm (x, s, z, w, s, z, c, s, z) }"
    weights: dict[str, np.ndarray] = {
        "s": np.array(0.1, np.float32),
        "z": np.array(3, np.uint8),
        "c": np.ones(4, np.int32),
    }
    path = write_text(tmp_path / "m.onnx", text, {**weights, "w": np.ones((6, 4), np.uint8)})
    op = load_graph(path, 2).ops[0]
    assert (op.outputs[0].shape, op.outputs[0].dtype) == ((2, 4), "uint8")
    assert op.flops == 2 * 4 * (2 * 6 + 1 + 5)


def test_an_op_that_nobody_knows_is_refused_still(tmp_path: Path) -> None:
    path = write_text(tmp_path / "m.onnx", "(float[batch,6] x) => (float[] y) { y = com.microsoft.Unheard (x) }", {})
    with pytest.raises(InputError, match=r"the shape of 'y', which node y \(Unheard\) of domain com.microsoft"):
        load_graph(path)


def write_optimized(path: Path, output: Path) -> Path:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(output)
    options.log_severity_level = 4
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return output


def outputs_agree(path: Path, batch: int) -> bool:
    graph = load_graph(path, batch)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    given = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, random_inputs(graph))
    return [value.shape for value in given] == [tensor.shape for tensor in graph.outputs]


def test_a_model_that_the_runtime_optimised_is_read_as_it_stands(tmp_path: Path) -> None:
    text = """(float[batch,16,8,8] x) => (float[batch,32,4,4] y) { c = Conv <pads = [1,1,1,1]> (x, w) r = Relu (c)
        y = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r) }"""
    plain = write_text(tmp_path / "plain.onnx", text, {"w": floats(32, 16, 3, 3)})
    path = write_optimized(plain, tmp_path / "m.onnx")
    assert outputs_agree(path, 3)
    assert None not in [op.flops for op in load_graph(path, 3).ops]
    work = sum(op.flops or 0 for op in load_graph(path, 3).ops)
    assert work == pytest.approx(sum(op.flops or 0 for op in load_graph(plain, 3).ops), rel=0.05)


def test_an_old_model_need_not_list_the_weights_that_a_tool_added(tmp_path: Path) -> None:
    text = "(float[batch,6] x) => (float[batch,6] y) { y = Mul (x, w) }"
    assert outputs_agree(write_text(tmp_path / "m.onnx", text, {"w": floats(6)}, opset=7, ir_version=3), 2)


def test_a_norm_of_the_runtime_in_the_domain_of_onnx_is_known(tmp_path: Path) -> None:
    text = "(float[batch,6] x) => (float[] y) { y = SimplifiedLayerNormalization (x, w) }"
    path = write_text(tmp_path / "m.onnx", text, {"w": floats(6)})
    assert load_graph(path, 3).ops[0].flops == 4 * 18 + 3 * 3
    assert outputs_agree(path, 3)
