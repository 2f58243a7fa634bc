import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from gpuprof.errors import InputError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.runtime import batch_items
from gpuprof.runtime.batch_items import BatchVerdicts, describe_mixing, find_mixed_output, mixed_output
from gpuprof.runtime.free_batch import ensure_dynamic_batch, is_dynamic, rebatch
from gpuprof.runtime.session import open_session
from tests.small_models import Dims, floats, integers, write_classifier, write_model, write_splitter, write_text

node = helper.make_node
Weights = dict[str, np.ndarray]


def write_free(path: Path, batch: int | None = None) -> Path:
    output = path.with_name(f"free-{path.name}")
    rebatch(path, output, batch)
    return output


def run(path: Path, batch: int) -> list[np.ndarray]:
    outputs: list[np.ndarray] = open_session(path, threads=1).run(None, random_inputs(load_graph(path, batch)))
    return outputs


def model(directory: Path, nodes: str, x: Dims, y: Dims, weights: Weights | None = None, opset: int = 17) -> Path:
    inputs, outputs = (", ".join(map(str, dims)) for dims in (x, y))
    return write_text(
        directory / "m.onnx", f"(float[{inputs}] x) => (float[{outputs}] y) {{ {nodes} }}", weights, opset
    )


def test_a_model_that_holds_no_batch_only_changes_its_declarations(tmp_path: Path) -> None:
    path = model(tmp_path, "y = Relu (x)", [1, 3], [1, 3])
    free = write_free(path)
    assert load_graph(free, 5).outputs[0].shape == (5, 3)
    assert [n.op_type for n in onnx.load(free).graph.node] == ["Relu"]


@pytest.mark.parametrize("fixed", [1, 4])
@pytest.mark.parametrize(
    ("target", "result"), [((6,), (6,)), ((2, -1), (2, 3)), ((0, 3), (2, 3)), ((2, 3, 1), (2, 3, 1))]
)
def test_reshapes_follow_a_batch(tmp_path: Path, fixed: int, target: tuple[int, ...], result: tuple[int, ...]) -> None:
    weights = {"t": integers(fixed, *target)}
    path = model(tmp_path, "y = Reshape (x, t)", [fixed, 2, 3], [fixed, *result], weights)
    assert run(write_free(path), 7)[0].shape == (7, *result)


_HEADS = """a = Reshape (x, split) b = Transpose <perm = [0,2,1,3]> (a) c = Reshape (b, fold)
    k = Transpose <perm = [0,2,1]> (c) scores = MatMul (c, k) d = MatMul (scores, c) e = Reshape (d, unfold)
    f = Transpose <perm = [0,2,1,3]> (e) y = Reshape (f, join)"""
_HEAD_SHAPES = {"split": integers(1, 5, 3, 4), "fold": integers(3, 5, 4)}
_HEAD_SHAPES |= {"unfold": integers(1, 3, 5, 4), "join": integers(1, 5, 12)}
_SECOND = """a = Transpose <perm = [1,0,2]> (x) b = Reshape (a, fold) c = MatMul (b, w) d = Reshape (c, unfold)
    y = Transpose <perm = [1,0,2]> (d)"""
_STATES = "t = Transpose <perm = [1,0,2]> (x) y = LSTM <hidden_size = 2> (t, w, r, , , h, c)"
_STATE_WEIGHTS = {"w": floats(1, 8, 3), "r": floats(1, 8, 2), "h": floats(1, 1, 2), "c": floats(1, 1, 2)}
_SIZES = """a = Resize <mode = "nearest"> (x, , , sizes) y = Expand (a, shape)"""
#: Rounds by the largest value of the whole batch, so that outputs move by a step with the batch.
_ROUNDED = "q, scale, zero = DynamicQuantizeLinear (x) y = DequantizeLinear (q, scale, zero)"


