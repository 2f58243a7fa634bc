"""Published image networks: each board is known, and their lines are one run each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.unseen_images import PublishedRun, estimate, estimate_unthrottled, read_runs
from gpuprof.domain.catalogue import device
from gpuprof.estimators.cross_gpu.kernels import LaunchMode
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build


def test_every_published_run_is_told_once_and_is_of_a_board_with_its_precision() -> None:
    runs = list(read_runs())
    keys = {(run.way, run.model, run.batch) for run in runs}
    assert len(keys) == len(runs) > 250
    assert all(run.precision in run.board.flops_per_s for run in runs)


def test_compiled_networks_and_those_of_tensorrt_are_estimated_as_fused() -> None:
    modes = {run.execution: run.runtime for run in read_runs()}
    assert modes["compiled"] == modes["TensorRT"] == LaunchMode.FUSED
    assert modes["eager"] == modes["eager, channels last"] == LaunchMode.EAGER_FUSED


def test_the_max_q_board_differs_from_the_server_edition_by_its_data_sheet() -> None:
    board = PublishedRun("timm", "rtx-pro-6000-max-q", "bfloat16", "compiled", 1, "resnet50", 1.0).board
    server = device("rtx-pro-6000")
    assert board.compute_units == server.compute_units
    assert board.max_power_w == 300.0
    assert board.flops_per_s["float32"] < server.flops_per_s["float32"]


def test_a_gpu_that_rests_between_batches_keeps_its_boost_clock(tmp_path: Path) -> None:
    build(find_architecture("resnet50"), tmp_path / "resnet50.onnx")
    run = PublishedRun("paddleclas", "t4", "float32", "TensorRT", 8, "resnet50", 575.3)
    hot, rested = estimate(run, tmp_path).value, estimate_unthrottled(run, tmp_path)
    # Convolutions are most of the time, and the power limit leaves them 0.54 of the T4's float32 rate.
    assert 0.54 * hot < rested < 0.8 * hot
    a100 = replace(run, device="a100-80", precision="tfloat32")
    assert 0.8 * estimate(a100, tmp_path).value < estimate_unthrottled(a100, tmp_path)
