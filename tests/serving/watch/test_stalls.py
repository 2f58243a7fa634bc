from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuprof.serving.machine.orders import WorkerOrder
from gpuprof.serving.router.worker import ProcessWorker
from gpuprof.serving.watch.statistics import StallMeter

ORDER = WorkerOrder("m", "1", "null:4", 1)


def test_what_runs_late_is_a_stall_and_what_is_nearly_in_time_is_none() -> None:
    meter = StallMeter(0.0)
    for now in (0.06, 0.12, 3.12, 3.18):
        meter.observe_tick(now)
    assert meter.count == 1 and meter.longest_s == pytest.approx(2.95)
    assert meter.stalled_since(1.0, 3.2) == pytest.approx(2.95)
    assert meter.stalled_since(3.13, 3.2) == 0.0


def test_a_stall_that_began_while_the_server_started_is_forgotten() -> None:
    meter = StallMeter(time.monotonic() - 10.0)
    meter.forget()
    assert meter.count == 0 and meter.longest_s == 0.0
    assert meter.stalled_since(math.inf, time.monotonic()) == 0.0


def test_a_stall_that_goes_on_counts_already() -> None:
    meter = StallMeter(0.0)
    assert meter.stalled_since(0.0, 10.0) == pytest.approx(9.95)


class SilentWorker(ProcessWorker):
    """A worker that has owed an answer since 0."""

    def __init__(self, is_ready: bool) -> None:
        super().__init__("m/0.0", ORDER, 5.0, cast(Any, None), cast(Any, None))
        self.is_ready, self.sent, self.killed = is_ready, {1: cast(Any, SimpleNamespace(expected_ms=0.0))}, False
        self.identity = [7]

    def _silent_s(self, now: float) -> float:
        return now

    def _kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(("stalled_s", "killed"), [(0.0, True), (9.0, False), (4.0, True)])
def test_a_worker_is_not_killed_for_what_the_router_did_not_hear(stalled_s: float, killed: bool) -> None:
    worker = SilentWorker(is_ready=True)
    worker.watch(10.0, lambda since, now: stalled_s)
    assert worker.killed == killed


def test_a_worker_that_loads_for_ever_is_ended() -> None:
    """Stopped while it loads it says nothing, and whoever applies a map would wait for it."""
    worker = SilentWorker(is_ready=False)
    start, ended_after_s = 1000.0, 1800.0
    worker.watch(start)
    worker.watch(start + ended_after_s - 1.0)
    assert not worker.killed
    worker.watch(start + ended_after_s + 1.0, lambda since, now: 5.0)  # the router itself did not listen
    assert not worker.killed
    worker.watch(start + ended_after_s + 1.0)
    assert worker.killed
