"""Normalisations that models share are folded; what differs stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from gpuprof.merging.folding import fold_shared_norms
from gpuprof.merging.pipeline import MergeOptions, merge_sources, read_sources, write_merged
from tests.merging.models import Builder, save


def _make_normalised(bias: bool = True, eps: float = 1e-3, training: int = 0) -> ModelProto:
    """Return two convolutions, each with a batch normalisation behind it."""
    b, x = Builder(), "x"
    for _ in range(2):
        x = b.add("Conv", x, b.weight(8, 8, 3, 3), *((b.weight(8),) if bias else ()), pads=[1, 1, 1, 1])
        positive = [b.constant(np.linspace(0.5, 1.5, 8, dtype=np.float32)) for _ in range(2)]
        extra = {"training_mode": 1} if training else {}
        x = b.add("BatchNormalization", x, positive[0], b.weight(8), b.weight(8), positive[1], epsilon=eps, **extra)
    b.nodes[-1].output[0] = "y"
    shape: list[int | str] = ["batch", 8, 4, 4]
    return b.model({"x": (TensorProto.FLOAT, shape)}, {"y": (TensorProto.FLOAT, shape)})


def _change_shift(model: ModelProto, which: int) -> ModelProto:
    """Return a copy with the shift of one normalisation changed."""
    copy = ModelProto()
    copy.CopyFrom(model)
    node = [node for node in copy.graph.node if node.op_type == "BatchNormalization"][which]
    for tensor in copy.graph.initializer:
        if tensor.name == node.input[2]:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.5), tensor.name))
    return copy


@pytest.mark.parametrize("bias", [True, False])
def test_a_normalisation_that_both_have_is_folded_and_one_that_differs_is_not(bias: bool, tmp_path: Path) -> None:
    base = _make_normalised(bias)
    paths = [save(base, tmp_path, "a"), save(_change_shift(base, 1), tmp_path, "b")]
    sources = read_sources(paths)
    fold_shared_norms(sources)
    for source in sources:
        assert [node.op_type for node in source.nodes] == ["Conv", "Conv", "BatchNormalization"]
    first, second = (source.nodes[0] for source in sources)
    assert sources[0].digest(first.input[1]) == sources[1].digest(second.input[1])
    assert sources[0].digest(first.input[2]) == sources[1].digest(second.input[2])
    options = MergeOptions()
    report = write_merged(merge_sources(read_sources(paths), options), tmp_path / "m.onnx", options)
    assert report.proof is not None  # both give what they gave
    assert len(report.merged) + len(report.shared) == 2


def test_a_model_alone_and_statistics_of_the_batch_are_left_as_they_are(tmp_path: Path) -> None:
    (alone,) = read_sources([save(_make_normalised(), tmp_path, "alone")])
    fold_shared_norms([alone])
    assert sum(node.op_type == "BatchNormalization" for node in alone.nodes) == 2
    apart = read_sources([save(_make_normalised(eps=eps), tmp_path, f"e{i}") for i, eps in enumerate((1e-3, 1e-2))])
    fold_shared_norms(apart)
    assert all(sum(node.op_type == "BatchNormalization" for node in source.nodes) == 2 for source in apart)