@pytest.mark.parametrize(
    ("nodes", "x", "y", "weights", "batch", "shape"),
    [
        (_HEADS, [1, 5, 12], [1, 5, 12], _HEAD_SHAPES, 6, (6, 5, 12)),
        (_SECOND, [2, 5, 3], [2, 5, 4],
         {"fold": integers(10, 3), "w": floats(3, 4), "unfold": integers(5, 2, 4)}, 6, (6, 5, 4)),
        (_STATES, [1, 5, 3], [5, 1, 1, 2], _STATE_WEIGHTS, 4, (5, 1, 4, 2)),
        ("y = Slice (x, starts, ends)", [2, 5], [2, 3],
         {"starts": integers(0, 1), "ends": integers(2, 4)}, 6, (6, 3)),
        (_SIZES, [2, 1, 2, 2], [2, 3, 4, 4],
         {"sizes": integers(2, 1, 4, 4), "shape": integers(2, 3, 4, 4)}, 5, (5, 3, 4, 4)),
        (_ROUNDED, [1, 30], [1, 30], {}, 5, (5, 30)),
    ],
    ids=["heads folded into the batch", "batch in the second place", "initial states", "bounds", "sizes", "rounding"],
)  # fmt: skip
@pytest.mark.parametrize("opset", [13, 17])
def test_constants_that_hold_the_batch_follow_it(
    tmp_path: Path, nodes: str, x: Dims, y: Dims, weights: Weights, batch: int, shape: Dims, opset: int
) -> None:
    assert run(write_free(model(tmp_path, nodes, x, y, weights, opset)), batch)[0].shape == shape


def test_a_token_that_is_joined_to_each_sample_is_repeated(tmp_path: Path) -> None:
    weights = {"token": floats(1, 1, 3)}
    path = model(tmp_path, "y = Concat <axis = 1> (token, x)", [1, 4, 3], [1, 5, 3], weights)
    y = run(write_free(path), 3)[0]
    assert y.shape == (3, 5, 3)
    np.testing.assert_array_equal(y[:, 0], np.repeat(floats(1, 1, 3)[0], 3, axis=0))


def test_another_fixed_batch_is_set(tmp_path: Path) -> None:
    path = model(tmp_path, "y = Reshape (x, t)", [1, 2, 3], [1, 6], {"t": integers(1, 6)})
    fixed = write_free(path, 8)
    assert [d.dim_value for d in onnx.load(fixed).graph.output[0].type.tensor_type.shape.dim] == [8, 6]
    assert run(fixed, 8)[0].shape == (8, 6)
    assert load_graph(write_free(fixed, 2), 2).outputs[0].shape == (2, 6)


@pytest.mark.parametrize(
    ("name", "nodes", "weights"),
    [
        ("first", [node("Gather", ["x", "zero"], ["y"], name="first", axis=0)], {"zero": integers(0)}),
        ("mean", [node("ReduceMean", ["x"], ["y"], name="mean", axes=[0], keepdims=1)], {}),
        ("gram", [node("Gemm", ["x", "x"], ["y"], name="gram", transB=1)], {}),
        ("squeeze", [node("Squeeze", ["x", "zero"], ["y"], name="squeeze")], {"zero": integers(0)}),
        ("normalise", [node("Softmax", ["x"], ["y"], name="normalise", axis=0)], {}),
    ],
)
def test_nodes_that_mix_samples_are_named(tmp_path: Path, name: str, nodes: list[NodeProto], weights: Weights) -> None:
    path = write_model(tmp_path / "m.onnx", nodes, {"x": [1, 3]}, {"y": None}, weights)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=name if name != "normalise" else "output y differs"):
        write_free(path)
    assert sorted(tmp_path.iterdir()) == before


def test_inputs_that_are_free_while_a_constant_holds_the_batch_are_rewritten(tmp_path: Path) -> None:
    path = model(tmp_path, "y = Reshape (x, t)", ["n", 2, 3], ["n", 6], {"t": integers(1, 6)})
    assert not is_dynamic(path)
    free = ensure_dynamic_batch(path, tmp_path / "copies")
    assert is_dynamic(free)
    assert free.name == path.name
    assert ensure_dynamic_batch(path, tmp_path / "copies") == free


def test_external_data_goes_along(tmp_path: Path) -> None:
    weights = {"w": floats(8, 4), "t": integers(1, 2, 2)}
    path = model(tmp_path, "a = MatMul (x, w) y = Reshape (a, t)", [1, 8], [1, 2, 2], weights)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.data", size_threshold=100)
    (tmp_path / "out").mkdir()
    rebatch(path, tmp_path / "out" / "m.onnx")
    assert run(tmp_path / "out" / "m.onnx", 3)[0].shape == (3, 2, 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "m.data").write_text("mine")
    with pytest.raises(InputError, match="is not this model's data"):
        rebatch(path, tmp_path / "other" / "m.onnx")
    assert (tmp_path / "other" / "m.data").read_text() == "mine"


