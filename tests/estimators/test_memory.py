"""Memory of models: buffers of an arena, weights counted once, measured peaks, and what processes reserve."""

from dataclasses import replace
from pathlib import Path

import pytest
from onnx import helper

import gpuprof
from bench.v100_profiles import v100_profiles
from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import INTERPOLATED, MEASURED, PREDICTED, Figure, Workload, classify_source
from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.domain.share import Share
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.cross_gpu.kernels import parse_execution
from gpuprof.estimators.database import ModelMemory, hold_graph
from gpuprof.estimators.measured.known_models import KnownModels
from gpuprof.estimators.memory import (
    arena_footprint,
    list_parts,
    peak_activation_bytes,
    predict_held,
    predict_process,
    predict_reserved,
    shrink_context,
)
from gpuprof.graph.load import load_graph
from tests.estimators.rows import CPU, database, measured_row, two_layers
from tests.small_models import write_model

KIB = 256  # float32 values in a kibibyte


def _tensor(name: str, kib: int) -> Tensor:
    return Tensor(name, "float32", (kib * KIB,))


def _graph(*ops: tuple[str, str, list[tuple[str, int]], tuple[str, int]]) -> ModelGraph:
    """Make a graph of (op type, name, inputs, output); the last op's output is the graph's, "x" its input."""
    made = tuple(
        Op(name, kind, "", tuple(_tensor(*tensor) for tensor in inputs), (_tensor(*output),), (), {}, 0, 0, 0)
        for kind, name, inputs, output in ops
    )
    return ModelGraph("g", 1, made, (_tensor("x", 4),), made[-1].outputs, (), 17, "", "")


def test_an_activation_writes_over_what_nobody_else_reads() -> None:
    alone = _graph(("Conv", "c", [("x", 4)], ("a", 8)), ("Relu", "r", [("a", 8)], ("y", 8)))
    assert arena_footprint(alone).peak == arena_footprint(alone).reserved == 8 * 1024
    read_again = _graph(
        ("Conv", "c", [("x", 4)], ("a", 8)),
        ("Relu", "r", [("a", 8)], ("b", 8)),
        ("Concat", "j", [("a", 8), ("b", 8)], ("y", 16)),
    )
    assert arena_footprint(read_again).peak == (8 + 8 + 16) * 1024


def test_a_view_costs_nothing_and_keeps_its_buffer_until_it_is_read() -> None:
    conv, view = ("Conv", "c", [("x", 4)], ("a", 8)), ("Reshape", "v", [("a", 8)], ("b", 8))
    assert arena_footprint(_graph(conv, view, ("MatMul", "m", [("b", 8)], ("y", 2)))).peak == 10 * 1024


def test_what_nobody_reads_is_let_go_at_once_and_what_the_model_gives_is_kept() -> None:
    unread, read = ("Conv", "1", [("x", 4)], ("unread", 8)), ("Conv", "2", [("x", 4)], ("a", 8))
    assert arena_footprint(_graph(unread, read, ("Conv", "3", [("a", 8)], ("y", 8)))).peak == 16 * 1024


def test_a_free_buffer_serves_again_and_a_much_larger_one_is_cut() -> None:
    chain = _graph(
        ("Conv", "1", [("x", 4)], ("a", 8)),
        ("Conv", "2", [("a", 8)], ("b", 8)),
        ("Conv", "3", [("b", 8)], ("c", 8)),
        ("Conv", "4", [("c", 8)], ("y", 2)),
    )
    footprint = arena_footprint(chain)
    assert (footprint.peak, footprint.reserved) == (16 * 1024, 16 * 1024)


def test_what_grows_fits_no_free_buffer_so_that_more_is_reserved_than_used() -> None:
    growing = _graph(
        ("Conv", "1", [("x", 4)], ("a", 4)),
        ("Conv", "2", [("a", 4)], ("b", 8)),
        ("Conv", "3", [("b", 8)], ("c", 16)),
        ("Conv", "4", [("c", 16)], ("y", 32)),
    )
    footprint = arena_footprint(growing)
    assert footprint.peak == (16 + 32) * 1024
    assert footprint.reserved == (4 + 8 + 16 + 32) * 1024


def test_weights_that_layers_share_are_counted_once(tmp_path: Path) -> None:
    graph = load_graph(two_layers(tmp_path / "two.onnx"))
    first, relu, second = graph.ops
    shared = replace(second, inputs=(second.inputs[0], first.inputs[1]), weights=first.weights)
    twice, once = (list_parts(replace(graph, ops=(first, relu, last)))[0] for last in (second, shared))
    assert twice == 2 * once == 2 * 64 * 64 * 4


_MIB = 2.0**20


def test_the_interval_holds_what_the_thesis_measured_of_resnet50_and_vgg19() -> None:
    v100 = device("v100")
    rows = v100_profiles().rows
    measured = {(row.model, row.batch): (row.memory_pct or 0.0) / 100.0 * v100.dram_bytes for row in rows}
    # Weights, and activations of one image: a convolution's input and output, the largest of which are at the start.
    for model, weights, activations in (("resnet50", 97.5 * _MIB, 9.19 * _MIB), ("vgg19", 548.0 * _MIB, 24.5 * _MIB)):
        for batch in (4, 16, 64, 128):
            figure = predict_reserved(weights, batch * activations)
            assert figure.low is not None and figure.low <= measured[model, batch] <= figure.upper()
            assert figure.low >= weights and classify_source(figure.source) == PREDICTED


