from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gpuprof.serving import server as server_module
from gpuprof.serving.machine.orders import WorkerOrder
from gpuprof.serving.router.worker import ProcessWorker
from gpuprof.serving.server import Server

ORDER = WorkerOrder("m", "1", "null:4", 1)


class SilentWorker(ProcessWorker):
    """A worker that has owed an answer since 0."""

    def __init__(self) -> None:
        super().__init__("m/0.0", ORDER, 5.0, cast(Any, None), cast(Any, None))
        self.is_ready, self.sent, self.killed = True, {1: cast(Any, SimpleNamespace(expected_ms=0.0))}, False
        self.identity = [7]

    def _silent_s(self, now: float) -> float:
        return now

    def _kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("ticks", "killed"),
    [((4.0, 4.5, 5.0, 5.5), True), ((4.0, 7.0, 11.5, 11.9), False), ((4.0, 9.0, *np.arange(9.5, 14.6, 0.5)), True)],
)
def test_a_worker_is_not_killed_for_what_the_router_did_not_hear(
    ticks: Sequence[float], killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stall of the router's process, workers get the whole limit again."""
    worker, clock = SilentWorker(), iter((3.5, *ticks))

    async def ignore(*_: object) -> None:
        pass

    server = SimpleNamespace(
        _settings=SimpleNamespace(hang_s=5.0),
        _worker_fleet=SimpleNamespace(workers=[worker]),
        _front=SimpleNamespace(watch=ignore),
        router=SimpleNamespace(list_models=list),
        _arena=SimpleNamespace(trim=lambda: None),
    )
    monkeypatch.setattr(server_module, "asyncio", SimpleNamespace(sleep=ignore))
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(Server._watch(cast(Any, server)))
    assert worker.killed == killed
