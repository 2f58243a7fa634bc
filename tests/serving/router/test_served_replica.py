"""Batching and retrying, with workers that are played by the test."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gpuprof.serving.router.served_replica import ReplicaPlan, ServedReplica
from gpuprof.serving.router.worker import BatchAnswer, SentBatch
from gpuprof.serving.transport.inference import Inference, InputTensor, RefusedError
from gpuprof.serving.watch.statistics import ModelStatistics
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time


class FakeWorker:
    """A worker's place that keeps what it is sent until the test answers."""

    def __init__(self, stages_ahead: bool = False) -> None:
        self.is_ready = True
        self.stages_ahead = stages_ahead
        self.sent: list[SentBatch] = []
        self.replica: Any = None

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.sent

    def can_prefetch(self, prefetch_ms: float) -> bool:
        self.prefetch_ms = prefetch_ms
        suspects = self.stages_ahead and any(inference.deaths for batch in self.sent for inference in batch.inferences)
        return self.is_ready and len(self.sent) < 2 and not suspects

    @property
    def requests(self) -> int:
        return sum(len(batch.inferences) for batch in self.sent)

    def busy_ms(self, now: float) -> float:
        return 10.0 * len(self.sent)

    def send(self, inferences: list[Inference], rows: int, expected_ms: float, now: float) -> None:
        self.sent.append(SentBatch(0, inferences, rows, expected_ms, now))

    def finish(self) -> list[Inference]:
        batch = self.sent.pop(0)
        self.replica.on_batch_done(batch, BatchAnswer(1, 2, 3, [[] for _ in batch.inferences]))
        return batch.inferences

    def die(self) -> None:
        self.is_ready = False
        batches, self.sent = self.sent, []
        self.replica.on_batches_lost(batches)

    def come_back(self) -> None:
        self.is_ready = True
        self.replica.on_worker_ready()

    def names(self) -> list[list[Any]]:
        return [[inference.wanted for inference in batch.inferences] for batch in self.sent]


class Owner:
    def __init__(self) -> None:
        self.answered: list[Any] = []
        self.refused: list[tuple[Any, int]] = []
        self.adopted: list[Any] = []

    def answer(self, inference: Inference, answer: BatchAnswer, position: int) -> None:
        self.answered.append(inference.wanted)

    def refuse(self, inference: Inference, refusal: RefusedError) -> None:
        self.refused.append((inference.wanted, refusal.status))

    def reassign(self, inferences: list[Inference]) -> None:
        self.adopted += [inference.wanted for inference in inferences]

    def on_worker_ready(self) -> None:
        pass


def inference(
    name: int, rows: int = 1, batch_key: object = None, priority: int = 0, deadline_ms: float = 1e6, client: str = ""
) -> Inference:
    """A request that is known by what it wants."""
    return Inference(
        rows, [InputTensor([rows], b"")], [name], asyncio.get_running_loop().time(), deadline_ms, _never, _never,
        priority=priority, batch_key=batch_key, client=client,
    )  # fmt: skip


def _never(*_: object) -> None:
    raise AssertionError("the owner answers, not the replica")


@dataclass(frozen=True)
class Scene:
    """A replica, its workers, and the owner of its requests."""

    replica: ServedReplica
    workers: list[FakeWorker]
    owner: Owner

    def submit(self, names: Iterable[int]) -> None:
        for name in names:
            self.replica.submit(inference(name))


