"""Peak memory of models: measured, on the line between batches, weights and activations, or unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import helper

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import INTERPOLATED, MEASURED, Workload
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu.execution import parse_execution
from gpuprof.estimators.database import ModelMemory, hold_graph
from gpuprof.estimators.measured.known_models import KnownModels
from gpuprof.estimators.memory import peak_activation_bytes, predict_held, predict_process
from gpuprof.graph.load import load_graph
from tests.estimators.rows import CPU, database, measured_row, two_layers
from tests.small_models import write_model


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
