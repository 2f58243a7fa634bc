"""Graphs of ONNX files: shapes at a batch, assumed sizes, tolerated and odd models, and refusals."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, parser

from gpuprof.errors import InputError
from gpuprof.graph.file import list_op_types
from gpuprof.graph.load import (
    describe_assumed_sizes,
    load_graph,
    load_runnable,
    read_fixed_batch,
    read_turns,
    require_sizes,
)
from gpuprof.graph.nodes import list_captured
from gpuprof.graph.shapes import UnknownShapeError
from gpuprof.runtime.batch_items import find_mixed_output
from gpuprof.runtime.optimizer import find_refusal
from tests.graph.odd_models import ODD, OddModel
from tests.small_models import Dims, floats, integers, write_classifier, write_model, write_splitter, write_text

node = helper.make_node
WHILE = """(float[N,64] x) => (float[N,64] y)
<int64 trip = {9223372036854775807}, bool yes = {1}, int64 zero = {0}, int64 step = {1}, int64 last = {5}> {
   n, y = Loop (trip, yes, zero, x) <body = b (int64 it, bool c, int64 i, float[N,64] s) => (bool c2, int64 i2,
      float[N,64] s2) { i2 = Add (i, step) c2 = Less (i2, last) s2 = MatMul (s, w) }> }"""
COUNTED = """(float[N,64] x) => (float[N,64] y) <int64 trip = {6}, bool yes = {1}> {
   y = Loop (trip, yes, x) <body = b (int64 it, bool c, float[N,64] s) => (bool c2, float[N,64] s2)
      { c2 = Identity (c) s2 = Add (s, s) }> }"""
#: Gathers a column in each turn.
COLUMNS = """{ last, all = Loop (turns, , x) <body = b (int64 i, bool go, float[] s) => (bool on, float[] more,
      float[] column) { more = MatMul (s, w) i1 = Unsqueeze (i, zero) next = Add (i1, one)
      column = Slice (x, i1, next, one) on = Identity (go) }> }"""
ANCHORS = """(float[N,4] x) => (float[N,4] y, float[A,3] anchors) <float[2,3] a = {0,1,2,3,4,5}>
    { y = Relu (x) anchors = Identity (a) }"""
COLUMN_WEIGHTS = {"w": floats(6, 6), "zero": integers(0), "one": integers(1)}
#: Whose outputs are as large as the data says: the largest size stands for it.
DATA_DECIDES = {"Unique", "Compress", "NonZero", "NonMaxSuppression"}
#: Cases with sequences, optionals and axes that only the caller knows are rightly refused.
MOST_REFUSED_PCT = 6.0


def _write(tmp_path: Path, text: str, opset: int = 17, weights: Mapping[str, np.ndarray] | None = None) -> Path:
    return write_text(tmp_path / "m.onnx", text, weights, opset)


@pytest.fixture
def convolution(tmp_path: Path) -> Path:
    text = """(float[batch,2,5,5] x) => (float[batch,3] y) { [conv] c = Conv <kernel_shape = [3,3]> (x, w, b)
        r = Relu (c) [flat] f = Flatten (r) [dense] y = Gemm (f, m) }"""
    return write_text(tmp_path / "net.onnx", text, {"w": floats(4, 2, 3, 3), "b": floats(4), "m": floats(36, 3)})


def test_ops_have_shapes_flops_and_bytes_at_the_batch(convolution: Path) -> None:
    graph = load_graph(convolution, batch=7)
    assert [(op.name, op.op_type) for op in graph.ops] == [
        ("conv", "Conv"),
        ("Relu_1", "Relu"),
        ("flat", "Flatten"),
        ("dense", "Gemm"),
    ]
    conv, relu, flat, dense = graph.ops
    assert conv.outputs[0].shape == (7, 4, 3, 3)
    assert conv.flops == 7 * 4 * 3 * 3 * (2 * 2 * 3 * 3 + 1)
    assert conv.bytes_read == 4 * (7 * 2 * 5 * 5 + 4 * 2 * 3 * 3 + 4)
    assert conv.bytes_written == 4 * 7 * 4 * 3 * 3
    assert [weight.name for weight in conv.weights] == ["w", "b"]
    assert relu.flops == 7 * 36
    assert (flat.bytes_read, flat.bytes_written, flat.flops) == (0, 0, 0)
    assert dense.flops == 2 * 7 * 3 * 36
    assert graph.inputs[0].shape == (7, 2, 5, 5)
    assert graph.outputs[0].shape == (7, 3)
    assert graph.weight_bytes == 4 * (72 + 4 + 108)
    assert graph.opset == 17
    assert list(graph.edges()) == [(0, 1), (1, 2), (2, 3)]


def test_the_name_is_the_stem_unless_given(convolution: Path) -> None:
    assert load_graph(convolution).name == "net"
    assert load_graph(convolution, name="other").name == "other"


def test_a_file_that_changes_is_read_again(convolution: Path, tmp_path: Path) -> None:
    before = load_graph(convolution)
    write_model(convolution, [node("Relu", ["x"], ["y"], name="only")], {"x": ["n", 9]}, {"y": ["n", 9]})
    assert [op.name for op in load_graph(convolution).ops] == ["only"]
    assert before.sha256 != load_graph(convolution).sha256


@pytest.mark.parametrize(("kind", "domain"), [("If", ""), ("Repeat", "own")])
def test_graphs_within_nodes_use_what_is_around_them(kind: str, domain: str) -> None:
    given = helper.make_tensor_value_info("given", TensorProto.FLOAT, [1])
    body = helper.make_graph([node("Neg", ["outer"], ["given"])], "body", [], [given])
    assert list_captured(node(kind, ["x"], ["y"], domain=domain, then_branch=body)) == ["outer"]


def test_what_hangs_on_weights_alone_is_a_weight(tmp_path: Path) -> None:
    text = """(float[n,3] x) => (float[n,5] y) { t = Transpose <perm = [1, 0]> (w) k = Constant <value_float = 2.0> ()
        s = Mul (t, k) [product] y = MatMul (x, s) }"""
    graph = load_graph(_write(tmp_path, text, weights={"w": floats(5, 3)}), 2)
    assert [op.name for op in graph.ops] == ["product"]
    assert [(weight.name, weight.shape) for weight in graph.weights] == [("s", (3, 5))]


@pytest.mark.parametrize(("side", "names"), [(8, ["add"]), (100_000, ["zeros", "sum", "add"])])
def test_large_zeros_are_made_by_an_op_and_not_kept_in_the_file(tmp_path: Path, side: int, names: list[str]) -> None:
    text = """(float[n,3] x) => (float[n,3] y) { [zeros] zeros = ConstantOfShape (shape)
        [sum] sum = ReduceSum <keepdims = 0> (zeros) [add] y = Add (x, sum) }"""
    ops = load_graph(_write(tmp_path, text, weights={"shape": integers(side, side)})).ops
    assert [op.name for op in ops] == names
    assert names == ["add"] or ops[0].outputs[0].bytes == 4 * side**2


@pytest.mark.parametrize(
    ("text", "shape", "remark"),
    [
        ("(float[n,3] x) => (float[n,4] y) { y = Relu (x) }", (2, 3),
         "output y is declared ['n', 4]; its shape is [2, 3]"),
        ("(float[n,8] x) => (float[1] y) { y = ReduceL2 <keepdims = 0> (x) }", (),
         "output y is declared [1]; its shape is []"),
        ("(float[n,3] x) => (float[1,3] y) { y = Relu (x) }", (2, 3), None),  # exporters leave the batch at 1
    ],
)  # fmt: skip
def test_an_output_declared_otherwise_than_computed_is_read_with_a_remark(
    tmp_path: Path, text: str, shape: tuple[int, ...], remark: str | None
) -> None:
    graph = load_graph(_write(tmp_path, text), 1 if shape == () else 2)
    assert graph.outputs[0].shape == shape and graph.remarks == ((remark,) if remark else ())


def test_an_output_whose_first_dimension_does_not_follow_the_batch_as_declared_is_not_batched(tmp_path: Path) -> None:
    text = "(float[n,3] x) => (float[n,3] y, float[n,3] anchors) { y = Relu (x) anchors = Identity (w) }"
    path = _write(tmp_path, text, weights={"w": floats(1, 3)})
    assert load_graph(path).remarks == ()
    with pytest.raises(InputError, match="output anchors is declared"):
        load_graph(path, 2)


@pytest.mark.parametrize("kind", ["value", "sparse_value"])
def test_a_constant_dense_or_sparse_is_a_weight_with_its_values(tmp_path: Path, kind: str) -> None:
    values = onnx.numpy_helper.from_array(integers(2, 5), "shape")
    sparse = helper.make_sparse_tensor(values, onnx.numpy_helper.from_array(integers(1, 2)), [3])
    tensor = onnx.numpy_helper.from_array(integers(0, 2, 5)) if kind == "value" else sparse
    nodes = [node("Constant", [], ["shape"], **{kind: tensor}), node("ConstantOfShape", ["shape"], ["y"])]
    path = write_model(tmp_path / "m.onnx", [*nodes, node("Relu", ["x"], ["z"])], {"x": ["n", 1]}, {"y": None})
    assert load_graph(path).outputs[0].shape == (0, 2, 5)


def test_nodes_of_one_name_get_names_of_their_own(tmp_path: Path) -> None:
    path = _write(tmp_path, "(float[b,3] x) => (float[] y) { [n] a = Relu (x) [n] y = Neg (a) }")
    assert [op.name for op in load_graph(path).ops] == ["n", "n_1"]


def test_an_op_of_another_domain_needs_a_declared_shape(tmp_path: Path) -> None:
    def write(output: str) -> Path:
        text = f'<ir_version: 8, opset_import: ["": 17, "my.ops": 1]> g (float[n,3] x) => ({output}) '
        onnx.save(parser.parse_model(text + "{ [twist] y = my.ops.Twist (x) }"), tmp_path / "m.onnx")
        return tmp_path / "m.onnx"

    with pytest.raises(InputError, match=r"'y', which node twist \(Twist\) of domain my.ops gives, cannot be inferred"):
        load_graph(write("float[] y"))
    graph = load_graph(write("float[n,8] y"), 5)
    assert graph.outputs[0].shape == (5, 8)
    assert graph.ops[0].flops is None
    assert graph.uncounted_ops == ("Twist",)


def test_the_branch_that_is_taken_gives_the_shape_and_what_it_captures_is_an_input(tmp_path: Path) -> None:
    text = """(float[n,4] x) => (float[] y) <bool c = {0}> { y = If (c) <
        then_branch = t () => (float[] yt) { yt = Concat <axis = 1> (x, x) },
        else_branch = e () => (float[] ye) { ye = Concat <axis = 1> (x, x, x) }> }"""
    graph = load_graph(_write(tmp_path, text), 2)
    assert graph.outputs[0].shape == (2, 12)
    assert [tensor.name for tensor in graph.ops[0].inputs] == ["c", "x"]
    assert graph.ops[0].flops is not None


def test_a_loop_costs_all_its_turns_and_gathers_what_each_gives(tmp_path: Path) -> None:
    turns = "dims = Shape (x) turns = Gather (dims, one)"
    text = f"(float[batch,6] x) => (float[] last, float[] all) {{ {turns} {COLUMNS[1:]}"
    graph = load_graph(_write(tmp_path, text, weights=COLUMN_WEIGHTS), 3)
    assert [tensor.shape for tensor in graph.outputs] == [(3, 6), (6, 3, 1)]
    assert graph.ops[-1].flops == 6 * (2 * 3 * 6 * 6 + 1)
    assert graph.ops[-1].bytes_read > 6 * 4 * 36


def test_a_loop_whose_turns_are_data_is_as_unknown_as_before(tmp_path: Path) -> None:
    text = f"(float[batch,6] x, int64 turns) => (float[] last, float[steps,batch,1] all) {COLUMNS}"
    with pytest.raises(InputError, match=r"the shape of '(last|all)', which node last, all \(Loop\) gives"):
        load_graph(_write(tmp_path, text, weights=COLUMN_WEIGHTS), 3)


_CACHED: dict[str, Dims] = {"mask": ["batch", "past + new"], "ids": ["batch", "new"], "key": ["batch", 2, "past", 8]}
_TOTAL: dict[str, Dims] = {
    "ids": ["batch", "sequence_length"],
    "mask": ["batch", "total_sequence_length"],
    "key": ["batch", 2, "past_length", 8],
}
_TOKENS_AND_IMAGE: dict[str, Dims] = {"tokens": ["batch", "sequence"], "image": ["batch", 3, None, "width"]}
_ENCODED: dict[str, Dims] = {
    "encoder_attention_mask": ["batch_size", "encoder_sequence_length"],
    "input_ids": ["batch_size", 1],
    "past_key_values.0.decoder.key": ["batch_size", 2, "past_decoder_sequence_length", 8],
    "past_key_values.0.encoder.key": ["batch_size", 2, "encoder_sequence_length_out", 8],
}


@pytest.mark.parametrize(
    ("declared", "batch", "given", "shapes"),
    [
        pytest.param(_TOKENS_AND_IMAGE, 2, {}, [(2, 128), (2, 3, 224, 224)], id="usual sizes"),
        pytest.param(
            _TOKENS_AND_IMAGE,
            2,
            {"sequence": 10, "image:2": 32, "width": 48},
            [(2, 10), (2, 3, 32, 48)],
            id="given sizes",
        ),
        pytest.param({"x": ["sequence", "batch_size", 8]}, 5, {}, [(128, 5, 8)], id="batch by name"),
        pytest.param({"x": ["T", "B", 8], "h": [2, "B", 4]}, 5, {}, [(128, 5, 8), (2, 5, 4)], id="B in all inputs"),
        pytest.param({"x": ["T", "B", 8], "h": [2, "H", 4]}, 5, {}, [(5, 128, 8), (2, 128, 4)], id="B in some"),
        pytest.param({"x": ["A", "B", 8], "h": ["A", "B", 4]}, 5, {}, [(5, 128, 8), (5, 128, 4)], id="letters"),
        pytest.param({"p": ["batch", "past"], "m": ["batch", "past + 1"]}, 1, {"past": 7}, [(1, 7), (1, 8)], id="sum"),
        pytest.param(_CACHED, 1, {"past": 7, "new": 1}, [(1, 8), (1, 1), (1, 2, 7, 8)], id="sum before its terms"),
        pytest.param(_CACHED, 1, {}, [(1, 256), (1, 128), (1, 2, 128, 8)], id="past and new tokens"),
        pytest.param(_TOTAL, 1, {}, [(1, 128), (1, 256), (1, 2, 128, 8)], id="total tokens"),
        pytest.param(_TOTAL, 1, {"past_length": 7}, [(1, 128), (1, 135), (1, 2, 7, 8)], id="total of given tokens"),
        pytest.param(_ENCODED, 2, {}, [(2, 128), (2, 1), (2, 2, 128, 8), (2, 2, 128, 8)], id="mask of an encoder"),
        pytest.param(
            {"pixels": ["images", 3, 224, 224], "ids": ["batch", "seq"]}, 5, {}, [(5, 3, 224, 224), (5, 128)], id="CLIP"
        ),
        pytest.param({"t": [1], "x": [8, 3]}, 8, {}, [(1,), (8, 3)], id="fixed by data, not by a step of time"),
        pytest.param({"x": []}, 1, {}, [()], id="scalar"),
        pytest.param({"x": [4, 3]}, 4, {}, [(4, 3)], id="fixed"),
        pytest.param({"x": [3, 320, 320]}, 1, {}, [(3, 320, 320)], id="one picture"),
        pytest.param({"x": [3, "height", "width"]}, 1, {}, [(3, 224, 224)], id="one picture with free sides"),
        pytest.param({"x": [3, None, None]}, 1, {}, [(3, 224, 224)], id="one picture with unnamed sides"),
        pytest.param({"x": [3, 8, 8]}, 3, {}, [(3, 8, 8)], id="three small squares"),
        pytest.param({"x": [3, "seq", 768]}, 3, {}, [(3, 128, 768)], id="three texts"),
        pytest.param({"x": [3, "frames", 80]}, 3, {}, [(3, 128, 80)], id="three sounds"),
        pytest.param({"x": [4, 320, 320]}, 4, {}, [(4, 320, 320)], id="four planes"),
        pytest.param({"x": [3, 320]}, 3, {}, [(3, 320)], id="three rows"),
    ],
)
def test_inputs_have_the_batch_and_usual_or_given_sizes(
    tmp_path: Path, declared: dict[str, Dims], batch: int, given: dict[str, int], shapes: list[tuple[int, ...]]
) -> None:
    graph = load_graph(_write_identities(tmp_path, declared), batch, dims=given)
    assert [tensor.shape for tensor in graph.inputs] == shapes
    assert read_fixed_batch(Path(graph.path)) in (None, batch)
    assert not {"past + new", "total_sequence_length", "images"}.intersection(dict(graph.sizes))  # they follow


def _write_identities(folder: Path, inputs: dict[str, Dims]) -> Path:
    nodes = [node("Identity", [name], [f"{name}_out"]) for name in inputs]
    return write_model(folder / "m.onnx", nodes, inputs, {f"{name}_out": None for name in inputs})


@pytest.mark.parametrize(
    ("declared", "batch", "given", "message"),
    [
        ({"x": [4, 3]}, 2, {}, r"fixes the batch at 4, but 2 is asked \(ask for batch 4, or .*zoo rebatch"),
        ({"t": [1], "x": [8, 3]}, 1, {}, "input x fixes the batch at 8, but 1 is asked"),
        ({"x": []}, 2, {}, "no input has a batch dimension, but batch 2 is asked"),
        ({"x": [3, 320, 320]}, 3, {}, "no input has a batch dimension, but batch 3 is asked"),
        ({"x": ["n", 3]}, 0, {}, "at least 1 but is 0"),
        ({"x": ["n", 3]}, -1, {}, "at least 1 but is -1"),
        (_TOKENS_AND_IMAGE, 2, {"depth": 1}, r"no free dimension 'depth'.*sequence, width"),
        (_TOKENS_AND_IMAGE, 2, {"sequence": 0}, "must be at least 1 but is 0"),
        ({"x": ["n", 2**62, 2**62]}, 1, {}, "elements"),
    ],
)
def test_impossible_batches_and_sizes_are_refused(
    tmp_path: Path, declared: dict[str, Dims], batch: int, given: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_graph(_write_identities(tmp_path, declared), batch, dims=given)


@pytest.mark.parametrize(
    ("text", "weights", "message"),
    [
        ("(float[n,3] x) => (float[] y) { [dense] y = Gemm (x, w) }", {"w": floats(4, 5)},
         r"dense \(Gemm\) contradicts its inputs \[2, 3\], \[4, 5\]"),
        ("(float[n,3,2] x) => (float[] y) { [stuck] y = Reshape (x, t) }", {"t": integers(1, 6)}, "stuck"),
        ("(float[n,1] x) => (float[] y) { [blow] y = Expand (x, t) }", {"t": integers(2**40, 2**40)}, "blow"),
        ("(float[n,3] x) => (float[] y) { [one] a = Add (x, y) [two] y = Relu (a) }", {},
         r"one \(Add\) is part of a cycle"),
        ("(float[n,3] x) => (float[] y) { y = Relu (x) [again] y = Neg (x) }", {},
         r"again \(Neg\) gives 'y', which something else gives"),
        ("(float[n,3] x) => (float[] y) { y = Relux (x) }", {}, "Relux"),
        ("(float[n,5,4] x) => (float[] y) { [boxes] y = NonMaxSuppression (x, w) }", {"w": floats(5)},
         r"boxes \(NonMaxSuppression\) contradicts its inputs"),
        ("(float[n,sequence,4] x) => (float[] y) { [norm] y = LayerNormalization (x, w) }",
         {"w": floats(4).astype(np.float16)},
         r"norm .* inconsistent type tensor\(float16\) \(export it again with inputs of"),
        ("(float[n,patches,4] x) => (float[] y) { [add] y = Add (x, w) }", {"w": floats(17, 4)},
         r"add \(Add\) contradicts .*read with patches as 128 at batch 2; .*--dim patches=SIZE"),
        ("(float[n,seq] x) => (bool[] y) <float z = {0}, int64 axis = {1}> { b = Greater (x, z) y = CumSum (b, axis) }",
         {}, r"CumSum.*tensor\(bool\) \(export it again with an input of a type"),  # and no size is blamed
        ("""(bool c, float[n,4] x) => (float[n,4] y) {
            y = If (c) <then_branch: graph = t (float[n,4] xi) => (float[n,4] yt) { yt = Relu (xi) },
                        else_branch: graph = e () => (float[n,4] ye) { ye = Neg (x) }> }""",
         {}, r"then_branch of node y \(If\) declares the input 'xi'"),
    ],
)  # fmt: skip
def test_contradictory_nodes_are_named(tmp_path: Path, text: str, weights: dict[str, np.ndarray], message: str) -> None:
    path = _write(tmp_path, text, weights=weights)
    with pytest.raises(InputError, match=message):
        load_graph(path, 2)


_PADDED = """(float[n,3,height,8] x) => (float[] y) <float[1] size = {230}, float least = {0}, int64[1] none = {0},
    int64[6] before = {0,0,0,0,0,0}> { side = Shape <start = 2, end = 3> (x) f = Cast <to = 1> (side)
    missing = Sub (size, f) c = Clip (missing, least) more = Cast <to = 7> (c)
    pads = Concat <axis = 0> (before, more, none) y = Pad (x, pads) }"""


@pytest.mark.parametrize(
    ("text", "given", "weights", "shape"),
    [
        pytest.param("""(float[n,4,6] x) => (float[] y) <int64[1] zero = {0}, int64[1] two = {2}, int64[1] rest = {-1}>
            { shape = Shape (x) batch = Gather <axis = 0> (shape, zero) twice = Mul (batch, two)
            target = Concat <axis = 0> (twice, rest) y = Reshape (x, target) }""", {}, {}, (6, 12),
            id="computed by ops"),
        pytest.param(_PADDED, {"height": 224}, {}, (3, 3, 230, 8), id="padding to a size"),
        pytest.param(_PADDED, {"height": 240}, {}, (3, 3, 240, 8), id="padding clipped to none"),
        pytest.param("(float[n,4] x) => (int64[] y) { y = NonZero (x) }", {}, {}, (2, 12), id="at most all"),
        pytest.param("(float[n,4] x) => (float[] y) { where = NonZero (x) rows = Transpose (where) "
                     "y = GatherND (x, rows) }", {}, {}, (12,), id="after at most all"),
        pytest.param("(float[3,50,4] x) => (int64[] y) { y = NonMaxSuppression (x, scores, most) }", {},
                     {"scores": floats(3, 3, 50), "most": integers(7)}, (63, 3), id="boxes as many as requested"),
        pytest.param("(float[n,16000,1] x) => (float[] y) <int64 step = {160}, int64 length = {400}> "
                     "{ y = STFT (x, step, , length) }", {}, {}, (3, 98, 201, 2), id="half of a spectrum by default"),
        pytest.param("(float[n,3] x) => (float[] y) { y = Neg (a) a = Relu (x) }", {}, {}, (3, 3),
                     id="nodes out of order"),
        pytest.param("(float[n,samples] x) => (float[] y) <int64[3] frames = {0,-1,400}> { y = Reshape (x, frames) }",
                     {}, {}, (3, 40, 400), id="long sound"),
        pytest.param("(float[n,sequence_length,4] x) => (float[] y) { length = Shape <start = 1, end = 2> (x) "
                     "own = Slice (places, zero, length, zero) y = Add (x, own) }", {},
                     {"places": floats(77, 4), "zero": integers(0)}, (3, 64, 4), id="shorter than usual"),
        *(pytest.param("(float[n,sequence_length,4] x) => (float[] y) { y = Add (x, places) }", {},
                       {"places": floats(kept, 4)}, (3, kept, 4), id=f"{kept} tokens of the exporter's example")
          for kept in (64, 32, 16, 8)),
    ],
)  # fmt: skip
def test_shapes_follow_from_values_and_bounds(
    tmp_path: Path, text: str, given: dict[str, int], weights: dict[str, np.ndarray], shape: tuple[int, ...]
) -> None:
    assert load_graph(_write(tmp_path, text, weights=weights), 3, dims=given).outputs[0].shape == shape


def test_a_declared_shape_of_selected_elements_is_believed(tmp_path: Path) -> None:
    path = _write(tmp_path, "(float[n,4] x) => (int64[2,5] y) { y = NonZero (x) }")
    assert load_graph(path, 3).outputs[0].shape == (2, 5)


class TestBadFiles:
    def test_a_missing_file_and_a_directory(self, tmp_path: Path) -> None:
        for path, message in ((tmp_path / "none.onnx", "cannot read model"), (tmp_path, "not a file")):
            with pytest.raises(InputError, match=message):
                load_graph(path)

    @pytest.mark.parametrize(
        "content", [b"", b"hello, world\n", b"\x00" * 50, np.random.default_rng(0).bytes(1000), b"\x08\x08"]
    )
    def test_not_onnx(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "m.onnx"
        path.write_bytes(content)
        with pytest.raises(InputError, match="is not an ONNX model"):
            load_graph(path)

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(cut=st.floats(0.0, 0.999))
    def test_truncated(self, convolution: Path, cut: float) -> None:
        whole = convolution.read_bytes()
        path = convolution.with_name("cut.onnx")
        path.write_bytes(whole[: int(len(whole) * cut)])
        with pytest.raises(InputError):
            load_graph(path)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(position=st.floats(0, 1), value=st.integers(0, 255))
    def test_a_changed_byte_is_either_harmless_or_refused(self, convolution: Path, position: float, value: int) -> None:
        content = bytearray(convolution.read_bytes())
        content[int(position * (len(content) - 1))] = value
        path = convolution.with_name("bent.onnx")
        path.write_bytes(content)
        try:
            load_graph(path, 2)
        except InputError as error:
            assert "\n" not in str(error)

    def test_an_opset_whose_name_is_no_text(self, convolution: Path) -> None:
        convolution.write_bytes(convolution.read_bytes().replace(b"com.microsoft", b"com\x80microsoft"))
        with pytest.raises(InputError, match=r"the name of the opset .* is no text"):
            load_graph(convolution)

    def test_a_weight_with_too_little_data(self, convolution: Path) -> None:
        model = onnx.load(convolution)
        model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
        onnx.save(model, convolution)
        with pytest.raises(InputError, match=r"weight w of shape \[4, 2, 3, 3\] needs 288 bytes but has 284"):
            load_graph(convolution)

    @pytest.mark.parametrize("dims", [[-1, 4], [2**62, 2**62]])
    def test_a_weight_of_impossible_shape(self, convolution: Path, dims: list[int]) -> None:
        model = onnx.load(convolution)
        model.graph.initializer[0].dims[:] = dims
        onnx.save(model, convolution)
        with pytest.raises(InputError, match="weight w"):
            load_graph(convolution)


class TestExternalData:
    def write(self, path: Path, location: str = "m.data") -> Path:
        write_model(path, [node("MatMul", ["x", "w"], ["y"])], {"x": ["n", 64]}, {"y": None}, {"w": floats(64, 32)})
        model = onnx.load(path)
        onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
        if location != "m.data":
            model = onnx.load(path, load_external_data=False)
            for entry in model.graph.initializer[0].external_data:
                if entry.key == "location":
                    entry.value = location
            path.write_bytes(model.SerializeToString())
        return path

    def test_it_is_found_and_hashed(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "m.onnx")
        graph = load_graph(path)
        assert graph.weight_bytes == 64 * 32 * 4
        data = tmp_path / "m.data"
        assert graph.sha256 == hashlib.sha256(path.read_bytes() + data.read_bytes()).hexdigest()
        content = bytearray(data.read_bytes())
        content[0] ^= 1
        data.write_bytes(content)
        os.utime(data, ns=(1, 1))
        assert load_graph(path).sha256 != graph.sha256

    def test_small_external_shapes_are_known(self, tmp_path: Path) -> None:
        path = _write(
            tmp_path, "(float[n,6] x) => (float[] y) { y = Reshape (x, t) }", weights={"t": integers(-1, 2, 3)}
        )
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.data", size_threshold=0)
        assert load_graph(path, 4).outputs[0].shape == (4, 2, 3)

    @pytest.mark.parametrize("location", ["../m.data", "/etc/passwd", "a/../../m.data", ""])
    def test_it_must_lie_beside_the_model(self, tmp_path: Path, location: str) -> None:
        (tmp_path / "sub").mkdir()
        path = self.write(tmp_path / "sub" / "m.onnx", location)
        with pytest.raises(InputError, match="outside the model's directory"):
            load_graph(path)

    def test_a_link_out_of_the_directory_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        path = self.write(tmp_path / "sub" / "m.onnx")
        (tmp_path / "sub" / "m.data").rename(tmp_path / "m.data")
        (tmp_path / "sub" / "m.data").symlink_to(tmp_path / "m.data")
        with pytest.raises(InputError, match="outside the model's directory"):
            load_graph(path)

    def test_a_missing_or_short_file_is_named(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "m.onnx")
        data = tmp_path / "m.data"
        data.write_bytes(data.read_bytes()[:-1])
        with pytest.raises(InputError, match=r"needs 8192 bytes at 0 of 'm.data', which has 8191"):
            load_graph(path)
        data.unlink()
        with pytest.raises(InputError, match=r"external data file 'm\.data' is missing"):
            load_graph(path)


def test_a_graph_says_which_sizes_were_assumed_and_which_were_given(tmp_path: Path) -> None:
    text = """(int64[batch,sequence] tokens, float[batch,3,?,width] image) => (int64[] y, float[] z)
        { y = Identity (tokens) z = Identity (image) }"""
    path = _write(tmp_path, text)
    graph = load_graph(path, 2, dims={"width": 48})
    assert graph.sizes == (("image:2", 224), ("sequence", 128), ("width", 48))
    assert set(graph.assumed) == {"sequence", "image:2"}
    assert graph.guessed == ()
    assert graph.sized_name == "m[image:2=224,sequence=128,width=48]"
    assert describe_assumed_sizes(graph) == "m: sequence=128, image:2=224 assumed; another size: --dim sequence=SIZE"
    assert load_graph(path, 1, dims={"width": 8, "image:2": 8, "sequence": 8}).assumed == ()


def test_a_dimension_whose_name_was_counted_is_told_with_its_place(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], {"x": ["s77", 3, "s20", "wide"]}, {"y": None})
    graph = load_graph(path, 2)
    assert graph.inputs[0].shape == (2, 3, 224, 224)
    message = "m: s20=224, wide=224 (s20 is dimension 2 of x) assumed; another size: --dim s20=SIZE"
    assert describe_assumed_sizes(graph) == message
    sound = write_model(tmp_path / "s.onnx", [node("Relu", ["x"], ["y"])], {"x": ["batch", "s19"]}, {"y": None})
    with pytest.raises(InputError, match=r"how large s19 is in its requests \(s19 is dimension 1 of x\)"):
        require_sizes(load_graph(sound))
    assert describe_assumed_sizes(load_graph(sound)) is None


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 16])
def test_sides_of_latents_and_flows_are_asked_for_and_those_of_pictures_are_not(tmp_path: Path, channels: int) -> None:
    dims: Dims = ["batch", channels, "height", "width"]
    path = write_model(tmp_path / "m.onnx", [node("Relu", ["sample"], ["y"])], {"sample": dims}, {"y": None})
    assert load_graph(path).guessed == (() if channels in (1, 3) else ("height", "width"))
    given = require_sizes(load_graph(path, dims={"height": 64, "width": 64}))
    assert given.inputs[0].shape == (1, channels, 64, 64)


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
def test_a_cache_of_keys_is_told_by_its_name_and_never_taken_for_a_picture(tmp_path: Path, heads: int) -> None:
    for name, usual in (("past_key_values.0.key", True), ("cache_v", True), ("x", False)):
        if not usual and heads in (1, 3):
            continue  # as many as a picture has colours
        dims: Dims = ["batch", heads, "s20", 64]
        path = write_model(tmp_path / f"{name}.onnx", [node("Relu", [name], ["y"])], {name: dims}, {"y": None})
        graph = load_graph(path)
        assert graph.inputs[0].shape == (1, heads, 128, 64)
        assert graph.guessed == (() if usual else ("s20",))


@pytest.mark.parametrize(("steps", "total", "is_squeezed"), [(128, 256, False), (1, 129, True)])
def test_a_mask_with_a_name_of_its_own_is_as_long_as_the_past_and_the_new_tokens(
    tmp_path: Path, steps: int, total: int, is_squeezed: bool
) -> None:
    names: dict[str, Dims] = {
        "input_ids": ["s10", "s21"],
        "attention_mask": ["s86", "s12"],
        "past_key_values.0.key": ["s10", 2, "s29", 8],
    }
    # torch.export keeps the one token of its example, whatever the input declares.
    first = node("Squeeze", ["input_ids", "one"], ["y"]) if is_squeezed else node("Identity", ["input_ids"], ["y"])
    nodes = [first, *(node("Identity", [name], [f"{name}_out"]) for name in names)]
    types = dict.fromkeys(("input_ids", "attention_mask", "y"), TensorProto.INT64)
    path = write_model(tmp_path / "m.onnx", nodes, names, {"y": None}, {"one": integers(1)}, types=types)
    graph = load_graph(path, 2)
    assert [tensor.shape for tensor in graph.inputs] == [(2, steps), (2, total), (2, 2, 128, 8)]
    assert dict(graph.sizes) == {"s21": steps, "s29": 128}, "what follows from others is not asked for"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("node", None, r"its graph has no nodes \(export it again"),
        ("output", None, r"its graph has no outputs \(export it again"),
        ("ir_version", 99, rf"\(export it for IR version {onnx.IR_VERSION} or before\)"),
    ],
)
def test_what_a_file_lacks_is_named_with_a_fix(tmp_path: Path, field: str, value: int | None, said: str) -> None:
    path = write_model(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], {"x": ["batch", 4]}, {"y": None})
    model = onnx.load(path)
    if value is None:
        model.graph.ClearField(field)
    else:
        setattr(model, field, value)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=said):
        load_graph(path)


@pytest.mark.parametrize(
    "dims", [["batch", "sequence_length"], ["batch", "samples"], ["batch", "time", 80], ["batch", 1, "mels", "frames"]]
)
def test_the_length_of_a_sound_is_asked_for_and_not_guessed(tmp_path: Path, dims: Dims) -> None:
    path = write_model(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], {"x": dims}, {"y": None})
    graph = load_graph(path)
    name = next(str(dim) for dim in dims[1:] if isinstance(dim, str))
    assert name in graph.guessed
    with pytest.raises(InputError, match=rf"nothing says how large {name} .*--dim {name}=SIZE"):
        require_sizes(graph)
    given = {str(dim): 64 for dim in dims[1:] if isinstance(dim, str)}
    assert require_sizes(load_graph(path, dims=given)).guessed == ()


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (write_classifier, r"'scaled', which node scaled \(Scaler\) of domain ai.onnx.ml gives, cannot be inferred"),
        (write_splitter, r"node parts \(SplitToSequence\) gives a sequence, not a tensor"),
    ],
)
def test_a_model_whose_ops_nobody_knows_is_refused_to_estimators_and_has_its_inputs_for_whoever_runs_it(
    tmp_path: Path, write: Callable[[Path], Path], reason: str
) -> None:
    path = write(tmp_path / "m.onnx")
    with pytest.raises(UnknownShapeError, match=reason + ".*gpuprof profile"):
        load_graph(path, 3)
    graph = load_runnable(path, 3, "other")
    assert (graph.name, graph.batch, graph.ops, graph.inputs[0].shape) == ("other", 3, (), (3, 2))
    assert "nothing can be estimated" in graph.unread


def test_a_model_that_contradicts_itself_is_not_taken_for_one_that_only_a_run_shows(tmp_path: Path) -> None:
    path = _write(tmp_path, "(float[n,3] x) => (float[] y) { y = MatMul (x, w) }", weights={"w": floats(4, 4)})
    with pytest.raises(InputError, match="contradicts its inputs"):
        load_runnable(path)


def test_an_input_without_a_shape_is_refused_for_that(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], {"x": ["N", 4]}, {"y": None})
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    with pytest.raises(InputError, match="input x declares no shape, so that nobody knows") as caught:
        load_graph(path)
    assert caught.value.fix is not None and "with its inputs' shapes" in caught.value.fix


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_an_odd_model_is_read_or_refused_with_a_remedy(odd: OddModel, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    odd.build(path)
    try:
        load_runnable(path, read_fixed_batch(path) or 1, dims=odd.dims)
    except InputError as error:
        assert error.fix, str(error)


def test_a_trip_count_that_the_condition_cuts_short_is_no_count_of_turns(tmp_path: Path) -> None:
    graph = load_graph(_write(tmp_path, WHILE, 13, {"w": floats(64, 64)}))
    assert graph.uncounted_ops == ("Loop",)
    assert graph.outputs[0].shape == (1, 64)


def test_given_turns_of_a_loop_are_counted(tmp_path: Path) -> None:
    path = _write(tmp_path, WHILE, 13, {"w": floats(64, 64)})
    assert read_turns(path) == ("n.turns",)
    graph = load_graph(path, dims={"n.turns": 5})
    (loop,) = graph.ops
    assert not graph.uncounted_ops and loop.flops == 5 * (2 * 64 * 64 + 2)


NESTED = """(float[N,4] x) => (float[N,4] y) <int64 five = {5}> { y = Loop (five, , x) <body = b (int64 i, bool go,
      float[N,4] s) => (bool on, float[N,4] t) { on = Identity (go) t = Loop (COUNT, , s) <body = c (int64 j, bool go2,
         float[N,4] r) => (bool on2, float[N,4] q) { on2 = Identity (go2) q = Add (r, x) }> }> }"""
SCAN = """(float[N,6,4] x, float[N,4] z) => (float[] last, float[] all) { last, all = Scan <num_scan_inputs = 1,
      scan_input_axes = [AXIS], scan_output_axes = [1], body = b (float[] s, float[] e) => (float[] t, float[] o)
      { t = Add (s, e) o = Relu (t) }> (z, x) }"""


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        (COUNTED, 6 * 64),
        (COUNTED.replace("{6}", "{-6}"), 0),
        (COUNTED.replace("{6}", "{2147483647}"), None),  # no bound
        (COUNTED.replace("bool yes = {1}", "bool yes = {0}"), 0),
        (NESTED.replace("COUNT", "five"), 5 * 5 * 4),
        (NESTED.replace("COUNT", "i"), None),  # other turns in each iteration
        (SCAN.replace("AXIS", "1"), 6 * (4 + 4)),
        (SCAN.replace("AXIS", "-2"), 6 * (4 + 4)),
    ],
)
def test_turns_of_loops_and_scans_are_counted_where_known(tmp_path: Path, text: str, flops: int | None) -> None:
    (loop,) = load_graph(_write(tmp_path, text, 13)).ops
    assert loop.flops == flops


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (onnx.helper.make_node("Einsum", ["x"], ["y"], equation=b"\xff\xfe"), "can't decode"),  # inference hangs
        (onnx.helper.make_node("Split", ["x"], ["y", "z"], num_outputs=1), "has 2 outputs, not 1"),  # it aborts
    ],
)
def test_nodes_on_which_inference_hangs_are_refused_before(tmp_path: Path, node: onnx.NodeProto, message: str) -> None:
    path = write_model(tmp_path / "m.onnx", [node], {"x": [7]}, {"y": None}, opset=18)
    with pytest.raises(InputError, match=message):
        load_graph(path, 7)


def test_what_a_runtime_tolerates_is_read(tmp_path: Path) -> None:
    """An output without a type, a graph without a name, metadata twice, a weight twice (the last one counts)."""
    path = _write(tmp_path, "(float[N,8] x) => (float[N,3] y) { y = MatMul (x, w) }", weights={"w": floats(8, 5)})
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(floats(8, 3), "w"))
    model.graph.output[0].ClearField("type")
    model.graph.ClearField("name")
    model.metadata_props.extend([onnx.StringStringEntryProto(key="a", value="1")] * 2)
    onnx.save(model, path)
    (output,) = load_graph(path).outputs
    assert (output.dtype, output.shape) == ("float32", (1, 3)) and find_refusal(path, on_gpu=False) is None


@pytest.mark.parametrize("before", ["Relu (x)", "ai.onnx.ml.Normalizer (x)"])
def test_a_function_of_another_opset_is_read(tmp_path: Path, before: str) -> None:
    """Also where ONNX does not know the types of the function's inputs, and so cannot convert it."""
    opsets = [helper.make_opsetid("", 13)]
    function = helper.make_function("own", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], opsets)
    path = _write(tmp_path, f"(float[N,8] x) => (float[N,8] y) {{ h = {before} y = own.Twice (h) }}")
    model = onnx.load(path)
    model.opset_import.extend([helper.make_opsetid("own", 1), helper.make_opsetid("ai.onnx.ml", 3)])
    model.functions.append(function)
    onnx.save(model, path)
    assert "Add" in list_op_types(path) and find_refusal(path, on_gpu=False) is None


