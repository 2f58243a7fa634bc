import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gpuprof.errors import UnavailableError
from gpuprof.runtime.providers import ORT_CPU, ORT_CUDA
from gpuprof.serving import server as server_module
from gpuprof.serving.machine.orders import WorkerOrder
from gpuprof.serving.router.worker import BatchAnswer, ProcessWorker, SentBatch, ServedWorker
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
def test_a_stalled_router_kills_nobody(ticks: Sequence[float], killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


class Events:
    """A replica that notes how long batches took."""

    def __init__(self) -> None:
        self.took_ms: list[float] = []

    def on_batch_done(self, batch: SentBatch, answer: BatchAnswer) -> None:
        self.took_ms.append(batch.took_ms)

    def on_worker_ready(self, *_: object) -> None:
        pass

    on_batch_failed = on_batches_lost = on_worker_ready


class StubWorker(ServedWorker):
    """A ready worker that answers when the test says so, after it ran for ``run_ms`` by its own account."""

    def __init__(self, run_ms: float = 1.0, deaths: int = 0, provider: str = ORT_CPU) -> None:
        super().__init__("m/0.0", WorkerOrder("m", "1", "m.onnx", 1, provider=provider), 5.0)
        self._events = Events()
        self.replica = cast(Any, self._events)
        self._stub_ms, self._deaths = run_ms, deaths

    @property
    def took_ms(self) -> list[float]:
        return self._events.took_ms

    async def _begin(self) -> None:
        for _ in range(self._deaths):
            self._on_loss()
        self._on_ready(cast(Any, object()))

    async def _end(self) -> None:
        pass

    def _transmit(self, batch: SentBatch) -> None:
        pass

    def watch(self, now: float) -> None:
        pass

    def finish(self) -> None:
        self._on_done(self.sent.pop(min(self.sent)), BatchAnswer(0, int(1e6 * self._stub_ms), 0, [], 1))

    def fail(self) -> None:
        self._on_failure(self.sent.pop(min(self.sent)), "bad index")


def play(scene: Callable[[StubWorker], Awaitable[None]], *arguments: Any) -> None:
    async def run() -> None:
        await scene(StubWorker(*arguments))

    asyncio.run(run())


@pytest.mark.parametrize(("run_ms", "batches"), [(0.001, 32), (0.5, 10), (2.0, 3), (20.0, 2)])
def test_a_worker_has_at_hand_what_it_runs_in_five_ms_and_one_batch_at_least(run_ms: float, batches: int) -> None:
    async def scene(worker: StubWorker) -> None:
        def fill() -> int:
            while worker.is_idle or worker.can_prefetch(5.0):
                worker.send([], 1, 100.0, 0.0)
            return len(worker.sent)

        assert not worker.can_prefetch(5.0)
        await worker.start()
        assert fill() == 2  # nothing is known of its times yet, and what is expected of it is no measurement
        worker.finish()
        assert fill() == batches

    play(scene, run_ms)


@pytest.mark.parametrize(("provider", "deaths", "may"), [(ORT_CUDA, 0, True), (ORT_CUDA, 1, False), (ORT_CPU, 1, True)])
def test_a_worker_that_copies_ahead_is_given_nothing_beside_a_suspect(provider: str, deaths: int, may: bool) -> None:
    async def scene(worker: StubWorker) -> None:
        await worker.start()
        worker.send([cast(Any, SimpleNamespace(deaths=deaths))], 1, 1.0, 0.0)
        assert worker.can_prefetch(5.0) is may

    play(scene, 1.0, 0, provider)


def test_what_is_expected_after_a_batch_that_failed_are_the_others() -> None:
    async def scene(worker: StubWorker) -> None:
        await worker.start()
        began = time.monotonic() - 1000.0
        for _ in range(100):  # one is always sent in advance
            worker.send([], 1, 1e6, began)
            worker.send([], 1, 1e6, began)
            worker.fail()
            assert 0.0 < worker.busy_ms(time.monotonic()) <= 1e6
            worker.fail()
        worker.send([], 1, 1e6, began)
        worker.finish()
        assert worker.took_ms[0] < 500e3, "the batch began when the one before it had failed"

    play(scene)


@pytest.mark.parametrize(("deaths", "is_ready"), [(2, True), (3, False)])
def test_a_worker_that_dies_while_it_loads_is_tried_three_times(deaths: int, is_ready: bool) -> None:
    async def scene(worker: StubWorker) -> None:
        if is_ready:
            await worker.start()
        else:
            with pytest.raises(UnavailableError, match=r"ended 3 times while it loaded m\.onnx"):
                await worker.start()

    play(scene, 1.0, deaths)
