from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from gpuprof.domain.catalogue import device
from gpuprof.errors import InputError
from gpuprof.graph.load import load_graph
from gpuprof.pipeline.profile import ProfileSettings, profile
from gpuprof.profiling.sweep import planning
from gpuprof.runtime.half_precision import convert_to_float16
from gpuprof.runtime.optimizer import arithmetic_precision
from gpuprof.runtime.providers import ORT_CPU
from tests.profiling.models import write_mlp
from tests.small_models import floats, write_model


def test_a_converted_model_computes_in_float16_and_keeps_the_types_of_its_inputs(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["N", 8]}, {"y": ["N", 4]}, {"w": floats(8, 4)})
    output = convert_to_float16(path, tmp_path / "copies")
    graph = load_graph(output, 2)
    assert graph.inputs[0].dtype == "float32" and arithmetic_precision(graph, device("h200")) == "float16"
    assert graph.weight_bytes == load_graph(path, 2).weight_bytes // 2
    written = output.stat().st_mtime_ns
    assert convert_to_float16(path, tmp_path / "copies") == output and output.stat().st_mtime_ns == written


def test_profile_measures_the_copy_under_a_name_of_its_own(tmp_path: Path) -> None:
    path = write_mlp(tmp_path / "m.onnx")
    quick = ProfileSettings(time_limit_s=0.1, precision="float16", keep_unstable=True)
    result = profile(path, batches=(1,), shares=("100",), device="cpu", db=tmp_path / "db", settings=quick)
    (row,) = result.rows()
    assert row["model"] == "m-float16" and row["precision"] == "float16"


def test_outputs_that_overflow_in_the_converted_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path, wrong = (
        write_model(tmp_path / f"{name}.onnx", nodes, {"x": ["N", 8]}, {"y": ["N", 4]}, {"w": weights})
        for name, weights in (("m", floats(8, 4)), ("wrong", np.full((8, 4), np.inf, np.float32)))
    )
    monkeypatch.setattr(planning, "convert_to_float16", lambda path, directory: wrong)
    with pytest.raises(InputError, match="m cannot be run in float16: output y in the converted model is not finite"):
        planning.convert_models(planning.parse_models([str(path)]), tmp_path, ORT_CPU)
