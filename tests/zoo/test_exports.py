from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest

from gpuprof.errors import UnavailableError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.runtime.session import open_session
from gpuprof.zoo.architecture import ARCHITECTURES, TRANSFORMERS, find_architecture
from gpuprof.zoo.build import build

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
