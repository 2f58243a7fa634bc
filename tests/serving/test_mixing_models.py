from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from gpuprof.errors import InputError
from gpuprof.runtime.providers import ORT_CPU
from gpuprof.serving.worker.runtime import OnnxRuntime
from tests.small_models import write_model


def test_a_model_that_relates_the_items_of_a_batch_is_served_by_batches_of_one_alone(tmp_path: Path) -> None:
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["N", 4]}, {"y": ["N", "N"]})
    with pytest.raises(InputError, match="the first dimension alone of its output y must be the batch"):
        OnnxRuntime("m", "1", path, 2, 1, ORT_CPU)
    assert OnnxRuntime("m", "1", path, 1, 1, ORT_CPU).spec.max_batch == 0


def test_a_model_that_mixes_them_behind_a_shape_that_does_not_show_it_is_refused_too(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.onnx", [helper.make_node("Softmax", ["x"], ["y"], axis=0)], {"x": ["N", 4]}, {"y": ["N", 4]}
    )
    with pytest.raises(InputError, match="output y relates its items to one another"):
        OnnxRuntime("m", "1", path, 2, 1, ORT_CPU)
    assert OnnxRuntime("m", "1", path, 1, 1, ORT_CPU).spec.max_batch == 1


def test_models_that_do_not_run_on_made_up_inputs_are_served_all_the_same(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]  # the open dimension must be 4
    path = write_model(
        tmp_path / "m.onnx",
        nodes,
        {"x": ["N", "length"]},
        {"y": ["N", 2, 2]},
        {"shape": np.array([-1, 2, 2], np.int64)},
    )
    assert OnnxRuntime("m", "1", path, 2, 1, ORT_CPU).spec.max_batch == 2
