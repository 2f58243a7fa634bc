"""Times that are predicted together for a plan are those that are predicted one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu.cross_gpu import LatencyGrid, shipped_model
from gpuprof.estimators.cross_gpu.kernels import KernelsByBatch, LaunchMode
from gpuprof.graph.load import load_graph
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build
from tests.small_models import Dims, write_model

_SHARES = [Share(), *(Share(2.5 * step) for step in (1, 4, 7, 20, 33)), Share(50.0, "2g.20gb"), Share(100.0, "1g.10gb")]


@pytest.fixture(scope="module", params=["squeezenet", "transformer_encoder"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("networks") / "network.onnx"
    build(find_architecture(request.param), path)
    return path


def _kernels(path: Path, runtime: LaunchMode) -> KernelsByBatch:
    return KernelsByBatch(lambda batch: load_graph(path, batch), "tfloat32", runtime)


@pytest.mark.parametrize("runtime", [LaunchMode.ONNXRUNTIME, LaunchMode.FUSED])
def test_all_batches_together_are_each_by_itself(network: Path, runtime: LaunchMode) -> None:
    kernels, gpu, batches = _kernels(network, runtime), device("a100-80"), (1, 2, 3, 24, 256)
    for share in _SHARES:
        together = shipped_model().latencies(kernels, batches, gpu, share)
        for batch in batches:
            alone = shipped_model().latency(kernels.at(batch), gpu, share, "tfloat32", runtime)
            latency = together[batch]
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
