"""Estimates for GPUs without measurements: physical, in proportion, with their precision and runtime in the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.adaptation import adapt_families
from gpuprof.estimators.cross_gpu.cross_gpu import KernelsByBatch, shipped_model
from gpuprof.estimators.cross_gpu.execution import parse_execution
from gpuprof.estimators.cross_gpu.features import bound_times
from gpuprof.estimators.cross_gpu.kernels import LaunchMode, list_kernels
from gpuprof.estimators.cross_gpu.op_table import FAMILIES, make_table
from gpuprof.estimators.cross_gpu.rates import rates_of
from gpuprof.estimators.cross_gpu.training import train
from gpuprof.estimators.cross_gpu.training_data import Measured, product_table
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
@pytest.mark.parametrize("family", ["matmul", "conv", "elementwise", "norm", "softmax", "attention", "movement"])
def test_no_op_is_faster_than_the_peaks_of_the_data_sheet(name: str, family: str) -> None:
    b, m, n, k = _products(300, 1)
    ops = product_table(b, m, n, k, 4.0, 4.0, 0.0)
    ops = replace(ops, family=np.full(300, FAMILIES.index(family)), row=n, kernel=np.ones(300), stride=np.ones(300))
    rates = rates_of(device(name), "float32")
    seconds = shipped_model().kernel_times(ops, rates)
    assert np.isfinite(seconds).all()
    assert (seconds >= bound_times(ops, rates).hard_s * (1 - 1e-9)).all()


def test_the_source_says_precision_and_runtime(network: Path) -> None:
    default = DatabaseEstimator(None).estimate(str(network), device("a100-80"), 8, Share())
    assert default.latency_ms.source == "cross-gpu: tfloat32, fused"
    chosen = DatabaseEstimator(None, execution=parse_execution("float16", "eager"))
    assert chosen.estimate(str(network), device("a100-80"), 8, Share()).latency_ms.source == "cross-gpu: float16, eager"


def test_a_gpu_without_tf32_multiplies_in_float32(network: Path) -> None:
    said = DatabaseEstimator(None).estimate(str(network), device("v100"), 8, Share())
    assert said.latency_ms.source == "cross-gpu: float32, fused"


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
    found = by_batch.at(48)
    assert found.op_types == read.op_types
    assert found.ops.flops == pytest.approx(read.ops.flops)
    assert found.ops.bytes_moved == pytest.approx(read.ops.bytes_moved)


def test_more_work_takes_longer_and_a_smaller_instance_too(network: Path) -> None:
    estimator, a100 = DatabaseEstimator(None), device("a100-80")
    by_batch = [estimator.estimate(str(network), a100, batch, Share()).latency_ms.value for batch in (1, 64, 1024)]
    assert by_batch == sorted(by_batch)
    shares: Sequence[Share] = (Share(), Share(100.0, "3g.40gb"), Share(100.0, "1g.10gb"))
    by_share = [estimator.estimate(str(network), a100, 1024, share).latency_ms.value for share in shares]
    assert by_share == sorted(by_share)


def test_nothing_of_an_excluded_gpu_is_learned() -> None:
    rows = 3000
    b, m, n, k = _products(rows, 2)
    ops = product_table(np.ones(rows), b * m, n, k, 4.0, 4.0, 0.0)
    names = np.array(["v100", "a100-pcie-80", "a100-pcie-40"])[np.arange(rows) % 3]
    slow = np.where(names == "v100", 2.0, 50.0)
    bounds = {name: bound_times(ops, rates_of(device(name), "float32")).expected_s for name in set(names.tolist())}
    seconds = slow * np.choose(np.arange(rows) % 3, [bounds[name] for name in ("v100", "a100-pcie-80", "a100-pcie-40")])
    measured = Measured("gemm", "float32", ops, seconds + 1e-5, names, np.full(rows, "train"), kernels_only=True)
    from gpuprof.estimators.cross_gpu.cost_model import CostModel

    trained = train([measured], excluded="a100", rounds=40)
    rates = rates_of(device("a100-pcie-80"), "float32")
    large = make_table("matmul", 1, m=8192, n=8192, k=4096, flops=2.0 * 8192**2 * 4096, read_bytes=2e8, width=4.0)
    ratio = CostModel.of_texts(trained.models, {}).kernel_times(large, rates) / bound_times(large, rates).expected_s
    assert 1.5 < ratio[0] < 3.0


def test_measurements_of_a_gpu_move_its_estimates_to_them() -> None:
    random = np.random.default_rng(0)
    predicted = np.exp(random.uniform(-10, -5, 500))
    measured = predicted * 1.5 * np.exp(random.normal(0, 0.05, 500))
    family = np.full(500, "matmul")
    errors = [np.abs(predicted / measured - 1).mean()]
    for count in (5, 20, 100):
        shift = adapt_families(family[:count], predicted[:count], measured[:count])
        errors.append(float(np.abs(shift.apply(family, predicted) / measured - 1).mean()))
    assert errors[0] > 0.3 > 0.2 > errors[1]
    assert max(errors[2:]) < 0.07


def test_a_family_that_was_not_measured_stays_as_it_was() -> None:
    shift = adapt_families(np.array(["conv"] * 9), np.full(9, 1e-3), np.full(9, 2e-3))
    assert shift.apply(np.array(["softmax"]), np.array([1e-3]))[0] == 1e-3


@pytest.mark.parametrize("batch", [1, 5, 16, 17, 32, 75, 256])
def test_a_batch_takes_what_it_takes_when_it_is_predicted_alone(network: Path, batch: int) -> None:
    gpu, precision = device("a100-80"), "tfloat32"
    asked = DatabaseEstimator(None).estimate(str(network), gpu, batch, Share()).latency_ms
    kernels = list_kernels(load_graph(network, batch), precision, LaunchMode.FUSED)
    alone = shipped_model().latency(kernels, gpu, Share(), precision, LaunchMode.FUSED)
    assert asked.value == pytest.approx(alone.value, rel=1e-9 if batch <= 4 else 0.05)
    assert asked.upper() / asked.value == pytest.approx(alone.upper() / alone.value, rel=1e-6)
