import json
import platform
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gpuprof.domain.catalogue import device
from gpuprof.domain.model import ModelGraph
from gpuprof.errors import InputError, UnavailableError
from gpuprof.graph.executed_graph import read_executed
from gpuprof.graph.load import load_graph
from gpuprof.machine.cpu import local_cpu
from gpuprof.pipeline.profile import ProfileSettings, profile
from gpuprof.profiling.sweep import planning
from gpuprof.runtime.child_process import CrashError, call_apart
from gpuprof.runtime.free_batch import convert_to_float16
from gpuprof.runtime.module_command import module_command
from gpuprof.runtime.optimizer import arithmetic_precision, executed_nodes, executed_variant, find_refusal
from gpuprof.runtime.outputs import is_collection, is_sequence_of_maps, to_numbers, to_texts
from gpuprof.runtime.providers import ORT_CPU
from gpuprof.runtime.session import SESSION_CONFIG, open_session, session_settings
from tests.profiling.models import write_mlp, write_strange
from tests.small_models import floats, integers, write_model, write_text


def test_idle_threads_do_not_spin(tmp_path: Path) -> None:
    options = open_session(write_mlp(tmp_path / "m.onnx"), threads=2).get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.intra_op_num_threads == 2
    assert set(SESSION_CONFIG) <= set(session_settings(2))


def test_files_that_are_no_model_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = write_mlp(tmp_path / "m.onnx").read_bytes()
    for name, content in {"text": b"hello", "cut": whole[:2000], "empty": b""}.items():
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            open_session(path, threads=1)
        assert name in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no such file"):
        open_session(tmp_path / "none.onnx", threads=1)


def test_an_operator_that_the_runtime_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Nonsense"):
        open_session(write_strange(tmp_path / "odd.onnx"), threads=1)


def test_what_the_runtime_says_of_a_broken_model_comes_with_a_remedy_that_fits(tmp_path: Path) -> None:
    model = onnx.load(write_mlp(tmp_path / "m.onnx"))
    model.opset_import[0].version = 99
    onnx.save(model, tmp_path / "new.onnx")
    with pytest.raises(InputError) as too_new:
        open_session(tmp_path / "new.onnx", threads=1)
    assert "has opset 99 of ai.onnx; ONNX Runtime here has opsets up to " in too_new.value.message
    assert "export it with opset " in too_new.value.fix
    twice = onnx.load(tmp_path / "m.onnx")
    for node in twice.graph.node:
        node.name = "same"
    onnx.save(twice, tmp_path / "twice.onnx")
    with pytest.raises(InputError, match="two nodes with same node name") as caught:
        open_session(tmp_path / "twice.onnx", threads=1)
    assert caught.value.fix == "correct the model, or export it again"


def test_a_provider_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="has no NoSuchProvider here"):
        open_session(write_mlp(tmp_path / "m.onnx"), threads=1, provider="NoSuchProvider")


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ([{7: 0.5, 9: 0.25}, {7: 1.0, 9: 0.0}], [{"7": 0.5, "9": 0.25}, {"7": 1.0, "9": 0.0}]),
        ({"cat": 0.5}, [{"cat": 0.5}]),
        ([np.array([[1.0, 2.0]], np.float32), np.array([3], np.int64)], [[[1.0, 2.0]], [3]]),
        ([{b"cat": float("nan")}], [{"cat": None}]),
        ([], []),
    ],
)
def test_each_element_is_one_text_of_json(value: object, texts: list[object]) -> None:
    converted = to_texts(value)
    assert converted.shape == (len(texts),) and converted.dtype == object
    assert [json.loads(text) for text in converted] == texts


def test_maps_are_compared_by_their_values_and_not_as_texts() -> None:
    rows = to_numbers([{"b": 1.0, "a": 2.0}, {"a": 4.0, "b": 3.0}])
    assert rows.dtype.kind == "f" and rows.tolist() == [[2.0, 1.0], [4.0, 3.0]]
    assert to_numbers([{"a": 1.0}, {"b": 1.0}]).dtype == object
    assert to_numbers(np.ones(3)).shape == (3,)


