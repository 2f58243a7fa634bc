"""What one worker is given in advance: one batch, and more of quick ones."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuprof.errors import UnavailableError
from gpuprof.runtime.providers import ORT_CPU, ORT_CUDA
from gpuprof.serving.machine.launcher import WorkerOrder
from gpuprof.serving.router.worker_handle import WorkerHandle
from gpuprof.serving.router.worker_link import BatchAnswer, LinkEvents, SentBatch
from gpuprof.serving.transport.inference import Inference


class StubLink:
    """A ready worker that answers when the test says so, after it ran for ``run_ms`` by its own account."""

    spec = object()
    pid = 1

    def __init__(self, events: LinkEvents, run_ms: float) -> None:
        self._events, self._run_ms = events, run_ms
        self.is_ready = False
        self.sent: dict[int, SentBatch] = {}
        self._numbers = 0

    async def start(self, order: Any) -> None:
        self.is_ready = True
        self._events.on_ready(cast(Any, self.spec))

    def send(self, inferences: list[Inference], rows: int, expected_ms: float, now: float) -> None:
        self._numbers += 1
        self.sent[self._numbers] = SentBatch(self._numbers, inferences, rows, expected_ms, now)

    def finish(self) -> None:
        batch = self.sent.pop(min(self.sent))
        self._events.on_done(batch, BatchAnswer(0, int(1e6 * self._run_ms), 0, [], 1))

    def fail(self) -> None:
        self._events.on_failure(self.sent.pop(min(self.sent)), "bad index")


@pytest.mark.parametrize(("run_ms", "batches"), [(0.001, 32), (0.5, 10), (2.0, 3), (20.0, 2)])
def test_a_worker_has_at_hand_what_it_runs_in_five_milliseconds_and_one_batch_at_least(
    run_ms: float, batches: int
) -> None:
    async def ask() -> None:
        links = list[StubLink]()

        def connect(events: LinkEvents) -> Any:
            links.append(StubLink(events, run_ms))
            return links[0]

        handle = WorkerHandle("m/0.0", WorkerOrder("m", "1", "m.onnx", 1), connect, hang_s=5.0)
        handle.bind(lambda: None, lambda batch, answer: None, lambda batch, text: None, lambda lost: None)
        assert not handle.can_prefetch(5.0)
        await handle.start()

        def fill() -> int:
            while handle.is_idle or handle.can_prefetch(5.0):
                handle.send([], 1, 100.0, 0.0)
            return handle.batches

        assert fill() == 2  # nothing is known of its times yet, and what is expected of it is no measurement
        links[0].finish()
        assert fill() == batches

    asyncio.run(ask())


@pytest.mark.parametrize(("provider", "deaths", "may"), [(ORT_CUDA, 0, True), (ORT_CUDA, 1, False), (ORT_CPU, 1, True)])
def test_a_worker_that_copies_ahead_is_given_nothing_beside_what_another_died_of(
    provider: str, deaths: int, may: bool
) -> None:
    async def ask() -> None:
        order = WorkerOrder("m", "1", "m.onnx", 1, provider=provider)
        handle = WorkerHandle("m/0.0", order, lambda events: cast(Any, StubLink(events, 1.0)), hang_s=5.0)
        handle.bind(lambda: None, lambda batch, answer: None, lambda batch, text: None, lambda lost: None)
        await handle.start()
        handle.send([cast(Any, SimpleNamespace(deaths=deaths))], 1, 1.0, 0.0)
        assert handle.can_prefetch(5.0) is may

    asyncio.run(ask())


def test_what_is_expected_after_a_batch_that_failed_are_the_others() -> None:
    async def ask() -> None:
        links, took_ms = list[StubLink](), list[float]()

        def connect(events: LinkEvents) -> Any:
            links.append(StubLink(events, 1.0))
            return links[0]

        handle = WorkerHandle("m/0.0", WorkerOrder("m", "1", "m.onnx", 1), connect, hang_s=5.0)
        handle.bind(
            lambda: None,
            lambda batch, answer: took_ms.append(batch.took_ms),
            lambda batch, text: None,
            lambda lost: None,
        )
        await handle.start()
        began = time.monotonic() - 1000.0
        for _ in range(100):  # one is always sent in advance
            handle.send([], 1, 1e6, began)
            handle.send([], 1, 1e6, began)
            links[0].fail()
            assert 0.0 < handle.busy_ms(time.monotonic()) <= 1e6
            links[0].fail()
        handle.send([], 1, 1e6, began)
        links[0].finish()
        assert took_ms[0] < 500e3, "the batch began when the one before it had failed"

    asyncio.run(ask())


@pytest.mark.parametrize(("deaths", "is_ready"), [(2, True), (3, False)])
def test_a_worker_that_dies_while_it_loads_is_tried_three_times(deaths: int, is_ready: bool) -> None:
    class DyingLink(StubLink):
        async def start(self, order: Any) -> None:
            for _ in range(deaths):
                self._events.on_loss([])
            await super().start(order)

    async def load() -> None:
        order = WorkerOrder("m", "1", "m.onnx", 1)
        handle = WorkerHandle("m/0.0", order, lambda events: cast(Any, DyingLink(events, 1.0)), hang_s=5.0)
        handle.bind(lambda: None, lambda batch, answer: None, lambda batch, text: None, lambda lost: None)
        if is_ready:
            await handle.start()
        else:
            with pytest.raises(UnavailableError, match=r"ended 3 times while it loaded m\.onnx"):
                await handle.start()

    asyncio.run(load())
