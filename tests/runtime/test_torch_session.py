"""Models run by PyTorch, which each test imports itself: importing this file must not take its seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from gpuprof.errors import InputError, UnavailableError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.runtime.providers import NODE_RANGE, TORCH_CPU, TORCH_CUDA
from gpuprof.runtime.session import open_session
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is of the extra `export`")

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def _both(path: Path, feeds: dict[str, Any]) -> None:
    expected = open_session(path, threads=1).run(None, feeds)
    found = open_session(path, threads=1, provider=TORCH_CPU).run(None, feeds)
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "seeds"),
    [("mlp", 1), ("transformer_encoder", 1), ("lstm_classifier", 1), ("unet", 1), ("squeezenet", 1), ("shufflenet", 1),
     ("random_cnn", 3), ("random_transformer", 4), ("random_rnn", 4)],
)  # fmt: skip
def test_networks_of_the_zoo_answer_as_in_onnx_runtime(tmp_path: Path, name: str, seeds: int) -> None:
    for seed in range(seeds):
        path = build(find_architecture(name), tmp_path / f"{seed}.onnx", seed=seed)
        _both(path, random_inputs(load_graph(path, 2)))


_X = np.random.default_rng(0).uniform(-2.0, 2.0, (2, 6, 9, 10)).astype(np.float32)
_KERNEL = np.random.default_rng(1).uniform(-1.0, 1.0, (4, 3, 3, 3)).astype(np.float32)
_ROWS = np.random.default_rng(2).uniform(-1.0, 1.0, (3, 8)).astype(np.float32)
_MATRIX = np.random.default_rng(3).uniform(-1.0, 1.0, (5, 8)).astype(np.float32)
_STEPS = np.random.default_rng(4).uniform(-1.0, 1.0, (7, 2, 4)).astype(np.float32)
_GATES = [np.random.default_rng(5).uniform(-1.0, 1.0, shape).astype(np.float32) for shape in
          ((2, 12, 4), (2, 12, 3), (2, 24))]  # fmt: skip
_GRU = [np.random.default_rng(6).uniform(-1.0, 1.0, shape).astype(np.float32) for shape in
        ((1, 9, 4), (1, 9, 3), (1, 18))]  # fmt: skip


def _ints(*values: int) -> Any:
    return np.array(values, np.int64)


_CASES: list[tuple[str, int, list[Any], dict[str, Any]]] = [
    ("Conv", 11, [_X, _KERNEL], {"group": 2, "pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]}),
    ("Conv", 11, [_X, _KERNEL], {"group": 2, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("Conv", 11, [_X, _KERNEL], {"group": 2, "auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    ("MaxPool", 12, [_X], {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 0, 1]}),
    ("MaxPool", 12, [_X], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", 11, [_X], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("AveragePool", 11, [_X], {"kernel_shape": [3, 3], "pads": [0, 1, 1, 0], "count_include_pad": 1}),
    ("GlobalMaxPool", 13, [_X], {}),
    ("LRN", 13, [_X], {"size": 3, "alpha": 0.1, "beta": 0.5, "bias": 2.0}),
    ("InstanceNormalization", 13, [_X, np.ones(6, np.float32), np.zeros(6, np.float32)], {}),
    ("Softmax", 9, [_X], {"axis": 2}),
    ("Softmax", 13, [_X], {"axis": 1}),
    ("LogSoftmax", 13, [_X], {}),
    ("Gemm", 13, [_ROWS, _MATRIX, np.ones(5, np.float32)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Gemm", 13, [_ROWS, _MATRIX], {"transB": 1, "alpha": 0.5}),
    ("Slice", 13, [_X, _ints(7, -1), _ints(1, -20), _ints(3, 2), _ints(-2, -3)], {}),
    ("Slice", 9, [_X], {"starts": [1, 2], "ends": [99, 8], "axes": [1, 3]}),
    ("Split", 13, [_X, _ints(1, 5)], {"axis": 1}),
    ("Gather", 13, [_ROWS, np.array([[0, -1], [1, 2]], np.int64)], {"axis": 0}),
    ("GatherElements", 13, [_ROWS, np.array([[0, -1], [1, 2], [3, 4]], np.int64)], {"axis": 1}),
    ("GatherND", 13, [_X, np.array([[0, 1], [1, 5]], np.int64)], {}),
    ("GatherND", 13, [_X, np.array([[[1]], [[5]]], np.int64)], {"batch_dims": 1}),
    ("Expand", 13, [np.ones((1, 3, 1), np.float32), _ints(2, 1, 4)], {}),
    ("Reshape", 13, [_X, _ints(0, -1, 5)], {}),
    ("Flatten", 13, [_X], {"axis": 2}),
    ("Squeeze", 13, [np.ones((1, 3, 1), np.float32), _ints(0)], {}),
    ("Unsqueeze", 13, [_ROWS, _ints(0, -1)], {}),
    ("Transpose", 13, [_X], {"perm": [0, 2, 3, 1]}),
    ("Pad", 13, [_X, _ints(0, 0, 1, 2, 0, 0, 0, 1), np.array(1.5, np.float32)], {}),
    ("Pad", 13, [_X, _ints(0, 0, 1, 2, 0, 0, 0, 1)], {"mode": "reflect"}),
    ("Tile", 13, [_ROWS, _ints(2, 1)], {}),
    ("CumSum", 13, [_ROWS, np.array(1, np.int64)], {"exclusive": 1, "reverse": 1}),
    ("ReduceMean", 13, [_X], {"axes": [2, 3], "keepdims": 0}),
    ("ReduceSum", 13, [_X, _ints(1)], {}),
    ("ReduceMax", 13, [_X], {}),
    ("ReduceL2", 13, [_X], {"axes": [1]}),
    ("ArgMax", 13, [_ROWS], {"axis": 1, "keepdims": 0}),
    ("ArgMax", 13, [np.ones((2, 3), np.float32)], {"axis": 1, "select_last_index": 1}),
    ("TopK", 13, [_ROWS, _ints(3)], {}),
    ("Clip", 13, [_X, np.array(-0.5, np.float32)], {}),
    ("Clip", 9, [_X], {"min": -0.5, "max": 0.25}),
    ("HardSigmoid", 13, [_X], {"alpha": 0.3}),
    ("LeakyRelu", 13, [_X], {}),
    ("Elu", 13, [_X], {"alpha": 0.7}),
    ("PRelu", 13, [_X, np.full((6, 1, 1), 0.1, np.float32)], {}),
    ("Gelu", 20, [_X], {"approximate": "tanh"}),
    ("Mod", 13, [_ints(-7, 7), _ints(3, -3)], {}),
    ("Div", 13, [_ints(-7, 7), _ints(2, 2)], {}),
    ("Pow", 13, [np.abs(_X), np.array(2, np.int64)], {}),
    ("Max", 13, [_ROWS, np.zeros((1, 8), np.float32), np.full((3, 1), 0.5, np.float32)], {}),
    ("Mean", 13, [_ROWS, np.ones((3, 8), np.float32)], {}),
    ("Where", 13, [_ROWS > 0, _ROWS, np.zeros(1, np.float32)], {}),
    ("Cast", 13, [_ROWS], {"to": TensorProto.INT32}),
    ("Einsum", 13, [_ROWS, _MATRIX], {"equation": "ij,kj->ik"}),
    ("DepthToSpace", 13, [_X[:, :4], ], {"blocksize": 2}),
    ("DepthToSpace", 13, [_X[:, :4]], {"blocksize": 2, "mode": "CRD"}),
    ("Resize", 13, [_X, None, np.array([1, 1, 2, 2], np.float32)], {"mode": "nearest"}),
    ("Resize", 13, [_X, None, None, _ints(2, 6, 13, 21)], {"mode": "linear"}),
    ("LSTM", 14, [_STEPS, *_GATES], {"hidden_size": 3, "direction": "bidirectional"}),
    ("LSTM", 14, [_STEPS, _GATES[0][:1], _GATES[1][:1]], {"hidden_size": 3}),
    ("GRU", 14, [_STEPS, *_GRU], {"hidden_size": 3}),
    ("GRU", 14, [_STEPS, *_GRU], {"hidden_size": 3, "linear_before_reset": 1}),
]  # fmt: skip


_UNARY = (
    "Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "HardSwish", "Identity", "Neg", "Reciprocal", "Relu", "Round",
    "Sigmoid", "Sign", "Sin", "Softplus", "Tanh", "IsNaN", "GlobalAveragePool", "ReduceMin", "Size", "Shape",
)  # fmt: skip
_BINARY = ("Add", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Min", "Mul", "Sub", "Sum", "Div")
_CASES += [(name, 17, [_X], {}) for name in _UNARY]
_CASES += [(name, 17, [np.abs(_X) + 0.5], {}) for name in ("Log", "Sqrt")]
_CASES += [(name, 17, [_ROWS.round(), _ROWS[:1].round() + 0.5], {}) for name in _BINARY]
_CASES += [(name, 17, [_ROWS > 0, _ROWS[:1] > 0.2], {}) for name in ("And", "Or", "Xor")]
_CASES += [
    ("Not", 17, [_ROWS > 0], {}),
    ("Concat", 17, [_ROWS, _ROWS], {"axis": 1}),
    ("MatMul", 17, [_ROWS, _MATRIX.T], {}),
    ("ArgMin", 17, [_ROWS], {"axis": 1}),
    ("LayerNormalization", 17, [_ROWS, _ROWS[0], _ROWS[1]], {}),
]


@pytest.mark.parametrize("case", range(len(_CASES)), ids=[f"{i}-{case[0]}-{case[1]}" for i, case in enumerate(_CASES)])
def test_an_operator_gives_what_onnx_runtime_gives(tmp_path: Path, case: int) -> None:
    op_type, opset, inputs, attributes = _CASES[case]
    outputs = {"Split": 2, "TopK": 2, "LSTM": 3, "GRU": 2}.get(op_type, 1)
    if op_type in ("LSTM", "GRU") and len(inputs) == 4 and attributes.get("direction") is None and op_type == "LSTM":
        inputs = inputs[:3]
    path = tmp_path / "op.onnx"
    feeds = _write(path, op_type, opset, inputs, attributes, outputs)
    _both(path, feeds)


def _write(
    path: Path, op_type: str, opset: int, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int
) -> dict[str, Any]:
    """Write a model of one op whose first input is free and whose other ones are weights; return the first."""
    names = ["" if value is None else f"x{i}" for i, value in enumerate(inputs)]
    weights = [numpy_helper.from_array(value, name) for name, value in zip(names, inputs, strict=True) if name][1:]
    kind = helper.np_dtype_to_tensor_dtype(inputs[0].dtype)
    graph = helper.make_graph(
        [helper.make_node(op_type, names, [f"y{i}" for i in range(outputs)], **attributes)],
        "g",
        [helper.make_tensor_value_info("x0", kind, inputs[0].shape)],
        [helper.make_empty_tensor_value_info(f"y{i}") for i in range(outputs)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return {"x0": inputs[0]}


def test_each_operator_runs_in_a_range_named_after_its_output_and_fixed_values_are_folded(tmp_path: Path) -> None:
    path = build(find_architecture("random_transformer"), tmp_path / "m.onnx")
    opened: list[str] = []

    def opening(name: str) -> Any:
        opened.append(name)
        return nullcontext()

    graph = load_graph(path, 2)
    session = open_session(path, threads=1, provider=TORCH_CPU, ranges=opening)
    session.run(None, random_inputs(graph))
    opened.clear()
    session.run(None, random_inputs(graph))
    assert opened == [f"{NODE_RANGE}{op.outputs[0].name}" for op in graph.ops]


def test_an_operator_without_counterpart_is_named_before_anything_runs(tmp_path: Path) -> None:
    from gpuprof.runtime.torch_session import TorchSession

    path = tmp_path / "m.onnx"
    node = helper.make_node("Det", ["x"], ["y"])
    x, y = helper.make_tensor_value_info("x", FLOAT, [2, 2]), helper.make_tensor_value_info("y", FLOAT, [])
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y])), path)
    with pytest.raises(InputError, match="operators that are not run by PyTorch here: Det"):
        TorchSession(path, 1, TORCH_CPU)


def test_inputs_that_do_not_fit_are_one_clear_line(tmp_path: Path) -> None:
    path = build(find_architecture("mlp"), tmp_path / "m.onnx")
    with pytest.raises(InputError, match="PyTorch refuses the Gemm that makes"):
        open_session(path, threads=1, provider=TORCH_CPU).run(None, {"input": np.zeros((2, 5), np.float32)})


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnavailableError, match="sees no GPU"):
        open_session(build(find_architecture("mlp"), tmp_path / "m.onnx"), threads=1, provider=TORCH_CUDA)


def test_other_shapes_get_a_plan_of_their_own(tmp_path: Path) -> None:
    path = build(find_architecture("random_transformer"), tmp_path / "m.onnx")
    session = open_session(path, threads=1, provider=TORCH_CPU)
    for batch in (1, 3, 1):
        feeds = random_inputs(load_graph(path, batch))
        found = session.run(None, feeds)[0]
        np.testing.assert_allclose(found, open_session(path, threads=1).run(None, feeds)[0], rtol=2e-4, atol=2e-5)


def test_fixed_inputs_lie_where_they_are_read() -> None:
    import torch

    from gpuprof.runtime.torch_session import values_read_by_node

    values = {"six": torch.tensor(6.0), "table": torch.ones(4, 4), "index": torch.tensor([1])}
    nodes = [
        ("Clip", ["x", "", "six"]),
        ("Mul", ["x", "six"]),
        ("Gather", ["table", "index"]),
        ("Slice", ["x", "index"]),
    ]
    found = values_read_by_node(nodes, values, torch.device("meta"))
    assert [{place: value.device.type for place, value in one.items()} for one in found] == [
        {2: "cpu"}, {1: "meta"}, {0: "meta", 1: "meta"}, {1: "cpu"},
    ]  # fmt: skip


def test_why_pytorch_sees_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuprof.runtime.torch_session import torch_gpu_unavailable_reason

    def refuse() -> None:
        raise RuntimeError("MPS client failed to connect\nto the server")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", refuse)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    assert torch_gpu_unavailable_reason() == "MPS client failed to connect; MPS was asked for: /somewhere"


def test_a_gpu_without_memory_to_spare_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from gpuprof.runtime.torch_layers import OPERATORS
    from gpuprof.runtime.torch_session import TorchSession

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")

    session = TorchSession(build(find_architecture("mlp"), tmp_path / "m.onnx"), 1, TORCH_CPU)
    monkeypatch.setitem(OPERATORS, "Gemm", full)
    with pytest.raises(UnavailableError, match=r"fails on the GPU: CUDA out of memory.*2\.00 GiB\. \(try a smaller"):
        session.run(None, {"input": np.zeros((1, 784), np.float32)})


def _chain(path: Path, length: int) -> Path:
    """A chain of products of one large activation, whose bounds follow from weights alone."""
    nodes = [helper.make_node("Add", ["low", "low"], ["lower"])]
    nodes += [helper.make_node("Mul", [f"x{i}", "lower"], [f"x{i + 1}"]) for i in range(length)]
    weights = [numpy_helper.from_array(np.ones(1, np.float32), "low")]
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64]) for name in ("x0", f"x{length}")]
    graph = helper.make_graph(nodes, "chain", info[:1], info[1:], weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_the_first_run_keeps_no_activation_after_its_last_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuprof.runtime.torch_session import TorchSession

    session = TorchSession(_chain(tmp_path / "m.onnx", 40), 1, TORCH_CPU)
    alive: list[int] = []
    execute = session._execute

    def count_alive(node: Any, values: dict[str, Any], *more: Any) -> None:
        execute(node, values, *more)
        alive.append(len(values))

    monkeypatch.setattr(session, "_execute", count_alive)
    x = np.full(64, 1.0, np.float32)
    (first,) = session.run(None, {"x0": x})
    (later,) = session.run(None, {"x0": x})
    assert first.tolist() == later.tolist() == [2.0**40] * 64
    assert max(alive) <= 4  # the input and the output of a node, and two weights; not all 40 activations


def test_what_only_the_first_run_took_is_given_back_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from gpuprof.runtime.torch_session import TorchSession

    returned: list[str] = []
    session = TorchSession(_chain(tmp_path / "m.onnx", 3), 1, TORCH_CPU)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: returned.append("cache"))
    monkeypatch.setattr(session, "_device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(session, "_copy_to_device", torch.from_numpy)
    monkeypatch.setattr("gpuprof.runtime.torch_session.values_read_by_node", lambda nodes, values, device: [
        {place: values[name] for place, name in enumerate(names) if name in values} for _, names in nodes
    ])  # fmt: skip
    for _ in range(3):
        session.run(None, {"x0": np.full(64, 1.0, np.float32)})
    assert returned == ["cache"]  # once a shape, by the run that plans