def test_an_op_that_its_opset_deprecates_is_read(tmp_path: Path) -> None:
    text = """(float[N,8,4,4] x) => (float[N,8,4,4] y) <float[2] s = {1,1}, float[2] b = {0,0}>
    { y = GroupNormalization <num_groups = 2> (x, s, b) }"""
    (op,) = load_graph(_write(tmp_path, text, 18), 3).ops
    assert op.outputs[0].shape == (3, 8, 4, 4) and op.flops


def test_an_assumed_size_of_a_dimension_without_a_name_is_in_the_message(tmp_path: Path) -> None:
    text = """(float[N,?] x) => (float[N,3] y) <float[3] b = {1,1,1}> { y = Add (x, b) }"""
    with pytest.raises(InputError, match=r"contradicts its inputs \[1, 128\], \[3\]") as caught:
        load_graph(_write(tmp_path, text))
    assert "x:1 as 128" in caught.value.fix and "--dim x:1=SIZE" in caught.value.fix


def test_an_output_with_the_same_rows_for_any_batch_keeps_requests_apart(tmp_path: Path) -> None:
    assert find_mixed_output(_write(tmp_path, ANCHORS)) == "output anchors"


def test_an_output_of_unknown_rank_keeps_requests_apart_as_in_serving(tmp_path: Path) -> None:
    path = _write(tmp_path, "(float[N,4] x) => (float[N,4,3] y) { y = Relu (x) }")  # declared otherwise than inferred
    assert find_mixed_output(path) == "output y"
    text = "(float[N,4] x) => (float[] y) <int64[1] axis = {0}> { y = Unsqueeze (x, axis) }"  # the batch comes second
    assert find_mixed_output(_write(tmp_path, text)) == "output y"


