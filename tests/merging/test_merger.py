"""Merged graphs give what the originals give: random small graphs, with everything merged that can be."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations, pairwise
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, numpy_helper

from gpuprof.graph.merged_model import read_merged
from gpuprof.merging.gain import GainContext, PlanGain, Rates
from gpuprof.merging.groups import group_nodes
from gpuprof.merging.pipeline import SHARED, MergeOptions, merge_sources, read_sources, relative_difference
from gpuprof.merging.plan import make_plan
from tests.merging.models import Array, Builder, finetune_model, residual, save, transformer

_LENGTH = 4


def _dense(b: Builder, x: str, width: int) -> str:
    return b.add("Add", b.add("MatMul", x, b.weight(width, width)), b.weight(width))


def _attention(b: Builder, x: str, width: int) -> str:
    scores = b.add("MatMul", b.add("MatMul", x, b.weight(width, width)), b.add("Transpose", x, perm=[0, 2, 1]))
    return b.add("MatMul", b.add("Softmax", scores, axis=-1), x)


def _flat(b: Builder, x: str, width: int) -> str:
    flat = b.add("Reshape", x, b.constant(np.array([-1, _LENGTH * width], np.int64)))
    flat = b.add("MatMul", flat, b.weight(_LENGTH * width, _LENGTH * width))
    return b.add("Reshape", flat, b.constant(np.array([-1, _LENGTH, width], np.int64)))


def _add_shape_block(b: Builder, x: str, width: int) -> str:
    shape = b.add("Shape", x)
    folded = b.add("Reshape", x, b.constant(np.array([-1, width], np.int64)))
    return b.add("Reshape", b.add("MatMul", folded, b.weight(width, width)), shape)


def _add_swapped_block(b: Builder, x: str, width: int) -> str:
    y = b.add("Transpose", x, perm=[1, 0, 2])
    return b.add("Transpose", b.add("MatMul", y, b.weight(width, width)), perm=[1, 0, 2])


_LAYERS: dict[str, Callable[[Builder, str, int], str]] = {
    "dense": _dense,
    "attention": _attention,
    "flat": _flat,
    "shaped": _add_shape_block,
    "swapped": _add_swapped_block,
    "residual": lambda b, x, w: b.add("Add", x, _dense(b, x, w)),
    "relu": lambda b, x, w: b.add("Relu", x),
    "norm": lambda b, x, w: b.add("LayerNormalization", x, b.weight(w), b.weight(w), axis=-1),
    "over the batch": lambda b, x, w: b.add("Add", x, b.add("ReduceMean", x, axes=[0], keepdims=1)),
    "softmax of the batch": lambda b, x, w: b.add("Softmax", x, axis=0),
    "along the length": lambda b, x, w: b.add("Softmax", x, axis=1),
    "expanded": lambda b, x, w: b.add("Add", x, b.add("Expand", b.weight(1, 1, w), b.add("Shape", x))),
    "joined": lambda b, x, w: b.add(
        "MatMul", b.add("Concat", x, b.add("Tanh", x), axis=2), b.weight(2 * w, w)
    ),
}  # fmt: skip


def _conv(b: Builder, x: str, width: int, **more: int) -> str:
    kernel = b.weight(width, width // more.get("group", 1), 3, 3)
    return b.add("Conv", x, kernel, b.weight(width), pads=[1, 1, 1, 1], **more)


_IMAGE_LAYERS: dict[str, Callable[[Builder, str, int], str]] = {
    "conv": _conv,
    "depthwise": lambda b, x, w: _conv(b, x, w, group=w),
    "residual": lambda b, x, w: b.add("Relu", b.add("Add", x, _conv(b, x, w))),
    "pool": lambda b, x, w: b.add("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    "norm": lambda b, x, w: b.add("InstanceNormalization", x, b.weight(w), b.weight(w)),
    "gate": lambda b, x, w: b.add("Mul", x, b.add("Sigmoid", _conv(b, b.add("GlobalAveragePool", x), w))),
    "shuffled": lambda b, x, w: b.add("Transpose", b.add("Transpose", x, perm=[0, 2, 3, 1]), perm=[0, 3, 1, 2]),
}  # fmt: skip


def _image_model(names: list[str], width: int, seed: int) -> ModelProto:
    b = Builder(seed)
    x = "x"
    for name in names:
        x = _IMAGE_LAYERS[name](b, x, width)
    flat = b.add("Flatten", x)
    b.add("Gemm", flat, b.weight(5, width * _LENGTH * _LENGTH), b.weight(5), transB=1)
    b.nodes[-1].output[0] = "y"
    shape: list[int | str] = ["batch", width, _LENGTH, _LENGTH]
    return b.model({"x": (TensorProto.FLOAT, shape)}, {"y": (TensorProto.FLOAT, ["batch", 5])})


@st.composite
def _images(draw: st.DrawFn) -> list[ModelProto]:
    width = draw(st.sampled_from([2, 4]))
    names = draw(st.lists(st.sampled_from(sorted(_IMAGE_LAYERS)), min_size=1, max_size=4))
    seed = draw(st.integers(0, 1000))
    return [_change_weights(_image_model(names, width, seed), draw, m) for m in range(2)]


@st.composite
def _graphs(draw: st.DrawFn) -> list[ModelProto]:
    """Return models with the same or nearly the same layers."""
    width = draw(st.sampled_from([2, 3, 6]))
    names = draw(st.lists(st.sampled_from(sorted(_LAYERS)), min_size=1, max_size=5))
    count = draw(st.sampled_from([2, 2, 3]))
    seed = draw(st.integers(0, 1000))
    models = []
    for m in range(count):
        mine = list(names)
        if m and draw(st.booleans()):
            mine.append(draw(st.sampled_from(sorted(_LAYERS))))
        models.append(_change_weights(_build(mine, width, seed), draw, m))
    return models


def _build(names: list[str], width: int, seed: int) -> ModelProto:
    b = Builder(seed)
    x = "x"
    for name in names:
        x = _LAYERS[name](b, x, width)
    b.nodes[-1].output[0] = "y"
    shape: list[int | str] = ["batch", _LENGTH, width]
    return b.model({"x": (TensorProto.FLOAT, shape)}, {"y": (TensorProto.FLOAT, shape)})


def _change_weights(model: ModelProto, draw: st.DrawFn, seed: int) -> ModelProto:
    """Change some weights whole, and of some only a corner, which leaves a block in common."""
    random = np.random.default_rng(seed)
    for tensor in model.graph.initializer:
        kind = draw(st.sampled_from(["same", "same", "same", "corner", "whole"])) if seed else "same"
        value = numpy_helper.to_array(tensor).copy()
        if kind == "same" or value.dtype != np.float32 or value.ndim < 1:
            continue
        corner = value if kind == "whole" else value[..., : max(1, value.shape[-1] // 3)]
        corner += 0.1 * random.standard_normal(corner.shape).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return model


def _call(path: Path, fed: dict[str, Array]) -> dict[str, Array]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, fed), strict=True))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(_graphs(), _images()))
def test_a_merged_random_graph_gives_what_the_originals_give(models: list[ModelProto]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        paths = [save(model, Path(directory), f"m{i}") for i, model in enumerate(models)]
        output = Path(directory) / "merged.onnx"
        options = MergeOptions(force=True, omega=0.1)
        merge_sources(read_sources(paths), options).write(output)
        described = read_merged(output)
        assert described is not None
        random = np.random.default_rng(0)
        inner = [dim.dim_value for dim in models[0].graph.input[0].type.tensor_type.shape.dim[1:]]
        fed: dict[str, dict[str, Array]] = {}
        for i in range(len(models)):
            fed[f"m{i}"] = {"x": random.standard_normal((2 + i, *inner)).astype(np.float32)}
        for missing in (None, "m0"):
            present = {name: given for name, given in fed.items() if name != missing}
            results = _call(output, described.feeds(present))
            for i, path in enumerate(paths):
                if f"m{i}" in present:
                    expected = _call(path, fed[f"m{i}"])["y"]
                    answer = described.answers(results, f"m{i}")["y"]
                    np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-4)


def _write_merge(tmp_path: Path, *models: ModelProto, **options: object) -> tuple[Path, MergeOptions]:
    paths = [save(model, tmp_path, f"m{i}") for i, model in enumerate(models)]
    chosen = MergeOptions(**{"force": True, **options})  # type: ignore[arg-type]
    output = tmp_path / "merged.onnx"
    merge_sources(read_sources(paths), chosen).write(output)
    return output, chosen


@pytest.mark.parametrize("make", [transformer, residual])
def test_frozen_layers_become_one_op_on_one_weight(make: Callable[[], ModelProto], tmp_path: Path) -> None:
    base = make()
    paths = [save(finetune_model(base, 0.7, seed), tmp_path, f"m{seed}") for seed in (1, 2)]
    merged = merge_sources(read_sources(paths), MergeOptions(force=True))
    report = merged.report
    frozen = [row for row in report.operators if row.similarity == 1]
    assert frozen
    assert all(row.saved_bytes * 2 == row.weight_bytes for row in frozen)
    assert [row.how for row in frozen[:-1]] == ["merged"] * (len(frozen) - 1)  # of the last one the bias was tuned
    kinds = [node.op_type for node in merged.model.graph.node]
    # One concatenation for each input, and one slice for each model and value where the shared part ends.
    assert kinds.count("Concat") <= 3
    assert report.weight_bytes_after < report.weight_bytes_before - sum(row.saved_bytes for row in frozen) + 100
    merged.write(tmp_path / "merged.onnx")


def test_a_model_merged_with_itself_holds_its_weights_once(tmp_path: Path) -> None:
    base = residual()
    path = save(base, tmp_path, "m")
    merged = merge_sources(read_sources([path, path]), MergeOptions(force=True))
    assert merged.report.models == ("m", "m-2")
    assert merged.report.weight_bytes_after < 0.51 * merged.report.weight_bytes_before + 200
    merged.write(tmp_path / "merged.onnx")


def test_a_model_can_be_absent_and_batches_differ(tmp_path: Path) -> None:
    base = transformer()
    output, _ = _write_merge(tmp_path, base, finetune_model(base, 0.6))
    described = read_merged(output)
    assert described is not None
    fed = {"ids": np.full((3, 6), 7), "mask": np.ones((3, 6), np.int64)}
    results = _call(output, described.feeds({"m1": fed}))
    expected = _call(tmp_path / "m1.onnx", fed)["logits"]
    np.testing.assert_allclose(described.answers(results, "m1")["logits"], expected, rtol=1e-4, atol=1e-5)
    assert described.member("m0").absent_rows == 0


@pytest.mark.parametrize("op_type", ["MatMul", "Gemm", "Conv"])
def test_common_output_features_are_multiplied_once_wherever_each_model_has_them(op_type: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    common = random.standard_normal((12, 6, 3, 3) if op_type == "Conv" else (12, 6)).astype(np.float32)
    paths = []
    for number, (before, after) in enumerate(((0, 3), (2, 0), (1, 2))):
        b = Builder(seed=number + 1)
        sides = [random.standard_normal((count, *common.shape[1:])).astype(np.float32) for count in (before, after)]
        weight = np.concatenate([sides[0], common, sides[1]])
        bias = [b.weight(len(weight))] if op_type != "MatMul" else []
        attributes = {"transB": 1} if op_type == "Gemm" else {}
        b.add(op_type, "x", b.constant(weight.T.copy() if op_type == "MatMul" else weight), *bias, **attributes)
        b.nodes[-1].output[0] = "y"
        shape: list[int | str] = ["batch", 6, 5, 5] if op_type == "Conv" else ["batch", 6]
        given = [*shape[:1], len(weight), *([3, 3] if op_type == "Conv" else [])]
        paths.append(save(b.model({"x": (1, shape)}, {"y": (1, given)}), tmp_path, f"m{number}"))
    options = MergeOptions(force=True)
    report = merge_sources(read_sources(paths), options).write(tmp_path / "merged.onnx")
    (row,) = report.operators
    assert row.how == "super-operator"
    assert row.saved_bytes == 2 * common.nbytes
    assert report.proof is not None and report.proof.worst is not None and report.proof.worst.is_within


@pytest.mark.parametrize(
    ("original", "merged", "difference"),
    [
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([np.nan, np.inf, 2.0], [np.nan, np.inf, 2.0], 0.0),
        ([np.nan, 1.0], [0.0, 1.0], np.inf),
        ([np.inf, 1.0], [-np.inf, 1.0], np.inf),
        ([1.0, 1.0], [np.inf, 1.0], np.inf),
        ([0.0], [0.5], 0.5),
    ],
)
def test_differences_are_of_the_largest_value(original: list[float], merged: list[float], difference: float) -> None:
    assert relative_difference(np.array(original), np.array(merged)) == difference


#: Nothing pays but bytes of copies, and every byte misses.
_SLOW_MEMORY = Rates(bytes_per_s=1e3, launch_s=0.0, cache_bytes=1.0)


def _chain(widths: list[int]) -> ModelProto:
    """Return products one after another, with an op in between that may run apart."""
    b, x = Builder(), "x"
    for k, (inputs, outputs) in enumerate(pairwise(widths)):
        x = b.add("MatMul", x, b.weight(inputs, outputs))
        x = b.add("Relu" if k % 2 else "Tanh", x)
    b.nodes[-1].output[0] = "y"
    return b.model(
        {"x": (TensorProto.FLOAT, ["batch", 4, widths[0]])}, {"y": (TensorProto.FLOAT, ["batch", 4, widths[-1]])}
    )


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    widths=st.lists(st.sampled_from([2, 16, 64]), min_size=3, max_size=5),
    batch=st.sampled_from([1, 8, 64]),
    launch_us=st.sampled_from([0.0, 0.1, 1.0]),
    cache=st.sampled_from([1.0, 1e4, 1e9]),
)
def test_no_other_choice_of_steps_saves_more_time(
    widths: list[int], batch: int, launch_us: float, cache: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("chain")
    paths = [save(_chain(widths), directory, name) for name in ("a", "b")]
    sources = read_sources(paths)
    setting = GainContext((batch, batch), Rates(1e9, launch_us * 1e-6, cache))
    worth = PlanGain(make_plan(sources, group_nodes(sources, 0.4)), setting)
    steps = sorted(worth.steps)
    assert len(steps) == 2 * (len(widths) - 1)
    every = chain.from_iterable(combinations(steps, count) for count in range(len(steps) + 1))
    best = max(worth.gain_s(set(chosen)) for chosen in every)
    seconds = worth.gain_s(worth.best())
    assert seconds == pytest.approx(best, abs=len(steps) * 1e-11)  # capacities are whole picoseconds


def test_what_would_cost_time_runs_apart_on_weights_that_are_held_once(tmp_path: Path) -> None:
    base = transformer()
    paths = [save(base, tmp_path, "a"), save(finetune_model(base, 0.6), tmp_path, "b")]
    options = MergeOptions(rates=_SLOW_MEMORY, batches={"a": 64, "b": 64})
    merged = merge_sources(read_sources(paths), options)
    forced = merge_sources(read_sources(paths), replace(options, force=True))
    assert not merged.report.merged
    assert {row.how for row in merged.report.shared} == {SHARED}
    assert all("predicted to cost" in row.reason for row in merged.report.shared)
    assert merged.report.gain_s >= 0 > forced.report.gain_s
    assert [row.operators for row in merged.report.shared] == [row.operators for row in forced.report.merged]
    assert merged.report.saved_bytes == pytest.approx(forced.report.saved_bytes, rel=0.01)
    report = merged.write(tmp_path / "m.onnx")
    assert report.proof is not None
    assert report.proof.worst is not None
    assert report.proof.worst.relative == 0.0  # every model runs its own ops
