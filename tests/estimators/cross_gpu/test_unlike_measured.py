"""Ops like none that was measured: their intervals are wide, their sources name them, turns of a body wait in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper

from gpuprof.domain.catalogue import device as device_named
from gpuprof.domain.estimate import Estimate
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.execution import parse_execution
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.pipeline.estimate import require_sure
from tests.small_models import write_model

WIDTH = 256


def _write(path: Path, nodes: Sequence[NodeProto], dtype: int = TensorProto.FLOAT, turns: int = 1) -> Path:
    weights = {
        "weight": np.ones((WIDTH, WIDTH), helper.tensor_dtype_to_np_dtype(dtype)),
        "few": np.array([8]),
        "turns": np.array(turns),
        "true": np.array(True),
    }
    return write_model(path, nodes, {"x": ["batch", WIDTH]}, {"y": None}, weights, types={"x": dtype, "y": dtype})


def _loop() -> NodeProto:
    body = helper.make_graph(
        [helper.make_node("MatMul", ["state", "weight"], ["next"]), helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    return helper.make_node("Loop", ["turns", "true", "x"], ["y"], body=body)


PRODUCT = helper.make_node("MatMul", ["x", "weight"], ["y"])
UNLIKE = {
    "TopK": [helper.make_node("TopK", ["x", "few"], ["y", "places"])],
    "CumSum": [helper.make_node("CumSum", ["x", "turns"], ["y"])],
    "Einsum": [helper.make_node("Einsum", ["x", "weight"], ["y"], equation="bi,ij->bj")],
    "Loop": [_loop()],
}


def _estimate(path: Path, batch: int = 4, device: str = "h100") -> Estimate:
    return DatabaseEstimator(None, {"net": path}).estimate("net", device_named(device), batch, Share())


@pytest.mark.parametrize("op_type", UNLIKE)
def test_what_was_never_measured_has_a_wide_interval_a_source_that_says_so_and_is_refused_when_strict(
    tmp_path: Path, op_type: str
) -> None:
    estimate = _estimate(_write(tmp_path / "unlike.onnx", UNLIKE[op_type]))
    latency = estimate.latency_ms
    assert f"nothing measured like {op_type}" in latency.source
    assert latency.upper() > 4.0 * latency.value
    assert latency.low is not None and latency.low < latency.value / 4.0
    with pytest.raises(InputError, match="more than 2 times"):
        require_sure(estimate)


def test_a_product_is_like_what_was_measured(tmp_path: Path) -> None:
    latency = _estimate(_write(tmp_path / "product.onnx", [PRODUCT])).latency_ms
    assert "nothing measured" not in latency.source
    assert latency.upper() < 2.0 * latency.value


def test_a_loop_takes_the_longer_the_more_turns_it_makes_for_each_waits_for_the_one_before(tmp_path: Path) -> None:
    few, many = (
        _estimate(_write(tmp_path / f"loop_{turns}.onnx", [_loop()], turns=turns), 1).latency_ms.value
        for turns in (2, 200)
    )
    assert many == pytest.approx(100.0 * few, rel=0.01)
    # A product of its own takes a kernel: two hundred take no less than their launches.
    assert many > 100.0 * _estimate(_write(tmp_path / "product.onnx", [PRODUCT]), 1).latency_ms.value


@pytest.mark.parametrize("device", ["t4", "a10", "h100"])
def test_double_precision_is_computed_at_its_own_rate_and_nobody_is_sure_of_it(tmp_path: Path, device: str) -> None:
    double = _write(tmp_path / "double.onnx", [PRODUCT], TensorProto.DOUBLE)
    single = _write(tmp_path / "single.onnx", [PRODUCT])
    batch = 65536
    compiled = DatabaseEstimator(None, execution=parse_execution(None, "fused"))  # which copies nothing
    gpu = device_named(device)
    twice, once = (compiled.estimate(str(path), gpu, batch, Share()).latency_ms for path in (double, single))
    assert twice.source.startswith("cross-gpu: float64")
    assert twice.value > (1.9 if device == "h100" else 8.0) * once.value
    assert twice.upper() / twice.value > once.upper() / once.value
