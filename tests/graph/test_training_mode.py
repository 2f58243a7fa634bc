"""Models that were exported to be trained are told from others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper

from gpuprof.graph.training_mode import describe_training
from tests.small_models import floats, write_model

_SHAPE: list[int | str] = ["batch", 4]


def _dropout(mode: NodeProto | None) -> list[NodeProto]:
    return [*([] if mode is None else [mode]), helper.make_node("Dropout", ["x", "ratio", "mode"], ["y"])]


def _constant_mode(on: bool) -> NodeProto:
    value = helper.make_tensor("mode", TensorProto.BOOL, [], [on])
    return helper.make_node("Constant", [], ["mode"], value=value)


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("as_node", [True, False])
def test_a_dropout_that_drops_is_told(tmp_path: Path, on: bool, as_node: bool) -> None:
    weights = {"ratio": np.array(0.5, np.float32)}
    weights |= {} if as_node else {"mode": np.array(on)}
    nodes = _dropout(_constant_mode(on) if as_node else None)
    path = write_model(tmp_path / "net.onnx", nodes, {"x": _SHAPE}, {"y": _SHAPE}, weights)
    remark = describe_training(path, "net")
    assert (remark is not None) == on
    if remark:
        assert "its Dropout drops values at random (export it after model.eval())" in remark


@pytest.mark.parametrize("training", [0, 1])
def test_a_normalisation_by_its_batch_is_told(tmp_path: Path, training: int) -> None:
    outputs = ["y", "mean", "variance"] if training else ["y"]
    node = helper.make_node("BatchNormalization", ["x", "a", "b", "c", "d"], outputs, training_mode=training)
    weights = {name: floats(4) for name in "abcd"}
    path = write_model(tmp_path / "net.onnx", [node], {"x": _SHAPE}, {"y": _SHAPE}, weights)
    remark = describe_training(path, "net")
    assert (remark is not None) == bool(training)
    if remark:
        assert remark.startswith("net was exported in training mode: its BatchNormalization")
