"""Intervals of unmeasured GPUs: by kinds of ops and parts of a model's time; what was compared with measurements."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper

from bench.ledger import PAGE, read_table
from bench.published_ops import make_table
from bench.unseen_intervals import widen_ops
from gpuprof.domain.catalogue import device
from gpuprof.domain.catalogue import device as device_named
from gpuprof.domain.estimate import Estimate
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.conformal import common_factor, interval_factor, left_out_residuals
from gpuprof.estimators.cross_gpu import cross_gpu
from gpuprof.estimators.cross_gpu.cross_gpu import (
    ErrorScales,
    TimeParts,
    list_compared_boards,
    name_kinds,
)
from gpuprof.estimators.cross_gpu.features import stack_tables
from gpuprof.estimators.cross_gpu.kernels import LaunchMode, parse_execution
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.pipeline.estimate import require_sure
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build
from tests.small_models import write_model

SCALES = ErrorScales(
    ops={"product": 0.2, "softmax": 0.4},
    op_factors={"": 1.0, " old": 2.0},
    model_factors={"any": 1.0, "any old": 3.0, "products cores": 0.5},
    host=0.7,
)


def test_kinds_tell_products_by_their_operands_and_by_what_they_run_on() -> None:
    ops = stack_tables(
        [
            make_table("matmul", 1),
            make_table("matmul", 1, extra=1.0),
            make_table("conv", 1),
            make_table("movement", 1),
            make_table("attention", 1, m=1.0, n=64.0),
            make_table("attention", 1, m=64.0, n=64.0, causal=1.0),
            make_table("attention", 1, m=64.0, n=64.0, row=64.0),
        ]
    )
    assert name_kinds(ops, tensor=False).tolist() == [
        "product", "batched product", "conv", "elementwise", "generation", "context", "batched product",
    ]  # fmt: skip
    wide, narrow = (name_kinds(replace(ops, width=np.full(7, width)), tensor=True)[:3] for width in (2.0, 1.0))
    assert set(wide) == {"product tensor"} and set(narrow) == {"product narrow"}


def test_ops_are_widened_by_the_scale_of_their_kind_and_the_generation() -> None:
    kinds = np.array(["product", "softmax", "never measured"])
    assert widen_ops(SCALES, kinds, "") == pytest.approx([0.2, 0.4, 0.4])
    assert widen_ops(SCALES, kinds, " old") == pytest.approx([0.4, 0.8, 0.8])


def test_a_model_is_widened_by_the_mean_scale_of_its_kernels() -> None:
    parts = TimeParts(1.0, 0.0, {"product": 0.75, "softmax": 0.25})
    for kind, generation, factor in (
        ("products cores", "", 0.5), ("convolutions cores", "", 1.0), ("products cores", " old", 3.0)
    ):  # fmt: skip
        assert np.log(SCALES.widen_model(parts, kind, generation)) == pytest.approx((-factor * 0.25, factor * 0.25))


def test_errors_of_ops_are_not_taken_to_cancel_where_nothing_was_compared() -> None:
    parts = TimeParts(1.0, 0.0, {"product": 1.0})
    scales = replace(SCALES, op_factors={"": 1.5, " old": 4.0})
    for kind, generation, compared, never in (
        ("products cores", "", 0.5, 1.5),
        ("products cores", " old", 3.0, 4.0),
        ("convolutions cores", "", 1.5, 1.5),
    ):
        for is_compared, factor in ((True, compared), (False, never)):
            widened = scales.widen_model(parts, kind, generation, is_compared=is_compared)
            assert np.log(widened) == pytest.approx((-factor * 0.2, factor * 0.2))


def test_where_the_host_takes_longer_its_own_scale_counts() -> None:
    host = TimeParts(0.1, 1.0, {"product": 0.1})
    high = np.hypot(0.1, np.exp(0.7))
    assert SCALES.widen_model(host, "products cores", "") == pytest.approx((np.exp(-0.7), high))
    named = SCALES.widen_model(host, "products cores", "", named_host=True)
    assert named == pytest.approx((np.exp(-0.1), np.hypot(0.1, np.exp(0.1))))


def test_only_one_of_host_and_kernels_is_at_its_limit_at_the_upper_end() -> None:
    wide = replace(SCALES, model_factors=dict.fromkeys(SCALES.model_factors, 2.5))
    for kernels_s, host_s, high in (
        (1.0, 0.2, np.hypot(np.exp(0.5), 0.2)),
        (1.0, 0.9, np.hypot(1.0, 0.9 * np.exp(0.7))),
    ):
        parts = TimeParts(kernels_s, host_s, {"product": 1.0})
        assert wide.widen_model(parts, "products cores", "") == pytest.approx((np.exp(-0.5), high))
    odd = replace(TimeParts(1.0, 0.0, {"product": 1.0}), excess=3.0)
    assert SCALES.widen_model(odd, "products cores", "") == pytest.approx((np.exp(-0.1) / 4.0, np.exp(0.1) + 3.0))


def test_intervals_that_are_not_those_that_ship_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cross_gpu"
    shutil.copytree(str(cross_gpu.trained_folder()), folder)
    path = folder / "intervals.json"
    path.write_text("{}")
    monkeypatch.setattr(cross_gpu, "trained_folder", lambda: folder)
    with pytest.raises(InputError, match=r"intervals\.json is not the file that was trained"):
        cross_gpu.shipped_model.__wrapped__()


def test_shipped_intervals_are_wider_before_volta_and_know_every_kind_of_kernel() -> None:
    scales = cross_gpu.shipped_model().scales
    assert scales.op_factors[" old"] > scales.op_factors[""] > 0.5
    kinds = {"product", "batched product", "conv", "elementwise", "norm", "softmax", "product tensor", "product narrow"}
    assert kinds | {"context", "generation", "encoder"} == set(scales.ops)
    assert all(0.02 < scale < 2.0 for scale in scales.ops.values())


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("evidence") / "transformer_encoder.onnx"
    build(find_architecture("transformer_encoder"), path)
    return str(path)


def _source(network: str, gpu: str, precision: str, runtime: str) -> str:
    estimator = DatabaseEstimator(None, execution=parse_execution(precision, runtime))
    return estimator.estimate(network, device(gpu), 8, Share()).latency_ms.source


def test_an_estimate_names_what_was_never_compared(network: str) -> None:
    assert _source(network, "t4", "float16", "onnxruntime") == "cross-gpu: float16, onnxruntime"
    assert _source(network, "h100", "float16", "onnxruntime").endswith(", never compared on this board")
    assert _source(network, "t4", "int8", "tensorrt").endswith("tensorrt, never compared")


def test_what_was_never_compared_anywhere_has_the_wider_interval(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def width() -> float:
        estimator = DatabaseEstimator(None, execution=parse_execution("float32", "pytorch-eager"))
        figure = estimator.estimate(network, device("t4"), 256, Share()).latency_ms
        return figure.upper() / figure.value

    compared = width()
    monkeypatch.setattr(cross_gpu, "_read_compared", dict)
    assert width() > 1.1 * compared


def test_the_fusion_of_attention_matters_in_half_precision_alone() -> None:
    fused, plain = LaunchMode.EAGER_FUSED, LaunchMode.EAGER
    assert list_compared_boards(fused, "float32", "products") == list_compared_boards(plain, "float32", "products")
    assert list_compared_boards(fused, "float16", "products") != list_compared_boards(plain, "float16", "products")


def test_every_line_of_the_ledger_is_among_what_was_compared() -> None:
    lines = read_table(PAGE.read_text(encoding="utf-8"))
    assert lines
    for line in lines:
        runtime, precision, board, _ = line.name.partition(": ")[2].split(", ")
        compared = [list_compared_boards(LaunchMode(runtime), precision, kind) for kind in ("products", "convolutions")]
        assert any(board in boards for boards in compared), line.name


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
def test_what_was_never_measured_has_a_wide_interval_and_is_refused_when_strict(tmp_path: Path, op_type: str) -> None:
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


def test_the_common_factor_counts_architectures_and_not_figures() -> None:
    assert common_factor({"often": [9.0] * 100, "a": [2.0], "b": [1.0, 3.0, 100.0]}) == 3.0


def test_an_architecture_is_held_against_the_others() -> None:
    residuals = left_out_residuals({"a": [2.0], "b": [2.0, 4.0], "odd": [20.0]})
    assert residuals["odd"] == [pytest.approx(math.log(20.0 / 2.5))]
    assert residuals["b"] == pytest.approx([math.log(2.0 / 11.0), math.log(4.0 / 11.0)])


def test_nine_of_ten_figures_of_a_new_architecture_are_inside() -> None:
    random = np.random.default_rng(3)
    inside = []
    for _ in range(400):
        middles = np.exp(random.normal(0.0, 0.8, 31))
        ratios = {str(i): list(middle * np.exp(random.normal(0.0, 0.2, 4))) for i, middle in enumerate(middles)}
        new = ratios.pop("30")
        spread, factor = interval_factor(left_out_residuals(ratios)), common_factor(ratios)
        assert spread is not None
        inside += [1.0 / spread <= value / factor <= spread for value in new]
    assert 0.88 <= np.mean(inside) <= 0.95
