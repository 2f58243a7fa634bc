from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from gpuprof.errors import InputError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.runtime.free_batch import is_dynamic
from gpuprof.runtime.session import open_session
from gpuprof.zoo.architecture import ARCHITECTURES, ONNX, find_architecture
from gpuprof.zoo.build import build

LIGHT = [name for name, architecture in ARCHITECTURES.items() if architecture.origin == ONNX]
#: Hundreds of megabytes of weights, or of layers, take their time.
LARGE = {"vgg19", "zfnet512", "alexnet", "densenet121", "resnet50", "inception_v2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in LIGHT]
)
def test_a_network_answers_any_batch_as_it_answers_one_by_one(tmp_path: Path, name: str) -> None:
    path = build(find_architecture(name), tmp_path / f"{name}.onnx")
    graph = load_graph(path, 2)
    assert is_dynamic(path)
    assert graph.uncounted_ops == ()
    assert sum(w.elements for w in graph.weights if w.dtype == "float32") == find_architecture(name).parameters
    session = open_session(path, threads=1)
    inputs = random_inputs(graph)
    both = session.run(None, inputs)[0].reshape(2, -1)
    alone = [session.run(None, {k: v[i : i + 1] for k, v in inputs.items()})[0].ravel() for i in range(2)]
    np.testing.assert_allclose(both, alone, rtol=1e-3, atol=1e-5 * np.abs(both).max())
    assert np.isfinite(both).all()
    assert both.std() > 1e-6  # neither all alike
    assert both.max() < 0.5 * np.abs(both).sum(axis=1).min()  # nor all in one class
    assert not np.array_equal(both[0], both[1])


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    network = find_architecture("squeezenet")
    first = build(network, tmp_path / "a.onnx").read_bytes()
    assert build(network, tmp_path / "b.onnx").read_bytes() == first
    assert build(network, tmp_path / "c.onnx", seed=1).read_bytes() != first


def test_the_files_look_like_those_of_trained_networks(tmp_path: Path) -> None:
    model = onnx.load(build(find_architecture("shufflenet"), tmp_path / "m.onnx"))
    assert [info.name for info in model.graph.input] == ["gpu_0/data_0"]
    assert "ConstantOfShape" not in {node.op_type for node in model.graph.node}
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    onnx.checker.check_model(model, full_check=True)


def test_a_batch_can_be_fixed(tmp_path: Path) -> None:
    path = build(find_architecture("squeezenet"), tmp_path / "m.onnx", batch=3)
    assert load_graph(path, 3).outputs[0].shape == (3, 1000, 1, 1)
    with pytest.raises(InputError, match="fixes the batch at 3"):
        load_graph(path, 1)


def test_an_unknown_network_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown network of the zoo 'resnet51' \(did you mean .*resnet50"):
        find_architecture("resnet51")


@pytest.mark.parametrize(("batch", "seed"), [(0, 0), (-1, 0), (None, -1)])
def test_bad_numbers_are_refused(tmp_path: Path, batch: int | None, seed: int) -> None:
    with pytest.raises(InputError, match="must be at least"):
        build(find_architecture("squeezenet"), tmp_path / "m.onnx", batch, seed)


def test_a_missing_directory_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a directory"):
        build(find_architecture("squeezenet"), tmp_path / "none" / "m.onnx")
    assert list(tmp_path.iterdir()) == []
