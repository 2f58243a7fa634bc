from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import NodeProto, helper

from gpuprof.merging.batch_rules import OpInput, UnmergeableError, concatenates
from gpuprof.merging.source import Size

Array = npt.NDArray[Any]
_OPSET = 18


def _f(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _u(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(0, 20, shape).astype(np.uint8)


def _i(*values: int) -> Array:
    return np.array(values, np.int64)


def _run(node: NodeProto, inputs: Sequence[Array]) -> list[Array]:
    names = [name for name in node.input if name]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, inputs, strict=True)
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = helper.make_graph([node], "g", infos, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)])
    model.ir_version = 9
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(zip(names, inputs, strict=True))))


def _node(op_type: str, inputs: int, outputs: int = 1, **attributes: Any) -> NodeProto:
    return helper.make_node(op_type, [f"i{k}" for k in range(inputs)], [f"o{k}" for k in range(outputs)], **attributes)


def _sizes_of(array: Array) -> tuple[Size, ...]:
    return tuple(Size(n) for n in array.shape)


_WHOLE = {"MatMulInteger", "QLinearMatMul"}
#: op, attributes, inputs: arrays are shared; of (0, shape of each model's) the first axes are laid end to end.
_CASES: list[tuple[str, dict[str, Any], list[object]]] = [
    ("Relu", {}, [(0, (2, 3), (4, 3))]),
    ("Add", {}, [(0, (2, 3, 4), (1, 3, 4)), _f(3, 4)]),
    ("MatMul", {}, [(0, (2, 3, 4), (3, 3, 4)), _f(4, 5)]),
    ("MatMul", {}, [(0, (2, 3, 4), (3, 3, 4)), (0, (2, 4, 6), (3, 4, 6))]),
    ("MatMul", {}, [_f(5, 3), (0, (2, 3, 4), (3, 3, 4))]),
    ("Gemm", {"transB": 1}, [(0, (2, 4), (3, 4)), _f(5, 4), _f(5)]),
    ("Conv", {"pads": [1, 1, 1, 1]}, [(0, (2, 3, 5, 5), (1, 3, 5, 5)), _f(4, 3, 3, 3), _f(4)]),
    ("ConvTranspose", {}, [(0, (2, 3, 5, 5), (1, 3, 5, 5)), _f(3, 4, 3, 3)]),
    ("MaxPool", {"kernel_shape": [2, 2]}, [(0, (2, 3, 4, 4), (1, 3, 4, 4))]),
    ("GlobalAveragePool", {}, [(0, (2, 3, 4, 4), (1, 3, 4, 4))]),
    ("BatchNormalization", {}, [(0, (2, 3, 4), (1, 3, 4)), _f(3), _f(3), _f(3), np.abs(_f(3)) + 1]),
    ("InstanceNormalization", {}, [(0, (2, 3, 4), (1, 3, 4)), _f(3), _f(3)]),
    ("Softmax", {"axis": -1}, [(0, (2, 3), (1, 3))]),
    ("Flatten", {"axis": 1}, [(0, (2, 3, 4), (5, 3, 4))]),
    ("Slice", {}, [(0, (2, 5), (4, 5)), _i(1), _i(3), _i(1)]),
    ("Gather", {"axis": 1}, [(0, (2, 5, 3), (4, 5, 3)), np.array([[0, 2], [1, 1]])]),
    ("ReduceSum", {"keepdims": 1}, [(0, (3, 2, 4), (2, 2, 4)), _i(-1)]),
    ("ReduceSum", {"noop_with_empty_axes": 1}, [(0, (3, 2), (2, 2))]),
    ("Concat", {"axis": 1}, [(0, (2, 3), (1, 3)), (0, (2, 4), (1, 4))]),
    ("Split", {"axis": 1, "num_outputs": 2}, [(0, (2, 4), (1, 4))]),
    ("CumSum", {}, [(0, (2, 4), (1, 4)), np.array(1)]),
    ("TopK", {"axis": -1}, [(0, (2, 4), (1, 4)), _i(2)]),
    ("Pad", {}, [(0, (2, 3), (4, 3)), _i(0, 1, 0, 2)]),
    ("Tile", {}, [(0, (2, 3), (4, 3)), _i(1, 2)]),
    ("Resize", {"mode": "nearest"}, [(0, (2, 1, 3, 3), (1, 1, 3, 3)), "", np.array([1, 1, 2, 2], np.float32)]),
    ("DepthToSpace", {"blocksize": 2}, [(0, (2, 4, 2, 2), (1, 4, 2, 2))]),
    ("QuantizeLinear", {}, [(0, (2, 3), (4, 3)), np.array(0.1, np.float32), np.array(3, np.uint8)]),
    ("Where", {}, [(0, (2, 3), (1, 3)), (0, (2, 3), (1, 3)), np.zeros(1, np.float32)]),
    ("Einsum", {"equation": "bij,bjk->bik"}, [(0, (2, 3, 4), (3, 3, 4)), (0, (2, 4, 2), (3, 4, 2))]),
    ("Expand", {}, [(0, (2, 1, 4), (3, 1, 4)), _i(1, 5, 4)]),
    ("MatMulInteger", {}, [(0, (2, 3, 4), (1, 3, 4)), _u(4, 5), np.array(3, np.uint8), _u(5)]),
    ("Clip", {}, [(0, (2, 3), (1, 3)), np.array(0, np.float32), np.array(1, np.float32)]),
    ("Transpose", {"perm": [0, 2, 1]}, [(0, (2, 3, 4), (5, 3, 4))]),
    ("Squeeze", {}, [(0, (2, 1, 3), (1, 1, 3)), _i(1)]),
    ("Unsqueeze", {}, [(0, (2, 3), (4, 3)), _i(1, 3)]),
    ("ReduceMean", {"keepdims": 0}, [(0, (3, 2, 4), (5, 2, 4)), _i(1)]),
    ("ArgMax", {"axis": 1, "keepdims": 0}, [(0, (3, 2), (5, 2))]),
    ("Einsum", {"equation": "bij,jk->bki"}, [(0, (2, 3, 4), (3, 3, 4)), _f(4, 5)]),
    ("LayerNormalization", {"axis": -1}, [(0, (2, 3, 4), (1, 3, 4)), _f(4), _f(4)]),
    ("QLinearMatMul", {}, [(0, (2, 3, 4), (1, 3, 4)), np.array(0.1, np.float32), np.array(2, np.uint8), _u(4, 5),
                           np.array(0.2, np.float32), np.array(1, np.uint8), np.array(2, np.float32),
                           np.array(0, np.uint8)]),
]  # fmt: skip


