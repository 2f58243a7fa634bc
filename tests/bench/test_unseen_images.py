"""Published image networks: each board is known, and their lines are one run each."""

from __future__ import annotations

from bench.unseen_images import PublishedRun, read_runs
from gpuprof.domain.catalogue import device
from gpuprof.estimators.cross_gpu.kernels import LaunchMode


def test_every_published_run_is_told_once_and_is_of_a_board_with_its_precision() -> None:
    runs = list(read_runs())
    keys = {(run.way, run.model, run.batch) for run in runs}
    assert len(keys) == len(runs) > 250
    assert all(run.precision in run.board.flops_per_s for run in runs)


def test_compiled_networks_and_those_of_tensorrt_are_estimated_as_fused() -> None:
    modes = {run.execution: run.runtime for run in read_runs()}
    assert modes["compiled"] == modes["TensorRT"] == LaunchMode.FUSED
    assert modes["eager"] == modes["eager, channels last"] == LaunchMode.EAGER


def test_the_max_q_board_differs_from_the_server_edition_by_its_data_sheet() -> None:
    board = PublishedRun("timm", "rtx-pro-6000-max-q", "bfloat16", "compiled", 1, "resnet50", 1.0).board
    server = device("rtx-pro-6000")
    assert board.compute_units == server.compute_units
    assert board.max_power_w == 300.0
    assert board.flops_per_s["float32"] < server.flops_per_s["float32"]
