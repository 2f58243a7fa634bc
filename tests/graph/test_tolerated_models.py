"""Models that ONNX's checker refuses or that leave sizes open, after public reports; runtimes run all but one."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from gpuprof.errors import InputError
from gpuprof.graph.load import load_graph, read_turns
from gpuprof.runtime.batch_items import find_mixed_output
from tests.small_models import write_model

WHILE = """<ir_version: 7, opset_import: ["" : 13]>
g (float[N,64] x) => (float[N,64] y)
<int64 trip = {9223372036854775807}, bool yes = {1}, int64 zero = {0}, int64 step = {1}, int64 last = {5}>
{
   n, y = Loop (trip, yes, zero, x) <
    body: graph = b (int64 it, bool c, int64 i, float[N,64] s) => (bool c2, int64 i2, float[N,64] s2) {
      i2 = Add (i, step)
      c2 = Less (i2, last)
      s2 = MatMul (s, w)
   }>
}"""
COUNTED = """<ir_version: 7, opset_import: ["" : 13]>
g (float[N,64] x) => (float[N,64] y) <int64 trip = {6}, bool yes = {1}>
{
   y = Loop (trip, yes, x) <body: graph = b (int64 it, bool c, float[N,64] s) => (bool c2, float[N,64] s2) {
      c2 = Identity (c)
      s2 = Add (s, s)
   }>
}"""
ANCHORS = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N,4] x) => (float[N,4] y, float[A,3] anchors) <float[2,3] a = {0,1,2,3,4,5}>
{
   y = Relu (x)
   anchors = Identity (a)
}"""


def _write(tmp_path: Path, text: str) -> Path:
    """Write the model that ``text`` describes; a matrix ``w`` that it leaves open is 64 by 64."""
    model = onnx.parser.parse_model(text)
    if "MatMul (s, w)" in text:
        model.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, (64, 64), [0.5] * 4096))
    onnx.save(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_a_trip_count_that_the_condition_cuts_short_is_no_count_of_turns(tmp_path: Path) -> None:
    graph = load_graph(_write(tmp_path, WHILE))
    assert graph.uncounted_ops == ("Loop",)
    assert graph.outputs[0].shape == (1, 64)


def test_given_turns_of_a_loop_are_counted(tmp_path: Path) -> None:
    path = _write(tmp_path, WHILE)
    assert read_turns(path) == ("n.turns",)
    graph = load_graph(path, dims={"n.turns": 5})
    (loop,) = graph.ops
    assert not graph.uncounted_ops and loop.flops == 5 * (2 * 64 * 64 + 2)


def test_turns_that_nothing_cuts_short_are_counted(tmp_path: Path) -> None:
    (loop,) = load_graph(_write(tmp_path, COUNTED)).ops
    assert loop.flops == 6 * 64


def test_a_branch_of_if_with_inputs_is_named(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (bool c, float[N,4] x) => (float[N,4] y)
    {
       y = If (c) <then_branch: graph = t (float[N,4] xi) => (float[N,4] yt) { yt = Relu (xi) },
                   else_branch: graph = e () => (float[N,4] ye) { ye = Neg (x) }>
    }"""
    with pytest.raises(InputError, match=r"then_branch of node y \(If\) declares the input 'xi'"):
        load_graph(_write(tmp_path, text))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (onnx.helper.make_node("Einsum", ["x"], ["y"], equation=b"\xff\xfe"), "can't decode"),  # inference hangs
        (onnx.helper.make_node("Split", ["x"], ["y", "z"], num_outputs=1), "has 2 outputs, not 1"),  # it aborts
    ],
)
def test_nodes_on_which_inference_never_returns_are_refused_before(
    tmp_path: Path, node: onnx.NodeProto, message: str
) -> None:
    path = write_model(tmp_path / "m.onnx", [node], {"x": [7]}, {"y": None}, opset=18)
    with pytest.raises(InputError, match=message):
        load_graph(path, 7)


def test_an_output_of_another_rank_than_declared_is_read_with_a_remark(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 13]>
    g (float[N,8] x) => (float[1] y) { y = ReduceL2 <keepdims = 0> (x) }"""
    graph = load_graph(_write(tmp_path, text))
    assert graph.outputs[0].shape == ()
    assert graph.remarks == ("output y is declared [1]; its shape is []",)


def test_an_output_without_a_type_gets_the_inferred_type(tmp_path: Path) -> None:
    path = _write(
        tmp_path, '<ir_version: 8, opset_import: ["" : 13]> g (float[N,8] x) => (float[N,8] y) { y = Relu (x) }'
    )
    model = onnx.load(path)
    model.graph.output[0].ClearField("type")
    model.graph.ClearField("name")
    onnx.save(model, path)
    assert load_graph(path).outputs[0].dtype == "float32"


def test_an_op_that_its_opset_deprecates_is_read(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[N,8,4,4] x) => (float[N,8,4,4] y) <float[2] s = {1,1}, float[2] b = {0,0}>
    { y = GroupNormalization <num_groups = 2> (x, s, b) }"""
    (op,) = load_graph(_write(tmp_path, text), 3).ops
    assert op.outputs[0].shape == (3, 8, 4, 4) and op.flops


def test_an_assumed_size_of_a_dimension_without_a_name_is_in_the_message(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N,?] x) => (float[N,3] y) <float[3] b = {1,1,1}> { y = Add (x, b) }"""
    with pytest.raises(InputError, match=r"contradicts its inputs \[1, 128\], \[3\]") as caught:
        load_graph(_write(tmp_path, text))
    assert "x:1 as 128" in caught.value.fix and "--dim x:1=SIZE" in caught.value.fix


def test_an_output_with_the_same_rows_for_any_batch_keeps_requests_apart(tmp_path: Path) -> None:
    assert find_mixed_output(_write(tmp_path, ANCHORS)) == "output anchors"
