import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest

from gpuprof.errors import InputError, UnavailableError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.runtime.free_batch import is_dynamic
from gpuprof.runtime.session import open_session
from gpuprof.zoo.architecture import ARCHITECTURES, ONNX, OURS, TRANSFORMERS, find_architecture
from gpuprof.zoo.build import build


@pytest.mark.parametrize("name", [name for name, a in ARCHITECTURES.items() if a.origin == OURS])
def test_a_network_of_ours_answers_any_batch_and_is_counted_whole(tmp_path: Path, name: str) -> None:
    path = build(find_architecture(name), tmp_path / "m.onnx")
    assert build(find_architecture(name), tmp_path / "again.onnx").read_bytes() == path.read_bytes()
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert (
        sum(np.prod(t.dims) for t in model.graph.initializer if t.data_type == 1) == find_architecture(name).parameters
    )
    graph = load_graph(path, 3)
    assert graph.uncounted_ops == ()
    assert graph.flops == 3 * load_graph(path).flops
    session = open_session(path, threads=1)
    inputs = random_inputs(graph)
    three = session.run(None, inputs)[0]
    alone = session.run(None, {k: v[1:2] for k, v in inputs.items()})[0]
    np.testing.assert_allclose(three[1:2], alone, rtol=1e-3, atol=1e-4)
    assert np.isfinite(three).all()
    assert three.std() > 1e-3


@pytest.mark.parametrize("name", ["random_cnn", "random_transformer", "random_rnn", "random_mlp"])
def test_every_seed_of_a_random_network_draws_other_layers_that_run(tmp_path: Path, name: str) -> None:
    shapes = set()
    for seed in range(1, 4):
        path = build(find_architecture(name), tmp_path / "m.onnx", seed=seed)
        graph = load_graph(path, 2)
        onnx.checker.check_model(onnx.load(path), full_check=True)
        assert graph.uncounted_ops == ()
        assert graph.flops < 2 * 40e9
        shapes.add(tuple((op.op_type, op.outputs[0].shape) for op in graph.ops))
        if seed < 2:
            outputs = open_session(path, threads=1).run(None, random_inputs(graph))[0]
            assert np.isfinite(outputs).all()
            assert outputs.std() > 1e-3
    assert len(shapes) == 3


LIGHT = [name for name, architecture in ARCHITECTURES.items() if architecture.origin == ONNX]
#: Hundreds of megabytes of weights, or of layers, take too much time.
LARGE = {"vgg19", "zfnet512", "alexnet", "densenet121", "resnet50", "inception_v2"}


@pytest.mark.parametrize("name", sorted(set(LIGHT) - LARGE))
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


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the export extra")
EXPORTED = [name for name, architecture in ARCHITECTURES.items() if architecture.origin == TRANSFORMERS]
#: Built in every run of the slow tests.
BUILT = ("resnet18", "mobilenet_v2")


def test_every_export_has_inputs_and_the_classes_that_it_is_made_from() -> None:
    for name in EXPORTED:
        export = find_architecture(name).export
        assert export is not None and export.config.endswith("Config") and export.inputs and export.outputs


def test_without_the_extra_the_way_to_install_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"pip install 'gpuprof-onnx\[export\]'"):
        build(find_architecture("bert_base"), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_an_export_answers_any_batch_and_tells_nothing_of_the_machine(tmp_path: Path, name: str) -> None:
    path = build(find_architecture(name), tmp_path / "m.onnx")
    graph = load_graph(path, 4)
    assert graph.uncounted_ops == ()
    assert (
        sum(np.prod(t.dims) for t in onnx.load(path).graph.initializer if t.data_type == 1)
        == find_architecture(name).parameters
    )
    session = open_session(path, threads=1)
    inputs = random_inputs(graph)
    four = session.run(None, inputs)[0]
    alone = session.run(None, {k: v[2:3] for k, v in inputs.items()})[0]
    np.testing.assert_allclose(four[2:3], alone, rtol=1e-3, atol=1e-3 * np.abs(alone).max())
    assert np.isfinite(four).all()
    assert four.std() > 1e-3
    assert b"site-packages" not in path.read_bytes()
    assert build(find_architecture(name), tmp_path / "again.onnx").read_bytes() == path.read_bytes()