def test_types_are_told_as_onnx_runtime_writes_them() -> None:
    assert is_collection("seq(map(int64,tensor(float)))") and is_sequence_of_maps("seq(map(int64,tensor(float)))")
    assert is_collection("seq(tensor(float))") and not is_sequence_of_maps("seq(tensor(float))")
    assert is_collection("map(string,tensor(float))") and not is_collection("tensor(float)")


#: Named as modules of Python's library that ONNX Runtime, NumPy and multiprocessing import.
SHADOWS = ("random", "calendar", "queue", "profile")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose files have the names of library modules, and end whoever imports them."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    return tmp_path


def test_it_does_so_where_its_parent_does_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    assert module_command("gpuprof", "x") == [sys.executable, "-P", "-m", "gpuprof", "x"]
    for folder_entry in ("", str(folder)):
        monkeypatch.setattr(sys, "path", [folder_entry, "/elsewhere"])
        assert module_command("gpuprof") == [sys.executable, "-m", "gpuprof"]


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


def test_outputs_that_overflow_after_conversion_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path, wrong = (
        write_model(tmp_path / f"{name}.onnx", nodes, {"x": ["N", 8]}, {"y": ["N", 4]}, {"w": weights})
        for name, weights in (("m", floats(8, 4)), ("wrong", np.full((8, 4), np.inf, np.float32)))
    )
    monkeypatch.setattr(planning, "convert_to_float16", lambda path, directory: wrong)
    with pytest.raises(InputError, match="m cannot be run in float16: output y in the converted model is not finite"):
        planning.convert_models(planning.parse_models([str(path)]), tmp_path, ORT_CPU)


