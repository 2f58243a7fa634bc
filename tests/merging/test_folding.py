"""Batch normalisations are folded into convolutions, as a runtime folds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from gpuprof.merging.pipeline import MergeOptions, merge_sources, read_sources
from tests.merging.models import Builder, save


def _make_normalised(bias: bool = True, eps: float = 1e-3) -> ModelProto:
    """Return two convolutions, each with a batch normalisation behind it."""
    b, x = Builder(), "x"
    for _ in range(2):
        x = b.add("Conv", x, b.weight(8, 8, 3, 3), *((b.weight(8),) if bias else ()), pads=[1, 1, 1, 1])
        positive = [b.constant(np.linspace(0.5, 1.5, 8, dtype=np.float32)) for _ in range(2)]
        x = b.add("BatchNormalization", x, positive[0], b.weight(8), b.weight(8), positive[1], epsilon=eps)
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
def test_convolutions_share_what_they_hold_with_their_normalisations(bias: bool, tmp_path: Path) -> None:
    base = _make_normalised(bias)
    paths = [save(base, tmp_path, "a"), save(_change_shift(base, 1), tmp_path, "b")]
    sources = read_sources(paths)
    for source in sources:
        assert [node.op_type for node in source.nodes] == ["Conv", "Conv"]
    digests = [[source.digest(name) for node in source.nodes for name in node.input[1:]] for source in sources]
    assert [first == second for first, second in zip(*digests, strict=True)] == [True, True, True, False]
    options = MergeOptions()
    report = merge_sources(sources, options).write(tmp_path / "m.onnx")
    assert report.proof is not None  # both give what they gave
    assert len(report.merged) + len(report.shared) == 2
