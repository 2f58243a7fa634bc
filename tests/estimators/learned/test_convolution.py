"""Which way a convolution is executed on a CPU, held against what ONNX Runtime's optimizer makes of it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gpuprof.estimators.learned.convolution import LANES, computed_flops, is_blocked, unfolded_bytes
from gpuprof.estimators.learned.op_facts import OpFacts, facts_of_op
from gpuprof.graph.load import load_graph
from gpuprof.runtime.optimizer import executed_nodes

_SIDE = 14


def _convolution(path: Path, inputs: int, outputs: int, group: int, window: int, pad: int = 0) -> Path:
    shape = [outputs, inputs // group, window, window]
    weight = TensorProto(name="w", dims=shape, data_type=TensorProto.FLOAT, raw_data=b"\1" * 4 * _product(shape))
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=group, pads=[pad] * 4)
    side = _SIDE + 2 * pad - window + 1
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, inputs, _SIDE, _SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, outputs, side, side])],
        [weight],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def _product(sides: list[int]) -> int:
    number = 1
    for side in sides:
        number *= side
    return number


def _facts(path: Path) -> OpFacts:
    return facts_of_op(load_graph(path).ops[0], 1)


def _has_wide_registers() -> bool:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    return "avx512f" in flags


@pytest.mark.parametrize(
    ("inputs", "outputs", "group", "window"),
    [
        (3, 8, 1, 3), (3, 96, 1, 3), (16, 4, 1, 3), (24, 32, 1, 3), (30, 32, 1, 1), (17, 32, 1, 1), (12, 8, 1, 1),
        (64, 10, 1, 1), (24, 24, 24, 3), (16, 16, 16, 3), (30, 30, 30, 3), (32, 64, 4, 3), (32, 32, 2, 3),
        (64, 64, 2, 1), (48, 48, 4, 1), (28, 28, 2, 3),
    ],
)  # fmt: skip
def test_blocks_are_taken_where_the_runtimes_optimizer_takes_them(
    tmp_path: Path, inputs: int, outputs: int, group: int, window: int
) -> None:
    if group not in (1, inputs) and inputs // group % LANES and not _has_wide_registers():
        pytest.skip("this processor's vector registers are half as wide, and so are its blocks")
    path = _convolution(tmp_path / "one.onnx", inputs, outputs, group, window)
    executed = executed_nodes(path)
    assert executed is not None
    reordered = any("Reorder" in node.op_type for node in executed)  # its result is put back in order
    assert is_blocked(_facts(path)) == reordered


def test_channels_that_do_not_fill_a_block_are_computed_all_the_same(tmp_path: Path) -> None:
    whole = _facts(_convolution(tmp_path / "a.onnx", 32, 32, 1, 3))
    assert computed_flops(whole) == whole.flops
    narrow = _facts(_convolution(tmp_path / "b.onnx", 24, 8, 1, 3))
    assert computed_flops(narrow) == pytest.approx(narrow.flops * 2.0 * 32 / 24)
    coloured = _facts(_convolution(tmp_path / "c.onnx", 3, 8, 1, 3))  # the image itself is read as it stands
    assert computed_flops(coloured) == pytest.approx(2.0 * coloured.flops)


def test_an_input_is_unfolded_only_where_it_is_no_matrix_already_and_channels_are_not_in_blocks(
    tmp_path: Path,
) -> None:
    unfolded = _facts(_convolution(tmp_path / "a.onnx", 32, 64, 4, 3))
    assert unfolded_bytes(unfolded) == 2 * 4 * 12 * 12 * 32 * 9
    assert unfolded_bytes(_facts(_convolution(tmp_path / "b.onnx", 48, 48, 4, 1))) == 0.0
    assert unfolded_bytes(_facts(_convolution(tmp_path / "c.onnx", 48, 48, 4, 1, pad=1))) == 2 * 4 * 16 * 16 * 48
    assert unfolded_bytes(_facts(_convolution(tmp_path / "d.onnx", 32, 64, 1, 3))) == 0.0
