from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.runtime.session import open_session
from gpuprof.zoo.architecture import ARCHITECTURES, OURS, find_architecture
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


@pytest.mark.parametrize(
    "name", ["random_cnn", pytest.param("random_transformer", marks=pytest.mark.slow), "random_rnn", "random_mlp"]
)
def test_every_seed_of_a_random_network_draws_other_layers_that_run(tmp_path: Path, name: str) -> None:
    shapes = set()
    for seed in range(1, 7):
        path = build(find_architecture(name), tmp_path / "m.onnx", seed=seed)
        graph = load_graph(path, 2)
        onnx.checker.check_model(onnx.load(path), full_check=True)
        assert graph.uncounted_ops == ()
        assert graph.flops < 2 * 40e9
        shapes.add(tuple((op.op_type, op.outputs[0].shape) for op in graph.ops))
        if seed < 3:
            outputs = open_session(path, threads=1).run(None, random_inputs(graph))[0]
            assert np.isfinite(outputs).all()
            assert outputs.std() > 1e-3
    assert len(shapes) == 6
