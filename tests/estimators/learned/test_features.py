"""Costs of ops for regressors: convolutions as ONNX Runtime's optimizer executes them, and expected times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.estimators.learned.features import (
    LANES,
    NODE_NS,
    Array,
    OpFacts,
    computed_flops,
    expected_ns,
    facts_of_op,
    is_blocked,
    regressor_features,
    roofline_ns,
    unfolded_bytes,
)
from gpuprof.graph.load import load_graph
from gpuprof.runtime.optimizer import executed_nodes
from tests.estimators.rows import CPU, GPU

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


def test_an_input_is_unfolded_only_where_it_is_no_matrix_already_and_channels_are_not_in_blocks(tmp_path: Path) -> None:
    unfolded = _facts(_convolution(tmp_path / "a.onnx", 32, 64, 4, 3))
    assert unfolded_bytes(unfolded) == 2 * 4 * 12 * 12 * 32 * 9
    assert unfolded_bytes(_facts(_convolution(tmp_path / "b.onnx", 48, 48, 4, 1))) == 0.0
    assert unfolded_bytes(_facts(_convolution(tmp_path / "c.onnx", 48, 48, 4, 1, pad=1))) == 2 * 4 * 16 * 16 * 48
    assert unfolded_bytes(_facts(_convolution(tmp_path / "d.onnx", 32, 64, 1, 3))) == 0.0


CACHED = replace(CPU, reread_bytes_per_s=((2**20, 1e11), (2**25, 5e10), (2**27, 1e10)))
_MATRIX = 1024
DENSE = OpFacts(
    "Gemm", "float32", ((1, _MATRIX), (_MATRIX, _MATRIX)), ((1, _MATRIX),), {}, 2.0 * _MATRIX**2,
    4.0 * (_MATRIX**2 + _MATRIX), 4.0 * _MATRIX, 4.0 * _MATRIX**2, 1,
)  # fmt: skip


def _expected_ns(ops: list[OpFacts], device: Device, share_pct: float = 100.0) -> Array:
    return expected_ns(regressor_features(ops, device, Share(share_pct)))


def test_on_a_cpu_arithmetic_and_traffic_add_up() -> None:
    moved = DENSE.bytes_read + DENSE.bytes_written
    expected = NODE_NS + DENSE.flops / 1e11 * 1e9 + moved / 1e10 * 1e9
    assert _expected_ns([DENSE], CPU)[0] == pytest.approx(expected)


def test_on_a_gpu_the_longer_of_both_is_what_counts() -> None:
    assert _expected_ns([DENSE], GPU)[0] == pytest.approx(NODE_NS + roofline_ns([DENSE], GPU, Share())[0])


def test_weights_come_from_where_all_that_the_model_touches_fits() -> None:
    sizes = (2.0**20, 2.0**25, 2.0**30, float("inf"))
    times = _expected_ns([replace(DENSE, working_set=size) for size in sizes], CACHED)
    bytes_s = (DENSE.bytes_read + DENSE.bytes_written - DENSE.weight_bytes) / 1e11
    rates = (1e11, 5e10, 1e10, 1e10)
    # the op's own traffic is some 4 MiB with its weights: between the first two rates
    between = (
        bytes_s * 1e11 / np.exp(np.interp(np.log(DENSE.bytes_read + 4096), np.log([2**20, 2**25]), np.log(rates[:2])))
    )
    expected = [(DENSE.weight_bytes / rate + between) * 1e9 for rate in rates]
    assert times - NODE_NS - DENSE.flops / 1e11 * 1e9 == pytest.approx(expected)


def test_a_share_has_its_part_of_the_caches_and_of_memory_what_its_cores_can_draw() -> None:
    still = replace(DENSE, flops=0.0)
    near, far = (replace(still, working_set=size) for size in (2.0**20, 2.0**30))
    whole, half = (_expected_ns([near, far], CACHED, pct) - NODE_NS for pct in (100.0, 50.0))
    assert half[0] == pytest.approx(2.0 * whole[0])
    assert half[1] == pytest.approx(whole[1], rel=0.01)  # half of the cores draw all of the bandwidth