Described = tuple[str, list[str], list[str], dict[str, Any]]


def _model(directory: Path, *nodes: Described, **more: object) -> Path:
    made = [helper.make_node(kind, inputs, outputs, **attributes) for kind, inputs, outputs, attributes in nodes]
    options: dict[str, object] = {"outputs": {"y": ["N", 4]}, "weights": {"w": floats(4, 4)}, **more}
    return write_model(directory / "m.onnx", made, {"x": ["N", 4]}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "nodes",
    [
        [("Softmax", ["x"], ["y"], {"axis": 0})],
        [("ReduceMean", ["x"], ["m"], {"axes": [0]}), ("Sub", ["x", "m"], ["y"], {})],
        [("CumSum", ["x", "zero"], ["y"], {})],
    ],
    ids=["softmax over the batch", "normalised over the batch", "sums over the batch"],
)
def test_a_model_that_mixes_items_behind_a_plain_shape_is_found(tmp_path: Path, nodes: list[Described]) -> None:
    assert mixed_output(_model(tmp_path, *nodes, weights={"zero": np.array(0, np.int64)})) == "y"


def test_items_that_are_computed_apart_are_not_taken_for_mixed(tmp_path: Path) -> None:
    assert mixed_output(_model(tmp_path, ("Softmax", ["x"], ["s"], {}), ("MatMul", ["s", "w"], ["y"], {}))) is None
    shape: dict[str, list[int | str | None]] = {"x": [3, "batch", 4]}  # the batch comes second
    nodes = [helper.make_node("Softmax", ["x"], ["y"], axis=0)]
    assert mixed_output(write_model(tmp_path / "t.onnx", nodes, shape, {"y": [3, "batch", 4]})) is None
    fixed = [helper.make_node("Softmax", ["x"], ["y"], axis=0)]
    assert mixed_output(write_model(tmp_path / "f.onnx", fixed, {"x": [2, 4]}, {"y": [2, 4]})) is None


def test_an_output_that_is_the_same_for_all_mixes_nothing_and_one_of_all_items_does(tmp_path: Path) -> None:
    apart: Described = ("Relu", ["x"], ["y"], {})
    constant = _model(tmp_path, apart, ("Identity", ["w"], ["z"], {}), outputs={"y": ["N", 4], "z": [4, 4]})
    assert mixed_output(constant) is None
    mean: Described = ("ReduceMean", ["x"], ["z"], {"axes": [0]})
    assert mixed_output(_model(tmp_path, apart, mean, outputs={"y": ["N", 4], "z": [1, 4]})) == "z"
    relation: list[Described] = [("Transpose", ["x"], ["t"], {"perm": [1, 0]}), ("MatMul", ["x", "t"], ["z"], {})]
    assert mixed_output(_model(tmp_path, apart, *relation, outputs={"y": ["N", 4], "z": ["N", "N"]})) == "z"


