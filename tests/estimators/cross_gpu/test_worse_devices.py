"""A GPU is not estimated slower than one that is better in nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.cross_gpu import shipped_model
from gpuprof.estimators.cross_gpu.kernels import LaunchMode
from gpuprof.estimators.cross_gpu.kernels_by_batch import KernelsByBatch
from gpuprof.estimators.cross_gpu.latency_grid import LatencyGrid
from gpuprof.estimators.cross_gpu.worse_devices import WholeTimes, list_worse
from gpuprof.graph.load import load_graph
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build
from tests.small_models import write_model

BATCHES = (1, 2, 3, 4, 6, 8, 16, 64, 256)


def test_worse_are_boards_that_are_better_in_no_rate() -> None:
    worse = {one.name for one in list_worse(device("h200"), "float16")}
    assert {"h100", "gh200", "a100-80"} <= worse
    assert not {"h200", "l4", "b200", "k80"} & worse  # itself, a higher clock, more of all, no float16


def test_a_board_of_equal_rates_is_not_worse() -> None:
    assert "v100" not in {one.name for one in list_worse(device("v100-32"), "float32")}


def test_the_arithmetic_that_a_gpu_lacks_is_refused() -> None:
    with pytest.raises(InputError, match="has no float8"):
        list_worse(device("t4"), "float8")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelsByBatch:
    path = build(find_architecture("transformer_encoder"), tmp_path_factory.mktemp("worse") / "network.onnx")
    return KernelsByBatch(partial(load_graph, path), "float16", LaunchMode.FUSED)


def _grid(kernels: KernelsByBatch, name: str) -> LatencyGrid:
    return LatencyGrid(kernels, device(name), shipped_model(), WholeTimes(kernels, shipped_model()))


def test_no_gpu_is_slower_than_one_that_is_better_in_nothing(kernels: KernelsByBatch) -> None:
    pairs = [("h200", "h100"), ("gh200", "h100"), ("rtx-3090", "t4"), ("a100-80", "a100-40"), ("a10", "t4")]
    alone = {name: LatencyGrid(kernels, device(name), shipped_model()) for pair in pairs for name in pair}
    assert any(
        alone[better].at(Share(), batch).value > alone[worse].at(Share(), batch).value
        for better, worse in pairs
        for batch in BATCHES
    ), "nothing to mend: take another network"
    for better, worse in pairs:
        for one, other in zip(
            _grid(kernels, better).series(Share(), BATCHES),
            _grid(kernels, worse).series(Share(), BATCHES),
            strict=True,
        ):
            assert one.value <= other.value * (1.0 + 1e-12), (better, worse)
            assert one.low is not None and one.high is not None and one.low < one.value < one.high


def test_a_gpu_that_the_catalogue_lacks_is_no_slower_than_the_one_that_it_betters(kernels: KernelsByBatch) -> None:
    for name in ("h100", "t4", "rtx-4090"):
        known = device(name)
        better = replace(
            known, name="better", l2_bytes=2 * known.l2_bytes, dram_bytes_per_s=1.5 * known.dram_bytes_per_s
        )
        grid = LatencyGrid(kernels, better, shipped_model(), WholeTimes(kernels, shipped_model()))
        for one, other in zip(
            grid.series(Share(), BATCHES), _grid(kernels, name).series(Share(), BATCHES), strict=True
        ):
            assert one.value <= other.value * (1.0 + 1e-12)


@pytest.mark.parametrize(
    ("name", "narrow", "wide"),
    [("rtx-3090", "tfloat32", "float32"), ("rtx-pro-6000", "float8", "float16"), ("l4", "int8", "float16")],
)
@pytest.mark.parametrize("runtime", list(LaunchMode))
def test_a_narrow_type_is_no_slower_where_a_worse_gpu_without_it_is_quicker(
    tmp_path: Path, name: str, narrow: str, wide: str, runtime: LaunchMode
) -> None:
    nodes = [helper.make_node("Gather", [f"table{place}", "ids"], [f"row{place}"]) for place in range(6)]
    nodes += [
        helper.make_node("Concat", [f"row{place}" for place in range(6)], ["rows"], axis=2),
        helper.make_node("Softmax", ["rows"], ["soft"]),
        helper.make_node("Transpose", ["soft"], ["y"], perm=[0, 2, 1]),
    ]
    tables = {f"table{place}": np.ones((2000, 64), np.float32) for place in range(6)}
    types = {"ids": TensorProto.INT64}
    path = write_model(tmp_path / "gathers.onnx", nodes, {"ids": ["batch", 256]}, {"y": None}, tables, types=types)
    times = {}
    for precision in (narrow, wide):
        kernels = KernelsByBatch(partial(load_graph, path), precision, runtime)
        times[precision] = _grid(kernels, name).series(Share(), BATCHES)
    for one, other in zip(times[narrow], times[wide], strict=True):
        assert one.value <= other.value * (1.0 + 1e-12)
