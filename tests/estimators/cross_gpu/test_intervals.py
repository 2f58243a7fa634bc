"""Intervals of unmeasured GPUs: by kinds of ops and parts of a model's time; what was compared with measurements."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.ledger import PAGE, read_table
from gpuprof.domain.catalogue import device, devices
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu import cross_gpu
from gpuprof.estimators.cross_gpu import intervals as evidence
from gpuprof.estimators.cross_gpu.execution import parse_execution
from gpuprof.estimators.cross_gpu.features import make_table, stack_tables
from gpuprof.estimators.cross_gpu.intervals import (
    ErrorScales,
    TimeParts,
    generation_of,
    list_compared_boards,
    name_kinds,
)
from gpuprof.estimators.cross_gpu.kernels import LaunchMode
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build

SCALES = ErrorScales(
    ops={"product": 0.2, "softmax": 0.4},
    op_factors={"": 1.0, " old": 2.0},
    model_factors={"any": 1.0, "any old": 3.0, "products cores": 0.5},
    host=0.7,
)


def test_kinds_tell_products_by_their_operands_and_by_what_they_run_on() -> None:
    ops = stack_tables(
        [
            make_table("matmul", 1),
            make_table("matmul", 1, extra=1.0),
            make_table("conv", 1),
            make_table("movement", 1),
            make_table("attention", 1, m=1.0, n=64.0),
            make_table("attention", 1, m=64.0, n=64.0, causal=1.0),
        ]
    )
    assert name_kinds(ops, tensor=False).tolist() == [
        "product", "batched product", "conv", "elementwise", "generation", "context",
    ]  # fmt: skip
    wide, narrow = (name_kinds(replace(ops, width=np.full(6, width)), tensor=True)[:3] for width in (2.0, 1.0))
    assert set(wide) == {"product tensor"} and set(narrow) == {"product narrow"}


def test_ops_are_widened_by_the_scale_of_their_kind_and_the_generation() -> None:
    kinds = np.array(["product", "softmax", "never measured"])
    assert np.log(SCALES.widen_ops(kinds, "")) == pytest.approx([0.2, 0.4, 0.4])
    assert np.log(SCALES.widen_ops(kinds, " old")) == pytest.approx([0.4, 0.8, 0.8])


def test_a_model_is_widened_by_the_mean_scale_of_its_kernels() -> None:
    parts = TimeParts(1.0, 0.1, {"product": 0.75, "softmax": 0.25})
    assert np.log(SCALES.widen_model(parts, "products cores", "")) == pytest.approx(0.5 * 0.25)
    assert np.log(SCALES.widen_model(parts, "convolutions cores", "")) == pytest.approx(0.25)
    assert np.log(SCALES.widen_model(parts, "products cores", " old")) == pytest.approx(3 * 0.25)


def test_errors_of_ops_are_not_taken_to_cancel_where_nothing_was_compared() -> None:
    parts = TimeParts(1.0, 0.1, {"product": 1.0})
    scales = replace(SCALES, op_factors={"": 1.5, " old": 4.0})
    for kind, generation, compared, never in (
        ("products cores", "", 0.5, 1.5),
        ("products cores", " old", 3.0, 4.0),
        ("convolutions cores", "", 1.5, 1.5),
    ):
        for is_compared, factor in ((True, compared), (False, never)):
            widened = scales.widen_model(parts, kind, generation, is_compared=is_compared)
            assert np.log(widened) == pytest.approx(factor * 0.2)


def test_where_the_host_takes_longer_its_own_scale_counts() -> None:
    host = TimeParts(0.5, 1.0, {"product": 0.5})
    assert np.log(SCALES.widen_model(host, "products cores", "")) == pytest.approx(0.7)
    assert np.log(SCALES.widen_model(host, "products cores", "", named_host=True)) == pytest.approx(0.5 * 0.2)
    near = TimeParts(1.0, 0.9, {"product": 1.0})
    assert SCALES.widen_model(near, "products cores", "") == pytest.approx(0.9 * np.exp(0.7))


def test_generations_part_at_volta() -> None:
    assert [generation_of(device(name)) for name in ("p4", "p100", "v100", "h100")] == [" old", " old", "", ""]


def test_scales_are_read_as_they_are_written() -> None:
    assert ErrorScales.of_text(SCALES.to_text()) == SCALES


def test_intervals_that_are_not_those_that_ship_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cross_gpu"
    shutil.copytree(str(cross_gpu.trained_folder()), folder)
    path = folder / "intervals.json"
    path.write_text(SCALES.to_text())
    monkeypatch.setattr(cross_gpu, "trained_folder", lambda: folder)
    with pytest.raises(InputError, match=r"intervals\.json is not the file that was trained"):
        cross_gpu.shipped_model.__wrapped__()


def test_shipped_intervals_are_wider_before_volta_and_know_every_kind_of_kernel() -> None:
    scales = cross_gpu.shipped_model().scales
    assert scales.op_factors[" old"] > scales.op_factors[""] > 0.5
    kinds = {"product", "batched product", "conv", "elementwise", "norm", "softmax", "product tensor", "product narrow"}
    assert kinds | {"context", "generation", "encoder"} == set(scales.ops)
    assert all(0.02 < scale < 2.0 for scale in scales.ops.values())


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("evidence") / "transformer_encoder.onnx"
    build(find_architecture("transformer_encoder"), path)
    return str(path)


def _source(network: str, gpu: str, precision: str, runtime: str) -> str:
    estimator = DatabaseEstimator(None, execution=parse_execution(precision, runtime))
    return estimator.estimate(network, device(gpu), 8, Share()).latency_ms.source


def test_an_estimate_names_what_was_never_compared(network: str) -> None:
    assert _source(network, "t4", "float16", "onnxruntime") == "cross-gpu: float16, onnxruntime"
    assert _source(network, "h100", "float16", "onnxruntime").endswith(", never compared on this board")
    assert _source(network, "t4", "int8", "tensorrt").endswith("tensorrt, never compared")


def test_what_was_never_compared_anywhere_has_the_wider_interval(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def width() -> float:
        estimator = DatabaseEstimator(None, execution=parse_execution("float32", "pytorch-eager"))
        figure = estimator.estimate(network, device("t4"), 256, Share()).latency_ms
        return figure.upper() / figure.value

    compared = width()
    monkeypatch.setattr(evidence, "_read_compared", dict)
    assert width() > 1.1 * compared


def test_the_fusion_of_attention_matters_in_half_precision_alone() -> None:
    fused, plain = LaunchMode.EAGER_FUSED, LaunchMode.EAGER
    assert list_compared_boards(fused, "float32", "products") == list_compared_boards(plain, "float32", "products")
    assert list_compared_boards(fused, "float16", "products") != list_compared_boards(plain, "float16", "products")


def test_every_line_of_the_ledger_is_among_what_was_compared() -> None:
    lines = read_table(PAGE.read_text(encoding="utf-8"))
    assert lines
    for line in lines:
        runtime, precision, board, _ = line.name.partition(": ")[2].split(", ")
        assert board in list_compared_boards(LaunchMode(runtime), precision, "products"), line.name


def test_compared_boards_are_in_the_catalogue() -> None:
    boards = {board for compared in evidence._read_compared().values() for board in compared}
    assert boards <= set(devices())
    assert Path(PAGE).is_file()