def _network(path: Path, relu: str = "Relu") -> Path:
    """Write two wide layers whose ReLU and batch normalisation the runtime fuses into the convolution."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(32, 16, 3, 3)),
        **{name: random.uniform(0.5, 1.0, 32) for name in ("scale", "shift", "mean", "variance")},
        "dense": random.normal(size=(32, 2000)),
    }
    text = f"""(float[N,16,8,8] x) => (float[N,2000] y) {{ [conv] c = Conv <pads = [1,1,1,1]> (x, w)
        [norm] n = BatchNormalization (c, scale, shift, mean, variance) [relu] r = {relu} (n)
        [pool] p = GlobalAveragePool (r) [flat] f = Flatten (p) [last] y = MatMul (f, dense) }}"""
    return write_text(path, text, {name: value.astype(np.float32) for name, value in weights.items()})


def test_the_same_nodes_are_found_without_the_weights_as_with_them(tmp_path: Path) -> None:
    path = _network(tmp_path / "network.onnx")
    open_session(path, threads=1, optimized_path=tmp_path / "optimized.onnx")
    with_weights = read_executed(tmp_path / "optimized.onnx")
    nodes = executed_nodes(path)
    assert nodes is not None
    assert [(node.op_type, node.outputs) for node in nodes] == [(node.op_type, node.outputs) for node in with_weights]
    assert "Relu" not in {node.op_type for node in nodes} and "BatchNormalization" not in {n.op_type for n in nodes}


def test_external_weights_are_not_read(tmp_path: Path) -> None:
    path = _network(tmp_path / "network.onnx")
    model = onnx.load(path)
    inside = executed_nodes(path)
    onnx.save(model, str(path), save_as_external_data=True, location="weights", size_threshold=1024)
    outside = executed_nodes(path)
    assert inside is not None and outside is not None
    assert [node.op_type for node in inside] == [node.op_type for node in outside]


def test_a_model_that_the_runtime_refuses_is_not_known(tmp_path: Path) -> None:
    assert executed_nodes(_network(tmp_path / "odd.onnx", "com.microsoft.Unheard")) is None


@pytest.mark.parametrize(
    ("kind", "opset", "cpu", "gpu"),
    [
        (TensorProto.FLOAT, 7, None, None),
        (TensorProto.FLOAT, 6, "lacks", "lacks"),  # no device has kernels of opsets before 7
        (TensorProto.BFLOAT16, 14, "lacks", None),  # a GPU may have a kernel
        (TensorProto.FLOAT8E5M2, 19, "Protocol cannot carry", "Protocol cannot carry"),
    ],
)
def test_refusals_of_serving_are_known(tmp_path: Path, kind: int, opset: int, cpu: str | None, gpu: str | None) -> None:
    op = "Identity" if kind == TensorProto.FLOAT8E5M2 else "Gemm" if opset < 8 else "Add"
    nodes = [helper.make_node(op, ["x"] * {"Identity": 1, "Gemm": 3, "Add": 2}[op], ["y"])]
    types = {"x": kind, "y": kind}
    path = write_model(tmp_path / "m.onnx", nodes, {"x": [4, 4]}, {"y": [4, 4]}, opset=opset, types=types)
    for on_gpu, message in ((False, cpu), (True, gpu)):
        error = find_refusal(path, on_gpu)
        assert message in str(error) if message else error is None


def test_a_shape_in_external_data_is_refused_as_onnx_runtime_does(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["N", 8]}, {"y": ["N", 2, 4]}, {"shape": integers(-1, 2, 4)})
    assert find_refusal(path, on_gpu=True) is None
    onnx.save(onnx.load(path), str(path), save_as_external_data=True, location="shapes", size_threshold=0)
    assert "Reshape" in str(find_refusal(path, on_gpu=True))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only there a division traps")
def test_a_model_that_ends_its_process_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime divides the least integer by -1 while it loads the model."""
    nodes = [helper.make_node("Div", ["least", "minus"], ["q"]), helper.make_node("Add", ["x", "q"], ["y"])]
    types = {"x": TensorProto.INT64, "y": TensorProto.INT64}
    weights = {"least": integers(-(2**63)), "minus": integers(-1)}
    path = write_model(here / "m.onnx", nodes, {"x": ["N", 4]}, {"y": ["N", 4]}, weights, types=types)
    assert isinstance(error := find_refusal(path, on_gpu=True), CrashError) and "SIGFPE" in str(error)
    assert call_apart(Path.exists, path) and call_apart(Path.exists, Path(path.name))  # in another process
    monkeypatch.chdir(here.parent)
    assert not call_apart(Path.exists, Path(path.name))
    with pytest.raises(UnavailableError, match="no answer within"):
        call_apart(_sleep, path, within_s=0.1)


def _sleep(path: Path) -> None:
    time.sleep(60.0)


def _embedding(path: Path, kind: str = "float") -> ModelGraph:
    """Token ids in, a product of what they stand for out: as language models have it."""
    dtype = np.float16 if kind == "float16" else np.float32
    text = f"(int64[N,6] ids) => ({kind}[N,6,4] y) {{ found = Gather (table, ids) y = MatMul (found, matrix) }}"
    return load_graph(write_text(path, text, {"table": np.ones((32, 8), dtype), "matrix": np.ones((8, 4), dtype)}), 2)


@pytest.mark.parametrize(("name", "expected"), [("v100", "float32"), ("t4", "float32"), ("a100-80", "tf32")])
def test_float32_is_computed_in_tf32_where_the_gpu_has_it(tmp_path: Path, name: str, expected: str) -> None:
    graph = _embedding(tmp_path / "m.onnx")
    assert executed_variant(graph, device(name)).precision == expected
    assert executed_variant(_embedding(tmp_path / "h.onnx", "float16"), device(name)).precision == "float16"


def test_the_variant_has_the_runtime_and_the_precision_of_the_arithmetic_not_of_the_token_ids(tmp_path: Path) -> None:
    graph = _embedding(tmp_path / "m.onnx")
    assert str(executed_variant(graph, device("h200"))) == "onnxruntime fused tf32"
    assert str(executed_variant(graph, local_cpu())) == "onnxruntime fused float32"
    nothing = ModelGraph("named", 1, (), (), (), (), 0, "", "")
    assert executed_variant(nothing, device("h200")).precision is None
