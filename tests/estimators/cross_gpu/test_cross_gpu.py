"""Estimates for GPUs without measurements: physical, in proportion, with their precision and runtime in the source."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from bench.op_training import train
from bench.published_ops import MeasuredOps, make_table, product_table
from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.cross_gpu import TENTHS, LatencyGrid, shipped_model
from gpuprof.estimators.cross_gpu.features import (
    FAMILIES,
    Array,
    CostModel,
    DeviceRates,
    OpTable,
    bound_times,
    rates_of,
    regressor_names,
)
from gpuprof.estimators.cross_gpu.kernels import KernelsByBatch, LaunchMode, list_kernels, parse_execution
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.graph.load import load_graph
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build
from tests.small_models import Dims, write_model

GPUS = ("t4", "v100", "a10", "a100-80", "l4", "h100", "b200", "rtx-4090")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cross_gpu") / "transformer_encoder.onnx"
    build(find_architecture("transformer_encoder"), path)
    return path


def _products(count: int, seed: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    return tuple(np.exp2(random.uniform(0, top, count)).round() for top in (6, 13, 13, 12))


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("precision", ["float32", "tfloat32", "float16", "float8"])
def test_no_op_is_faster_than_the_peaks_of_the_data_sheet(name: str, precision: str) -> None:
    if precision not in device(name).flops_per_s:
        return
    b, m, n, k = _products(300, 1)
    rates = rates_of(device(name), precision)
    for family in range(len(FAMILIES)):
        ops = product_table(b, m, n, k, 4.0, 4.0, 0.0)
        ops = replace(ops, family=np.full(300, family), row=n, kernel=np.ones(300), stride=np.ones(300))
        seconds = shipped_model().kernel_times(ops, rates)
        assert np.isfinite(seconds).all()
        assert (seconds >= bound_times(ops, rates).hard_s * (1 - 1e-9)).all()


def test_the_source_says_precision_and_runtime(network: Path) -> None:
    default = DatabaseEstimator(None).estimate(str(network), device("a100-80"), 8, Share())
    assert default.latency_ms.source == "cross-gpu: tfloat32, onnxruntime, never compared on this board"
    chosen = DatabaseEstimator(None, execution=parse_execution("float16", "eager"))
    assert (
        chosen.estimate(str(network), device("a100-80"), 8, Share()).latency_ms.source
        == "cross-gpu: float16, pytorch-eager"
    )


def test_a_gpu_without_tf32_multiplies_in_float32(network: Path) -> None:
    estimate = DatabaseEstimator(None).estimate(str(network), device("v100"), 8, Share())
    assert estimate.latency_ms.source.startswith("cross-gpu: float32, onnxruntime")


def test_a_precision_that_the_gpu_lacks_is_refused(network: Path) -> None:
    estimator = DatabaseEstimator(None, execution=parse_execution("fp8", None))
    with pytest.raises(InputError, match="a100-80 has no float8 arithmetic"):
        estimator.estimate(str(network), device("a100-80"), 8, Share())


@pytest.mark.parametrize("words", [("float99", None), (None, "lazy")])
def test_words_that_are_no_precision_or_runtime_are_refused(words: tuple[str | None, str | None]) -> None:
    with pytest.raises(InputError, match="choose one of"):
        parse_execution(*words)


def test_kernels_of_a_large_batch_follow_from_those_of_small_ones(network: Path) -> None:
    by_batch = KernelsByBatch(lambda batch: load_graph(network, batch), "float32", LaunchMode.EAGER)
    read = list_kernels(load_graph(network, 48), "float32", LaunchMode.EAGER)
    predicted = by_batch.at(48)
    assert predicted.op_types == read.op_types
    assert predicted.ops.flops == pytest.approx(read.ops.flops)
    assert predicted.ops.bytes_moved == pytest.approx(read.ops.bytes_moved)


def test_more_work_takes_longer_and_a_smaller_instance_too(network: Path) -> None:
    estimator, a100 = DatabaseEstimator(None), device("a100-80")
    by_batch = [estimator.estimate(str(network), a100, batch, Share()).latency_ms.value for batch in (1, 64, 1024)]
    assert by_batch == sorted(by_batch)
    shares: Sequence[Share] = (Share(), Share(100.0, "3g.40gb"), Share(100.0, "1g.10gb"))
    by_share = [estimator.estimate(str(network), a100, 1024, share).latency_ms.value for share in shares]
    assert by_share == sorted(by_share)


def test_a_gpu_of_the_same_kind_with_a_lower_power_limit_is_slower() -> None:
    t4, side = device("t4"), np.full(1, 8192.0)
    large = product_table(np.ones(1), side, side, side, 4.0, 4.0, 0.0)
    times = [
        shipped_model().kernel_times(large, rates_of(replace(t4, max_power_w=watts), "float32"))[0]
        for watts in (120.0, 70.0, 50.0)
    ]
    assert times == sorted(times) and times[-1] > 1.2 * times[0]


@pytest.mark.slow
def test_nothing_of_an_excluded_gpu_is_learned() -> None:
    rows = 3000
    b, m, n, k = _products(rows, 2)
    ops = product_table(np.ones(rows), b * m, n, k, 4.0, 4.0, 0.0)
    names = np.array(["v100", "a100-pcie-80", "a100-pcie-40"])[np.arange(rows) % 3]
    slow = np.where(names == "v100", 2.0, 50.0)
    bounds = {name: bound_times(ops, rates_of(device(name), "float32")).expected_s for name in set(names.tolist())}
    seconds = slow * np.choose(np.arange(rows) % 3, [bounds[name] for name in ("v100", "a100-pcie-80", "a100-pcie-40")])
    measured = MeasuredOps("gemm", "float32", ops, seconds + 1e-5, names, np.full(rows, "train"), kernels_only=True)
    from gpuprof.estimators.cross_gpu.features import CostModel, Forests

    trained = train([measured], excluded="a100", rounds=40)
    rates = rates_of(device("a100-pcie-80"), "float32")
    large = make_table("matmul", 1, m=8192, n=8192, k=4096, flops=2.0 * 8192**2 * 4096, read_bytes=2e8, width=4.0)
    ratio = CostModel(Forests(trained.models)).kernel_times(large, rates) / bound_times(large, rates).expected_s
    assert 1.5 < ratio[0] < 3.0


def test_convolutions_that_nobody_measured_are_estimated_as_the_products_that_they_are() -> None:
    rates = rates_of(device("v100"), "float32")
    sizes = {"m": 1e5, "n": 256.0, "k": 256.0, "flops": 2e5 * 256.0**2, "width": 4.0, "read_bytes": 1e8}
    pointwise = make_table("conv", 1, **sizes, kernel=1.0, stride=1.0, image=28.0)
    product = make_table("matmul", 1, **sizes)
    assert regressor_names(pointwise, rates).tolist() == ["matmul_cores"]
    assert shipped_model().kernel_times(pointwise, rates) == pytest.approx(shipped_model().kernel_times(product, rates))
    kinds = {(3.0, 1.0): "conv_cores", (3.0, 2.0): "matmul_cores", (7.0, 2.0): "matmul_cores"}
    for (kernel, stride), name in kinds.items():
        table = make_table("conv", 1, **sizes, kernel=kernel, stride=stride, image=28.0)
        assert regressor_names(table, rates).tolist() == [name]


def _convolve(groups: float, channels: float, precision: str) -> float:
    pixels, bytes_moved = 50176.0, 4e7
    sizes = {"b": groups, "m": pixels, "n": channels, "k": 9.0 * channels, "kernel": 3.0, "stride": 1.0, "image": 14.0}
    flops = 2.0 * groups * pixels * channels * 9.0 * channels
    ops = make_table("conv", 1, **sizes, flops=flops, read_bytes=bytes_moved, written_bytes=bytes_moved, width=2.0)
    return float(shipped_model().kernel_times(ops, rates_of(device("a30"), precision))[0])


def test_groups_that_are_no_power_of_two_take_twice_as_long_on_tensor_cores_alone() -> None:
    assert _convolve(24.0, 24.0, "float16") > 1.5 * _convolve(18.0, 32.0, "float16")
    assert _convolve(1.0, 24.0, "float16") < 1.1 * _convolve(1.0, 32.0, "float16")
    assert _convolve(24.0, 24.0, "float32") < 1.1 * _convolve(18.0, 32.0, "float32")


_SHARES = [Share(), *(Share(2.5 * step) for step in (1, 4, 7, 20, 33)), Share(50.0, "2g.20gb"), Share(100.0, "1g.10gb")]


@pytest.fixture(scope="module", params=["squeezenet", "transformer_encoder"])
def drawn_network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("networks") / "network.onnx"
    build(find_architecture(request.param), path)
    return path


def _kernels(path: Path, runtime: LaunchMode) -> KernelsByBatch:
    return KernelsByBatch(lambda batch: load_graph(path, batch), "tfloat32", runtime)


@pytest.mark.parametrize("runtime", [LaunchMode.ONNXRUNTIME, LaunchMode.FUSED])
def test_all_shares_and_batches_together_are_each_by_itself(drawn_network: Path, runtime: LaunchMode) -> None:
    kernels, gpu, batches = _kernels(drawn_network, runtime), device("a100-80"), (1, 2, 3, 24, 256)
    together = shipped_model().latencies(kernels, batches, gpu, _SHARES)
    for share in _SHARES:
        for batch in batches:
            alone = shipped_model().latency(kernels.at(batch), gpu, share, "tfloat32", runtime)
            latency = together[share][batch]
            assert latency.source == alone.source
            assert (latency.value, latency.low, latency.high) == pytest.approx(
                (alone.value, alone.low, alone.high), rel=1e-9
            )


@pytest.mark.parametrize("is_linear", [True, False])
def test_a_batch_takes_no_less_than_a_smaller_one(tmp_path: Path, is_linear: bool) -> None:
    nodes = [helper.make_node("Relu", [f"t{step}"], [f"t{step + 1}"]) for step in range(128)]
    inputs: dict[str, Dims] = {"t0": ["batch", 1024]}
    if not is_linear:  # whole numbers are no kernel while they are few
        nodes.append(helper.make_node("Add", ["ids", "ids"], ["z"]))
        inputs["ids"] = ["batch", 32]
    types = {"ids": TensorProto.INT64, "z": TensorProto.INT64}
    path = write_model(tmp_path / "m.onnx", nodes, inputs, {"t128": None}, types=types)
    gpu, batches = device("t4"), (1, 2, 3, 4, 5, 6, 8, 12, 16, 64, 200)
    kernels = KernelsByBatch(lambda batch: load_graph(path, batch), "float32", LaunchMode.FUSED)
    alone = [
        shipped_model().latency(kernels.at(batch), gpu, Share(), "float32", LaunchMode.FUSED).value for batch in batches
    ]
    assert (6 in kernels.list_grid(8)) == is_linear
    assert sorted(alone) != alone, "nothing to mend: take another graph"
    latencies = LatencyGrid(kernels, gpu, shipped_model()).series(Share(), batches)
    values = [latency.value for latency in latencies]
    assert values == pytest.approx(sorted(values), rel=1e-12)  # sums are rounded
    assert all(
        latency.low < latency.value < latency.high
        for latency in latencies
        if latency.low is not None and latency.high is not None
    )


def test_the_only_batch_that_a_model_takes_is_predicted_itself(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": [6, 1024]}, {"y": [6, 1024]})
    kernels = KernelsByBatch(lambda batch: load_graph(path, batch), "float32", LaunchMode.FUSED)
    assert kernels.grid(6) == (6,)
    assert kernels.list_grid(8) == ()
    assert LatencyGrid(kernels, device("t4"), shipped_model()).at(Share(), 6).value > 0.0


@pytest.mark.parametrize("gpu", ["v100", "a100-80"])
def test_a_share_takes_no_less_than_a_larger_one(tmp_path: Path, gpu: str) -> None:
    # Depthwise convolutions of few channels: what was learned of small kernels makes half of the SMs look quicker.
    depthwise = [helper.make_node("Conv", [f"t{layer}", "w"], [f"t{layer + 1}"], group=64) for layer in range(16)]
    weights = {"w": np.ones((64, 1, 1, 1), np.float32)}
    path = write_model(tmp_path / "m.onnx", depthwise, {"t0": ["batch", 64, 14, 14]}, {"t16": None}, weights)
    precision = "float32" if gpu == "v100" else "tfloat32"
    kernels = KernelsByBatch(lambda batch: load_graph(path, batch), precision, LaunchMode.FUSED)
    board, parts, batches = device(gpu), (10.0, 20.0, 25.0, 50.0, 75.0, 100.0), (1, 2, 4, 8, 32)
    alone = {
        (part, batch): shipped_model().latency(kernels.at(batch), board, Share(part), precision, LaunchMode.FUSED).value
        for part in parts
        for batch in batches
    }
    assert any(alone[part, batch] < alone[100.0, batch] for part in parts for batch in batches), "nothing to mend"
    grid = LatencyGrid(kernels, board, shipped_model())
    for batch in batches:
        values = [grid.at(Share(part), batch).value for part in parts]
        assert values == pytest.approx(sorted(values, reverse=True), rel=1e-12)
        if board.mig_slices:
            assert grid.at(Share(100.0, "4g.40gb"), batch).value >= values[-1] * (1 - 1e-12)


def test_what_a_plan_asks_for_is_predicted_together(drawn_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    kernel_times = CostModel.kernel_times

    def count(costs: CostModel, ops: OpTable, rates: DeviceRates) -> Array:
        asked.append(len(ops))
        return kernel_times(costs, ops, rates)

    monkeypatch.setattr(CostModel, "kernel_times", count)
    grid = LatencyGrid(_kernels(drawn_network, LaunchMode.ONNXRUNTIME), device("a100-80"), shipped_model())
    for parts in ((100.0,), TENTHS, [2.5 * step for step in range(1, 41)]):
        for part in parts:
            for batch in (1, 8, 24, 256):
                grid.at(Share(part), batch)
    assert len(asked) == 3
