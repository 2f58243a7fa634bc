"""Ends of a search: by its time limit, and by Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuprof
from gpuprof.pipeline.result import Progress
from gpuprof.placement.limit import Limit, interruptible, is_interrupted


@pytest.fixture
def demands(tmp_path: Path) -> list[gpuprof.Demand]:
    """Two unprofiled models that take several devices, which nothing proves to be the least."""
    files = [gpuprof.build_model("random_mlp", tmp_path / f"m{seed}.onnx", seed=seed) for seed in (1, 2)]
    rates_rps = (30_000.0, 40_000.0)
    return [
        gpuprof.Demand(str(file), rate_rps=rate, slo=gpuprof.Slo(3.0))
        for file, rate in zip(files, rates_rps, strict=True)
    ]


@pytest.fixture(autouse=True)
def default_interrupt() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal; background jobs of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_search_without_time_still_meets_every_demand(tmp_path: Path) -> None:
    # The replicas of the first fit are together too slow here: it takes a second one at a higher rate.
    file = gpuprof.build_model("squeezenet", tmp_path / "squeezenet.onnx")
    demand = gpuprof.Demand(str(file), rate_rps=2000.0, slo=gpuprof.Slo(8.0))
    plan = gpuprof.place([demand], fleet="t4", options=gpuprof.PlanningOptions(time_limit_s=0.001))
    assert plan.is_complete and plan.deployment.predicted.gpus > 1


def test_ctrl_c_keeps_the_best_map(demands: list[gpuprof.Demand]) -> None:
    steps: list[str] = []

    def interrupt(progress: Progress) -> None:
        steps.append(progress.step)
        if "demands: " in progress.step and sum("demands: " in step for step in steps) == 1:
            signal.raise_signal(signal.SIGINT)

    plan = gpuprof.place(demands, fleet="t4", progress=interrupt)
    assert plan.is_complete
    assert any("planning 2 demands: " in step and "devices" in step for step in steps)
    if plan.deployment.planned_with.stopped_by is not None:
        assert plan.deployment.planned_with.stopped_by == "interrupt"
        assert any("the interrupt ended the search early" in note for note in plan.notes)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not is_interrupted()


def test_a_second_ctrl_c_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)
        assert is_interrupted()
        assert Limit(600.0).is_over and not Limit().is_over  # what has no limit runs to its end
        signal.raise_signal(signal.SIGINT)
    assert not is_interrupted()