@pytest.mark.parametrize(("op_type", "attributes", "inputs"), _CASES, ids=[f"{c[0]}{i}" for i, c in enumerate(_CASES)])
def test_the_op_of_the_concatenation_is_the_concatenation_of_the_ops(
    op_type: str, attributes: dict[str, Any], inputs: list[object]
) -> None:
    outputs = {"Split": 2, "TopK": 2, "LSTM": 3, "GRU": 2}.get(op_type, 1)
    node = _node(op_type, len(inputs), outputs, **attributes)
    slots: list[OpInput | None] = []
    single: list[list[Array]] = [[], []]
    together: list[Array] = []
    for k, given in enumerate(inputs):
        if isinstance(given, str):
            node.input[k] = ""
            slots.append(None)
        elif isinstance(given, tuple):
            axis, *shapes = given
            parts = [_u(*shape) if op_type in _WHOLE else _f(*shape) for shape in shapes]
            if op_type == "Where" and k == 0:
                parts = [part > 0 for part in parts]
            slots.append(OpInput(True, tuple(_sizes_of(part) for part in parts)))
            for one, part in zip(single, parts, strict=True):
                one.append(part)
            together.append(np.concatenate(parts, axis))
        else:
            assert isinstance(given, np.ndarray)
            slots.append(OpInput(False, (_sizes_of(given), _sizes_of(given)), given))
            for one in (*single, together):
                one.append(given)
    alone = [_run(node, one) for one in single]
    assert concatenates(node, slots, _OPSET)
    for whole, *apart in zip(_run(node, together), *alone, strict=True):
        np.testing.assert_allclose(whole, np.concatenate(apart), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op_type", "attributes", "inputs"),
    [
        ("Mul", {}, [_f(2, 1, 1), (0, (3, 4), (5, 4))]),
        ("Softmax", {"axis": 0}, [(0, (2, 3), (1, 3))]),
        ("ReduceMean", {}, [(0, (2, 3), (1, 3))]),
        ("ReduceMean", {}, [(0, (2, 3), (1, 3)), _i(0)]),
        ("Add", {}, [(0, (2, 3), (2, 3)), _f(2, 3)]),
        ("Add", {}, [(0, (2, 3), (2, 3)), (0, (1, 3), (1, 3))]),
        ("Concat", {"axis": 0}, [(0, (2, 3), (1, 3)), (0, (2, 3), (1, 3))]),
        ("Gather", {"axis": 0}, [(0, (2, 3), (1, 3)), np.array([0])]),
        ("Slice", {}, [(0, (2, 5), (4, 5)), _i(1), _i(2)]),
        ("CumSum", {}, [(0, (2, 4), (1, 4)), np.array(0)]),
        ("Tile", {}, [(0, (2, 3), (4, 3)), _i(2, 1)]),
        ("Pad", {}, [(0, (2, 3), (4, 3)), _i(1, 0, 0, 0)]),
        ("DynamicQuantizeLinear", {}, [(0, (2, 3), (4, 3))]),
        ("RandomNormalLike", {}, [(0, (2, 3), (4, 3))]),
        ("Squeeze", {}, [(0, (1, 3), (1, 3))]),
        ("Einsum", {"equation": "bi->i"}, [(0, (2, 3), (4, 3))]),
        ("Einsum", {"equation": "bi,bj->bij"}, [(0, (2, 3), (4, 3)), _f(2, 3)]),
        ("Einsum", {"equation": "...i->...i"}, [(0, (2, 3), (4, 3))]),
        ("Expand", {}, [(0, (1, 3), (1, 3)), _i(4, 3)]),
        ("QLinearMatMul", {}, [(0, (2, 3), (4, 3)), _f(2), _u(2), _u(3, 5), _f(1), _u(1), _f(1), _u(1)]),
        ("MatMulInteger", {}, [(0, (2, 3), (4, 3)), _u(3, 5), _u(2)]),
        ("Transpose", {"perm": [1, 2, 0]}, [(0, (2, 3, 4), (5, 3, 4))]),
        ("Transpose", {}, [(0, (2, 3, 4), (5, 3, 4))]),
        ("Unsqueeze", {}, [(0, (2, 3), (4, 3)), _i(0, 2)]),
        ("Einsum", {"equation": "bij,jk->kbi"}, [(0, (2, 3, 4), (3, 3, 4)), _f(4, 5)]),
        ("Expand", {}, [(0, (2, 4), (3, 4)), _i(3, 1, 4)]),
        ("MatMul", {}, [(0, (4, 3), (2, 3)), (0, (3, 4), (3, 4))]),
        ("MatMul", {}, [(0, (4, 3), (2, 3)), _f(2, 3, 5)]),
        ("Gemm", {"transA": 1}, [(0, (4, 2), (3, 2)), _f(4, 5)]),
        ("Squeeze", {}, [(0, (1, 3), (1, 3)), _i(0)]),
        ("Add", {}, [(0, (2, 3), (2, 3)), (0, (2, 2, 3), (2, 2, 3))]),
    ],
)
def test_an_op_that_mixes_what_is_concatenated_is_refused(
    op_type: str, attributes: dict[str, Any], inputs: list[object]
) -> None:
    slots: list[OpInput | None] = []
    for given in inputs:
        if isinstance(given, tuple):
            slots.append(OpInput(True, tuple(tuple(Size(n) for n in shape) for shape in given[1:])))
        else:
            assert isinstance(given, np.ndarray)
            slots.append(OpInput(False, (_sizes_of(given), _sizes_of(given)), given))
    with pytest.raises(UnmergeableError):
        concatenates(_node(op_type, len(inputs), **attributes), slots, _OPSET)


def test_softmax_of_old_opsets_sums_over_all_axes_behind_its_own() -> None:
    dims = (tuple(Size(n) for n in (2, 3, 4)),) * 2
    assert concatenates(_node("Softmax", 1, axis=1), [OpInput(True, dims)], 12)
    assert concatenates(_node("Softmax", 1), [OpInput(True, dims)], 12)
    with pytest.raises(UnmergeableError):
        concatenates(_node("Softmax", 1, axis=0), [OpInput(True, dims)], 12)


def test_what_all_inputs_share_is_shared() -> None:
    value = _f(2, 3)
    assert not concatenates(_node("Relu", 1), [OpInput(False, (_sizes_of(value),) * 2, value)], _OPSET)