def test_an_unmeasured_model_has_more_memory_than_its_weights_with_an_interval(tmp_path: Path) -> None:
    file = gpuprof.build_model("mlp", tmp_path / "mlp.onnx")
    estimator = make_estimator("database", None, {"mlp": file})
    small, large = (estimator.estimate("mlp", device("v100"), batch, Share()).memory_bytes for batch in (1, 64))
    assert small is not None and large is not None and small.low is not None and large.low is not None
    assert small.low < small.value < small.upper()
    assert large.value > small.value > file.stat().st_size
    # Beside the process itself nearly all of it is weights.
    assert small.low == pytest.approx(300.0 * _MIB + file.stat().st_size, rel=0.05)


def test_the_interval_holds_what_processes_of_onnx_runtime_held_of_an_h200() -> None:
    # Weights, activations alive at once, and what NVML told (`bench/gpu/results`), in MiB.
    for weights, activations, held in (
        (97.7, 588.0, 2336.8),
        (97.7, 9.2, 840.8),
        (13.3, 590.0, 2152.8),
        (416.2, 317.0, 2320.8),
        (416.2, 5.0, 1220.8),
    ):
        figure = predict_held(weights * _MIB, activations * _MIB)
        assert figure.low is not None and figure.low <= held * _MIB <= figure.upper()
        assert abs(figure.value / (held * _MIB) - 1.0) < 0.2
        assert classify_source(figure.source) == PREDICTED


@pytest.mark.parametrize(("sms", "measured_mib"), [(12, 727), (26, 779), (38, 821), (66, 929), (92, 1021), (132, 1181)])
def test_a_context_shrinks_with_the_sms_that_mps_grants(sms: int, measured_mib: int) -> None:
    """ResNet-50 at batch 16 on an H200 (bench/gpu/results): the memory differs by what the context takes."""
    whole = Figure(1181.0 * _MIB, "process", 600.0 * _MIB, 2000.0 * _MIB)
    part = shrink_context(whole, sms / 132)
    assert part.value / _MIB == pytest.approx(measured_mib, rel=0.025)
    assert part.low is not None and part.low <= part.value and part.high == whole.high


def test_memory_between_measured_batches_is_on_their_line(tmp_path: Path) -> None:
    rows = [measured_row("net", batch, 2.0, memory=500 + 1000 * batch) for batch in (1, 4, 8)]
    models = KnownModels(database(tmp_path / "db", rows), None)
    memory, net = ModelMemory(models, lambda device: None), models.find_model("net")
    four, six = (memory.peak(net, CPU, Workload("net", batch, Share())) for batch in (4, 6))
    assert four is not None and (four.value, four.source) == (4500.0, MEASURED)
    assert six is not None and (six.value, six.source) == (6500.0, INTERPOLATED)


def test_a_batch_fits_while_its_predicted_peak_is_within_the_share(tmp_path: Path) -> None:
    models = KnownModels(None, None)
    model = models.find_model(str(two_layers(tmp_path / "two.onnx", width=64)))
    memory = ModelMemory(models, lambda device: None)
    per_item = 2 * 64 * 4
    largest = int(CPU.memory_bytes(Share()) - 2 * 64 * 64 * 4) // per_item
    assert memory.fits(model, CPU, largest, Share())
    assert not memory.fits(model, CPU, largest + 1, Share())


def test_where_nothing_tells_the_memory_a_batch_is_taken_to_fit(tmp_path: Path) -> None:
    models = KnownModels(database(tmp_path / "db", [measured_row("net", 1, 2.0)]), None)
    memory, net = ModelMemory(models, lambda device: None), models.find_model("net")
    assert memory.peak(net, CPU, Workload("net", 64, Share())) is None
    assert memory.fits(net, CPU, 64, Share())


@pytest.mark.parametrize(
    ("precision", "weight_bytes", "activation_bytes"),
    [
        (None, 4, 4),
        ("float32", 4, 4),
        ("tf32", 4, 4),
        ("float16", 2, 2),
        ("bfloat16", 2, 2),
        ("fp8", 1, 2),
        ("int8", 1, 2),
    ],
)
def test_memory_is_that_of_the_precision_that_is_asked_for(
    tmp_path: Path, precision: str | None, weight_bytes: int, activation_bytes: int
) -> None:
    models, gpu = KnownModels(None, None), device("l40s")
    model = models.find_model(str(two_layers(tmp_path / "two.onnx", width=64)))
    for runtime, predict in ((None, predict_held), ("eager", predict_process)):
        memory = ModelMemory(models, lambda device: None, parse_execution(precision, runtime))
        for batch in (1, 256):
            peak = memory.peak(model, gpu, Workload(model.name, batch, Share()))
            expected = predict(2 * 64 * 64 * weight_bytes, 2 * 64 * batch * activation_bytes, precision)
            assert peak == expected
            assert (precision or "scaled") in expected.source


def test_scores_of_attention_that_is_one_kernel_are_never_in_memory(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "turned"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"]),
        helper.make_node("MatMul", ["weights", "x"], ["y"]),
    ]
    whole = load_graph(write_model(tmp_path / "attention.onnx", nodes, {"x": ["batch", 512, 16]}, {"y": None}), 1)
    scores = next(op.outputs[0] for op in whole.ops if op.op_type == "Softmax")
    held = hold_graph(whole, "float16", retyped=False)
    assert not any(tensor.elements == scores.elements for op in held.ops for tensor in op.outputs)
    assert peak_activation_bytes(held) < scores.bytes < peak_activation_bytes(whole)
    assert hold_graph(whole, "tfloat32", retyped=False) == whole