@pytest.mark.parametrize(
    ("x", "t", "y", "found"),
    [
        (["N", 4], ["N", 4], ["N", 4], None),
        (["N", 4], [], ["N", 4], "input t"),
        (["steps", "batch"], ["steps", "batch"], None, "input x"),
        (["N", 4], ["N", 4], [1, 4], "output y"),
        ([2, 4], [], [2, 4], None),
    ],
    ids=["together", "one value for all", "batch after the steps", "an output left at one", "fixed"],
)
def test_requests_share_a_leading_batch(tmp_path: Path, x: Dims, t: Dims, y: Dims | None, found: str | None) -> None:
    nodes = [helper.make_node("Mul", ["x", "t"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": x, "t": t}, {"y": y})
    assert find_mixed_output(path) == found
    assert found is None or f"the first dimension alone of its {found} must be the batch" in describe_mixing("m", found)


def test_of_a_random_model_nobody_can_tell(tmp_path: Path) -> None:
    noise: Described = ("RandomNormalLike", ["x"], ["n"], {})
    assert mixed_output(_model(tmp_path, noise, ("Add", ["x", "n"], ["y"], {}))) is None


def test_rounding_by_the_largest_of_a_batch_is_no_mixing(tmp_path: Path) -> None:
    quantise: Described = ("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], {})
    nodes: list[Described] = [quantise, ("DequantizeLinear", ["q", "s", "z"], ["y"], {})]
    assert mixed_output(_model(tmp_path, *nodes)) is None


def test_one_index_that_differs_by_chance_is_no_mixing(tmp_path: Path) -> None:
    nodes: list[Described] = [
        ("Softmax", ["x"], ["s"], {"axis": 0}),
        ("ArgMax", ["s"], ["y"], {"axis": 0, "keepdims": 1}),
    ]
    mixing = _model(tmp_path, *nodes, outputs={"y": [1, 4]}, types={"y": TensorProto.INT64})
    assert mixed_output(mixing) == "y"

    def run(inputs: batch_items.Arrays) -> batch_items.Arrays:
        nearly = inputs["x"].shape[0] == 2 and inputs["x"][0, 0] == 0  # of the first seed only
        return {"y": np.full(inputs["x"].shape[:1], int(nearly))}

    assert batch_items.first_mixed(run, lambda seed: {"x": np.full((2, 1), seed)}, {"x": 0}) is None


def test_a_verdict_is_found_once_and_read_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _model(tmp_path, ("Softmax", ["x"], ["y"], {"axis": 0}))
    assert BatchVerdicts(tmp_path).mixed_output("a" * 64) is None
    assert BatchVerdicts(tmp_path).judge(path, "a" * 64) == "y"
    monkeypatch.setattr(batch_items, "call_apart", lambda *_, **__: pytest.fail("it was run again"))
    assert BatchVerdicts(tmp_path).mixed_output("a" * 64) == "y" == BatchVerdicts(tmp_path).judge(path, "a" * 64)


def test_a_model_whose_ops_prove_that_items_stay_apart_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_items, "call_apart", lambda function, *_, **__: function.__name__)
    apart = _model(tmp_path, ("Softmax", ["x"], ["s"], {"axis": 1}), ("MatMul", ["s", "w"], ["y"], {}))
    assert BatchVerdicts(None).judge(apart, "a") is None
    for number, op in enumerate(("CumSum", "Transpose")):
        inputs = ["x", "zero"] if op == "CumSum" else ["x"]
        mixing = _model(tmp_path, (op, inputs, ["y"], {}), weights={"zero": np.array(0, np.int64)})
        assert BatchVerdicts(None).judge(mixing, f"b{number}") == "mixed_output"


def test_a_damaged_verdict_is_none_and_without_a_database_nothing_is_written(tmp_path: Path) -> None:
    path = _model(tmp_path, ("Softmax", ["x"], ["y"], {"axis": 0}))
    (tmp_path / ".batched").mkdir()
    (tmp_path / ".batched" / "b.json").write_text("[")
    assert BatchVerdicts(tmp_path).mixed_output("b") is None
    assert BatchVerdicts(tmp_path).judge(path, "b") == "y"
    assert json.loads((tmp_path / ".batched" / "b.json").read_text()) == {"mixed": "y"}
    verdicts = BatchVerdicts(None)
    assert verdicts.judge(path, "c") == "y" == verdicts.mixed_output("c")
    nowhere = BatchVerdicts(tmp_path / "nowhere")
    assert nowhere.judge(path, "d") == "y" and not (tmp_path / "nowhere").exists()


def test_a_verdict_that_is_older_than_its_database_is_written_when_that_is_there(tmp_path: Path) -> None:
    verdicts = BatchVerdicts(tmp_path / "db")
    verdicts.keep("e", None)
    (tmp_path / "db").mkdir()
    verdicts.save()
    assert json.loads((tmp_path / "db" / ".batched" / "e.json").read_text()) == {"mixed": None}


def test_a_map_for_each_item_is_apart_and_a_sequence_of_tensors_belongs_to_nobody(tmp_path: Path) -> None:
    assert find_mixed_output(write_classifier(tmp_path / "c.onnx")) is None
    assert find_mixed_output(write_splitter(tmp_path / "s.onnx")) == "output parts"
