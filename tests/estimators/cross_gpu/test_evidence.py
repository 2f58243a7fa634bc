"""An answer says where no measurement was ever held against such an estimate."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.ledger import PAGE, read_table
from gpuprof.domain.catalogue import device, devices
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu import evidence
from gpuprof.estimators.cross_gpu.evidence import list_compared_boards
from gpuprof.estimators.cross_gpu.execution import parse_execution
from gpuprof.estimators.cross_gpu.kernels import LaunchMode
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build


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
