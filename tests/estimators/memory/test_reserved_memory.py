"""Memory of models that nobody measured on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpuprof
from bench.v100_profiles import v100_profiles
from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import PREDICTED, Figure, classify_source
from gpuprof.domain.share import Share
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.memory.reserved_memory import predict_held, predict_reserved, shrink_context

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