def played(
    batch: int = 4, wait_ms: float = 1e5, workers: int = 1, stages_ahead: bool = False
) -> Callable[[Callable[[Scene], Awaitable[None]]], Callable[[], None]]:
    """Make a test of a coroutine that plays a scene."""

    def make_test(play: Callable[[Scene], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            fakes, owner = [FakeWorker(stages_ahead) for _ in range(workers)], Owner()
            plan = ReplicaPlan("m/0", batch, wait_ms, (10.0,) * batch)
            replica = ServedReplica(plan, fakes, owner, ModelStatistics())  # type: ignore[arg-type]
            await play(Scene(replica, fakes, owner))

        return lambda: asyncio.run(run())

    return make_test


@played()
async def test_clients_are_answered_before_the_answers_are_counted(scene: Scene) -> None:
    counted: list[int] = []
    scene.owner.answer = lambda *_: counted.append(scene.replica.statistics.answered)  # type: ignore[method-assign]
    scene.submit(range(4))
    scene.workers[0].finish()
    assert counted == [0] * 4
    assert scene.replica.statistics.answered == 4


@played()
async def test_a_full_batch_goes_at_once(scene: Scene) -> None:
    scene.submit(range(3))
    assert scene.workers[0].names() == []
    scene.replica.submit(inference(3))
    assert scene.workers[0].names() == [[[0], [1], [2], [3]]]
    assert scene.replica.waiting_rows == 0


@played(wait_ms=5.0)
async def test_a_part_of_a_batch_goes_when_its_oldest_has_waited_long_enough(scene: Scene) -> None:
    scene.replica.submit(inference(0))
    assert scene.workers[0].names() == []
    while not scene.workers[0].sent:
        await asyncio.sleep(0.002)
    assert scene.workers[0].names() == [[[0]]]


@played()
async def test_a_request_with_little_time_left_does_not_wait_for_others(scene: Scene) -> None:
    scene.replica.submit(inference(0, deadline_ms=5.0))  # a batch takes 10
    assert scene.workers[0].names() == [[[0]]]


@played()
async def test_rows_count_and_a_request_that_does_not_fit_waits_for_the_next_batch(scene: Scene) -> None:
    scene.replica.submit(inference(0, rows=3))
    scene.replica.submit(inference(1, rows=2))
    assert scene.workers[0].names() == [[[0]]]
    scene.replica.submit(inference(2, rows=1))
    assert scene.replica.waiting_rows == 3


@played()
async def test_only_requests_of_one_shape_share_a_batch(scene: Scene) -> None:
    for name, batch_key in enumerate("abab"):
        scene.replica.submit(inference(name, batch_key=batch_key))
    assert scene.workers[0].names() == [[[0], [2]]]


@played()
async def test_a_busy_worker_is_given_its_next_batch_only_when_it_is_full(scene: Scene) -> None:
    scene.submit(range(7))
    assert len(scene.workers[0].sent) == 1
    scene.replica.submit(inference(7))
    assert scene.workers[0].names()[1] == [[4], [5], [6], [7]]
    scene.submit(range(8, 20))
    assert len(scene.workers[0].sent) == 2


@played(batch=1, wait_ms=0.0, workers=2)
async def test_no_process_is_given_a_batch_in_advance_that_another_could_start_sooner(scene: Scene) -> None:
    scene.submit(range(3))
    assert [len(worker.sent) for worker in scene.workers] == [1, 1]
    assert scene.replica.waiting_rows == 1
    scene.workers[1].finish()
    assert scene.workers[1].names() == [[[2]]]


@played(batch=1, wait_ms=0.0)
async def test_higher_priorities_go_first_and_equals_in_order(scene: Scene) -> None:
    scene.replica.submit(inference(0))
    scene.replica.submit(inference(9))  # at hand
    for name, priority in ((1, 2), (2, 1), (3, 2), (4, 0)):
        scene.replica.submit(inference(name, priority=priority))
    order = []
    while scene.workers[0].sent:
        order += [sent.wanted for sent in scene.workers[0].finish()]
    assert order == [[0], [9], [4], [2], [1], [3]]


@played(batch=1, wait_ms=0.0, workers=2)
async def test_what_a_dying_worker_had_goes_to_its_sibling_first_of_all_and_is_answered_once(scene: Scene) -> None:
    scene.submit(range(5))
    assert scene.workers[0].names()[0] == [[0]]
    scene.workers[0].die()
    order = []
    while scene.workers[1].sent:
        order += [sent.wanted for sent in scene.workers[1].finish()]
    assert order.index([0]) < order.index([4])
    assert sorted(scene.owner.answered) == [[0], [1], [2], [3], [4]]
    assert scene.owner.adopted == scene.owner.refused == []


@played(batch=1, wait_ms=0.0)
async def test_when_no_worker_is_left_the_owner_gets_everything(scene: Scene) -> None:
    scene.submit(range(4))
    scene.workers[0].die()
    assert scene.owner.adopted == [[0], [1], [2], [3]]
    assert scene.replica.waiting_rows == scene.replica.in_flight == 0


@played(batch=1, wait_ms=0.0, workers=3)
async def test_a_request_that_every_worker_dies_of_is_given_up(scene: Scene) -> None:
    scene.replica.submit(inference(0))
    for worker in scene.workers:
        assert worker.sent
        worker.die()
    assert scene.owner.refused == [([0], 500)]
    assert scene.owner.adopted == []


@played(batch=1, wait_ms=0.0, stages_ahead=True)
async def test_only_what_workers_die_of_while_it_is_copied_ahead_is_given_up(scene: Scene) -> None:
    deadly, deaths = 1, 0
    scene.owner.reassign = scene.replica.requeue  # type: ignore[method-assign] # to the same, when it lives again
    scene.submit(range(4))
    while scene.workers[0].sent:
        on_device = [name for names in scene.workers[0].names()[:2] for name in names]
        if [deadly] in on_device:
            assert deaths == 0 or on_device == [[deadly]], "what was a suspect was not alone on the device"
            deaths += 1
            scene.workers[0].die()
            scene.workers[0].come_back()
        else:
            scene.workers[0].finish()
    assert deaths == 3
    assert scene.owner.refused == [([deadly], 500)]
    assert scene.owner.answered == [[0], [2], [3]]


@played(batch=1, wait_ms=0.0)
async def test_what_was_at_hand_when_a_worker_died_is_sent_again_however_late(scene: Scene) -> None:
    low = [inference(number, priority=1) for number in range(4)]
    for request in (*low, inference(9, priority=0)):
        scene.replica.submit(request)
    scene.workers[0].finish()
    scene.workers[0].finish()
    assert scene.workers[0].names() == [[[9]], [[2]]] and low[2].overtaken
    low[2].deadline_ms = 0.0
    batches, scene.workers[0].sent = scene.workers[0].sent, []
    scene.replica.on_batches_lost(batches)
    assert scene.workers[0].names() == [[[9]], [[2]]] and scene.owner.refused == []
    assert low[2].attempts == 2  # so that what it took is no measure of what was expected of it


@played(batch=1, wait_ms=0.0)
async def test_of_a_model_that_is_to_answer_soon_less_is_at_hand_lest_it_hold_up_what_is_urgent(scene: Scene) -> None:
    prefetch_ms = []
    for allowed_ms in (1000.0, 4.0):
        scene.replica.record_arrival(0.0, scene.replica.load(0.0, 0, allowed_ms), allowed_ms, is_refused=False)
        scene.replica.submit(inference(0))
        scene.replica.submit(inference(1))
        prefetch_ms.append(scene.workers[0].prefetch_ms)
    assert prefetch_ms == [5.0, 0.4]


@played()
async def test_a_batch_that_fails_is_tried_again_one_by_one(scene: Scene) -> None:
    scene.submit(range(4))
    scene.replica.on_batch_failed(scene.workers[0].sent.pop(), "bad index")
    for name in range(4):
        assert scene.workers[0].names()[0] == [[name]]
        if name == 2:
            scene.replica.on_batch_failed(scene.workers[0].sent.pop(0), "bad index")
        else:
            scene.workers[0].finish()
    assert scene.owner.answered == [[0], [1], [3]]
    assert scene.owner.refused == [([2], 400)]


@played()
async def test_a_request_whose_client_has_gone_is_not_served(scene: Scene) -> None:
    cancelled = inference(1)
    scene.replica.submit(inference(0))
    scene.replica.submit(cancelled)
    cancelled.cancelled = True
    assert scene.replica.drop_cancelled() == [cancelled]
    assert scene.replica.waiting_rows == 1


@played(batch=1)
async def test_a_request_that_was_to_share_a_larger_batch_elsewhere_is_sent(scene: Scene) -> None:
    moved = inference(7)
    moved.expected_ms, moved.expected_rows = 50.0, 4  # by a replica of batches of four, which has gone
    scene.replica.submit(moved)
    assert scene.workers[0].names() == [[[7]]]