def batch_of(model: ModelProto) -> int:
    shapes = [[dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in model.graph.input]
    return next((shape[0] for shape in shapes if shape), 1) or 1


def shape_of(value: object) -> tuple[int, ...] | None:
    if isinstance(value, TensorProto):
        return tuple(value.dims)
    return None if isinstance(value, list | dict) or value is None else np.asarray(value).shape


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_shapes_are_those_that_the_reference_gives_or_the_case_is_refused(tmp_path: Path) -> None:
    from onnx.backend.test.case.node import collect_testcases

    cases = [(c.name, c.model, c.data_sets[0]) for c in collect_testcases(None) if c.model and c.data_sets]
    path = tmp_path / "m.onnx"
    wrong, refused = [], []
    for name, model, data in cases:
        path.write_bytes(model.SerializeToString())
        try:
            graph = load_graph(path, batch_of(model))
        except InputError as error:
            assert "\n" not in str(error)
            refused.append(name)
            continue
        given = [shape_of(value) for value in data[1]]
        agrees = all(want in (None, output.shape) for output, want in zip(graph.outputs, given, strict=False))
        if not agrees and not DATA_DECIDES & {op.op_type for op in graph.ops}:
            wrong.append(name)
    assert len(cases) > 1000
    assert wrong == []
    assert 100 * len(refused) < MOST_REFUSED_PCT * len(cases)


def test_a_weight_of_more_dimensions_than_an_array_may_have_is_refused(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1] * 194, [0.0])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(InputError, match="'w' cannot be read"):
        load_graph(tmp_path / "m.onnx", 1)


def test_copies_counted_by_a_one_hot_value_are_known(tmp_path: Path) -> None:
    """As exporters write ``repeat_interleave``."""
    text = """(float[batch,8,5] x) => (float[] y) <int64 places = {-2}, int64 depth = {3}, int64[2] off_on = {1,4}>
        { repeats = OneHot (places, depth, off_on) y = Tile (x, repeats) }"""
    assert load_graph(_write(tmp_path, text), 2).outputs[0].shape == (2, 32, 5)
