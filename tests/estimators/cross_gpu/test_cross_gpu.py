"""Estimates for GPUs without measurements: physical, in proportion, with their precision and runtime in the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.op_training import train
from bench.published_ops import MeasuredOps, attention_table, product_table
from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.cross_gpu import shipped_model
from gpuprof.estimators.cross_gpu.execution import parse_execution
from gpuprof.estimators.cross_gpu.features import (
    FAMILIES,
    OpTable,
    bound_times,
    make_table,
    preparation_names,
    regressor_names,
)
from gpuprof.estimators.cross_gpu.kernels import KernelsByBatch, LaunchMode, list_kernels
from gpuprof.estimators.cross_gpu.rates import rates_of
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.graph.load import load_graph
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build

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
    from gpuprof.estimators.cross_gpu.cost_model import CostModel

    trained = train([measured], excluded="a100", rounds=40)
    rates = rates_of(device("a100-pcie-80"), "float32")
    large = make_table("matmul", 1, m=8192, n=8192, k=4096, flops=2.0 * 8192**2 * 4096, read_bytes=2e8, width=4.0)
    ratio = CostModel.of_files(trained.models, {}).kernel_times(large, rates) / bound_times(large, rates).expected_s
    assert 1.5 < ratio[0] < 3.0


def _attention(queries: float, framework: float) -> OpTable:
    ones = np.ones(1)
    return attention_table(
        ones, 8 * ones, 8 * ones, queries * ones, 64 * ones, 64 * ones,
        causal=queries > 1, key_bytes=2.0, framework=framework * ones,
    )  # fmt: skip


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


def test_attention_of_one_query_is_generation_and_only_attention_and_eight_bits_are_prepared() -> None:
    assert preparation_names(_attention(1.0, 2.0)).tolist() == ["generation 2"]
    assert preparation_names(_attention(8.0, 0.0)).tolist() == ["context 0"]
    size = np.full(1, 64.0)
    eight = product_table(size, size, size, size, 1.0, 2.0, 1.0)
    assert preparation_names(eight).tolist() == ["product narrow 1"]
    assert preparation_names(replace(eight, width=np.full(1, 2.0))).tolist() == [""]


def test_small_batches_of_a_convolutional_network_wait_for_pytorchs_host(tmp_path: Path) -> None:
    path = tmp_path / "squeezenet.onnx"
    build(find_architecture("squeezenet"), path)
    kernels = list_kernels(load_graph(path, 1), "float32", LaunchMode.EAGER)
    convolutions = kernels.op_types.count("Conv")
    seconds = shipped_model().time_parts(kernels, rates_of(device("h100"), "float32"), LaunchMode.EAGER).total_s
    assert seconds == pytest.approx(convolutions * 50e-6 + (len(kernels.count) - convolutions) * 23e-6)


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


def test_a_small_convolution_takes_longer_than_its_product_on_tensor_cores() -> None:
    sizes = {"m": 196.0, "n": 256.0, "k": 2304.0, "flops": 2.0 * 196 * 256 * 2304, "read_bytes": 1.4e6}
    product, conv = (make_table(name, 1, **sizes, written_bytes=1e5, width=2.0) for name in ("matmul", "conv"))
    rates = rates_of(device("a30"), "float16")
    costs = shipped_model().costs
    assert costs.kernel_times(conv, rates)[0] == pytest.approx(costs.kernel_times(product, rates)[0] + 4e-6)
