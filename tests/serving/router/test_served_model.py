"""Which requests a model lets in, with workers that are played by the test."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from gpuprof.serving.router.infer_request import Urgency
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.router.served_replica import ReplicaPlan, ServedReplica
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import Inference, RefusedError
from gpuprof.serving.watch.statistics import ModelStatistics
from tests.reruns import serves_in_real_time
from tests.serving.router.test_served_replica import FakeWorker, inference

pytestmark = serves_in_real_time

SLO_MS = 105.0
Scene = Callable[[ServedModel], Awaitable[None]]


def played(replicas: int = 1) -> Callable[[Scene], Callable[[], None]]:
    """Make a test of a scene with replicas that take batches of one, 10 ms each, and have an SLO of 105 ms."""

    def make_test(scene: Scene) -> Callable[[], None]:
        async def run() -> None:
            model = ServedModel("m", SLO_MS, Arena(1 << 16))
            for number in range(replicas):
                plan, worker = ReplicaPlan(f"m/{number}", 1, 0.0, (10.0,)), FakeWorker()
                model.replicas.append(ServedReplica(plan, [worker], model, ModelStatistics()))  # type: ignore[list-item]
            await scene(model)

        return lambda: asyncio.run(run())

    return make_test


def worker_of(model: ServedModel) -> FakeWorker:
    (worker,) = model.replicas[0].workers
    return cast(FakeWorker, worker)


def fill(model: ServedModel, count: int, deadline_ms: float = 1e6) -> list[Inference]:
    inferences = [inference(number, deadline_ms=deadline_ms) for number in range(count)]
    for request in inferences:
        model.submit(request)
    return inferences


def refuse_early(model: ServedModel, timeout_ms: float | None = None, priority: int = 0) -> bool:
    """Whether the request would be received."""
    try:
        model.refuse_early(lambda: Urgency(timeout_ms, priority))
    except RefusedError as refusal:
        assert refusal.overloaded and refusal.retry_after_s is not None
        return False
    return True


def is_refused(model: ServedModel, request: Inference) -> bool:
    try:
        model.submit(request)
    except RefusedError as refusal:
        return refusal.overloaded
    return False


@played()
async def test_what_is_foreseen_is_what_submit_would_say(model: ServedModel) -> None:
    for _ in range(40):
        for timeout_ms in (None, 35.0, 255.0):
            received = refuse_early(model, timeout_ms)
            request = inference(0, deadline_ms=timeout_ms or SLO_MS)
            assert is_refused(model, request) is not received
            model.replicas[0]._queue.remove(lambda queued, request=request: queued is request)  # type: ignore[misc]
        fill(model, 1)
    assert not refuse_early(model) and refuse_early(model, 1e6)
    assert model.statistics.refused > 40


@played(replicas=2)
async def test_nothing_is_foreseen_while_any_replica_has_nobody_waiting(model: ServedModel) -> None:
    for _ in range(40):
        model.replicas[0].submit(inference(0))
    assert refuse_early(model)
    model.replicas[1].submit(inference(0))
    model.replicas[1].submit(inference(0))
    model.replicas[1].submit(inference(0))
    assert refuse_early(model)  # two ahead there
    assert not refuse_early(model, 35.0)


def test_who_asks_for_less_time_than_the_slo_makes_no_batch_wait_for_others() -> None:
    def held_ms(model: ServedModel) -> float:
        (replica,) = model.replicas
        return replica.load(asyncio.get_running_loop().time(), 0, 1e6, ("", True)).max_wait_ms

    async def scene(model: ServedModel) -> None:
        for _ in range(40):
            model.replicas[0].submit(inference(0))
        for _ in range(20):
            assert is_refused(model, inference(0, deadline_ms=35.0)) and not refuse_early(model, 35.0)
        assert held_ms(model) == 0.0
        assert is_refused(model, inference(0, deadline_ms=SLO_MS))
        assert held_ms(model) > 1.0

    played()(scene)()


@played()
async def test_both_refusals_are_counted_alike_and_a_traced_request_is_received(model: ServedModel) -> None:
    for _ in range(40):
        model.replicas[0].submit(inference(0))
    before = model.statistics
    assert not refuse_early(model)
    assert is_refused(model, inference(0, deadline_ms=SLO_MS))
    after = model.statistics
    assert (after.arrived - before.arrived, after.refused - before.refused) == (2, 2)
    model.tracer = cast(Any, Tracer())
    assert refuse_early(model)


@played()
async def test_a_request_waits_no_longer_than_ten_seconds_or_the_slo(model: ServedModel) -> None:
    longest = max(10_000.0, SLO_MS)
    assert model.limit_deadline_ms(None) == SLO_MS
    assert model.limit_deadline_ms(longest - 1.0) == longest - 1.0
    assert model.limit_deadline_ms(3_600_000.0) == longest


class Tracer:
    def record_answer(self, *_: Any) -> None:
        raise AssertionError

    record_refusal = close = record_answer


@played()
async def test_a_request_is_judged_by_what_goes_before_it(model: ServedModel) -> None:
    for _ in range(40):
        model.replicas[0].submit(inference(0, priority=5))
    assert not refuse_early(model, priority=5) and refuse_early(model, priority=4)
    assert is_refused(model, inference(1, deadline_ms=SLO_MS, priority=5))
    urgent = inference(2, deadline_ms=SLO_MS, priority=4)
    model.submit(urgent)
    assert model.replicas[0]._queue.oldest is urgent


@pytest.mark.parametrize(
    ("late_ms", "asked_ms", "let_in"), [(0.0, SLO_MS, 9), (60.0, SLO_MS, 6), (60.0, SLO_MS - 1.0, 8)]
)
def test_where_answers_come_later_than_expected_fewer_are_let_in(late_ms: float, asked_ms: float, let_in: int) -> None:
    async def scene(model: ServedModel) -> None:
        fill(model, 1)
        for _ in range(60):
            waits = Inference(1, [], None, asyncio.get_running_loop().time(), asked_ms, _done, _done)
            waits.attempts, waits.expected_ms = 1, 80.0
            waits.arrived -= (80.0 + late_ms) / 1000.0
            model.answer(waits, _Answer(), 0)  # type: ignore[arg-type]
        count = 0
        while not is_refused(model, inference(0, deadline_ms=SLO_MS)):
            count += 1
        assert count == let_in  # 6 of 73, 8 of 94 and 9 of 96 ms; two are ahead in any case

    played()(scene)()


class _Answer:
    outputs: tuple[list[Any]] = ([],)
    requests = 1


def _done(*_: Any) -> None:
    pass


@played()
async def test_requests_whose_clients_have_gone_wait_for_no_worker(model: ServedModel) -> None:
    inferences = fill(model, 3)
    worker = worker_of(model)
    worker.die()
    assert model.in_flight == 3
    for request in inferences[:2]:
        request.cancelled = True
    model.forget_cancelled()
    assert model.in_flight == 1
    worker.come_back()
    assert worker.names() == [[inferences[2].wanted]]


@played()
async def test_requests_whose_clients_have_gone_do_not_keep_a_replica_that_takes_no_more(model: ServedModel) -> None:
    inferences, worker = fill(model, 5), worker_of(model)
    model.retire_replica(model.replicas[0])
    for request in inferences:
        request.cancelled = True
    model.forget_cancelled()
    assert model.in_flight == sum(len(batch.inferences) for batch in worker.sent)
