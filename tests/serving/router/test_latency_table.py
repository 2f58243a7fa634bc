"""Estimates of batch times and the reserve: near what is seen, and at the prediction again when all is quiet."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.deployment import PublicName
from gpuprof.graph.merged_model import MergedMember, MergedValue
from gpuprof.rules.routing import LARGEST_RESERVE, LEAST_RESERVE, RESERVE
from gpuprof.serving.router.request_queue import RequestQueue
from gpuprof.serving.router.router import MemberModel, PlannedMember
from gpuprof.serving.router.served_model import Reserve, ServedModel, find_neighbour_slowdowns
from gpuprof.serving.router.served_replica import LatencyTable
from gpuprof.serving.transport.datatypes import ModelSpec, TensorSpec
from gpuprof.serving.transport.inference import Inference, InputTensor, OutputTensor
from gpuprof.serving.watch.statistics import BatchStatistics, ModelStatistics

PREDICTED = (10.0, 12.0, 14.0, 16.0)


def table() -> LatencyTable:
    return LatencyTable(4, PREDICTED)


def test_what_is_seen_all_the_time_is_expected_for_its_size_and_moves_the_others_along() -> None:
    latencies = table()
    for number in range(400):
        latencies.observe(1 + 3 * (number % 2), 15.0 if number % 2 == 0 else 24.0, number / 20.0)
    assert latencies.times_ms(20.0) == pytest.approx([15.0, 18.0, 21.0, 24.0], rel=0.02)


def test_sizes_may_be_off_the_prediction_by_different_factors() -> None:
    latencies = table()
    for number in range(2000):
        latencies.observe(1 + 3 * (number % 2), 10.0 if number % 2 == 0 else 20.0, number / 20.0)
    times = latencies.times_ms(100.0)
    assert (times[0], times[3]) == pytest.approx((10.0, 20.0), rel=0.05)


def test_a_batch_during_which_the_worker_was_stopped_hardly_counts() -> None:
    latencies = table()
    latencies.observe(4, 1000.0, 1.0)
    assert max(now / then for now, then in zip(latencies.times_ms(1.0), PREDICTED, strict=True)) < 1.12


def test_where_nothing_is_seen_any_more_the_prediction_comes_back_within_ten_seconds() -> None:
    latencies = table()
    for number in range(200):
        latencies.observe(4, 64.0, number / 50.0)
    assert latencies.times_ms(4.0)[3] == pytest.approx(64.0, rel=0.1)
    assert latencies.times_ms(14.0) == pytest.approx(PREDICTED, rel=0.06)


def test_the_small_batches_that_still_run_correct_the_large_ones_that_do_not() -> None:
    latencies = table()
    for number in range(200):
        latencies.observe(4, 64.0, number / 50.0)
    for number in range(200):
        latencies.observe(1, 10.0, 4.0 + number / 20.0)
    assert latencies.times_ms(14.0)[3] < 1.1 * PREDICTED[3]


def test_what_was_not_predicted_is_what_was_seen_first_and_follows() -> None:
    latencies = LatencyTable(4)
    assert list(latencies.times_ms(0.0)) == [0.0] * 4
    latencies.observe(2, 10.0, 0.0)
    assert list(latencies.times_ms(0.0)) == [10.0, 10.0, 15.0, 20.0]
    for number in range(600):
        latencies.observe(2, 30.0, number / 50.0)
    assert latencies.times_ms(30.0)[1] == pytest.approx(30.0, rel=0.1)


@pytest.mark.parametrize(("percentile", "spread"), [(99.0, 0.08), (95.0, 0.1), (99.0, 0.05), (99.0, 0.01)])
def test_at_the_limit_as_many_are_late_as_the_percentile_allows(percentile: float, spread: float) -> None:
    draw = random.Random(1)
    reserve = Reserve(percentile)
    late = 0
    for number in range(40_000):
        now = number / 1000.0
        expected_ms = 500.0 * (1.0 - reserve.at(now))
        took_ms = expected_ms * draw.lognormvariate(0.0, spread)
        late += took_ms > 500.0 and number >= 20_000
        reserve.observe(expected_ms, took_ms, 500.0, now)
    assert late / 20_000 == pytest.approx(1.0 - percentile / 100.0, rel=0.3)


def test_it_falls_to_the_least_where_expectations_hold_and_is_bounded_where_nothing_does() -> None:
    reserve = Reserve(99.0)
    for _ in range(200):
        reserve.observe(450.0, 5000.0, 500.0, 1.0)
    assert reserve.at(1.0) == pytest.approx(LARGEST_RESERVE)
    for _ in range(4000):
        reserve.observe(350.0, 330.0, 500.0, 1.0)
    assert reserve.at(1.0) == LEAST_RESERVE


def test_what_a_pause_has_raised_comes_back_by_itself_within_half_a_minute() -> None:
    reserve = Reserve(99.0)
    for number in range(200):
        reserve.observe(450.0, 5000.0, 500.0, number / 100.0)
    assert reserve.at(2.1) == pytest.approx(LARGEST_RESERVE, rel=0.1)
    assert reserve.at(30.0) < RESERVE + 0.02


def test_what_is_always_needed_is_kept() -> None:
    reserve = Reserve(99.0)
    for number in range(20 * 300):  # for five minutes every twentieth batch would be late with less than a quarter
        now = number / 20.0
        took_ms = 500.0 if number % 20 == 0 else 300.0
        reserve.observe(500.0 * (1.0 - reserve.at(now)), took_ms * (1.0 - reserve.at(now)) * 1.33, 500.0, now)
    assert reserve.at(300.0) > 0.18


def served_replica(name: str, place: str, took_ms: float, count: int = 10, mig: str = "") -> Any:
    plan = SimpleNamespace(name=name, place=place, mig=mig, latency_ms=(5.0, 8.0))
    batches = {2: BatchStatistics(count, 0, int(took_ms * 1e6) * count, 0)} if count else {}
    return SimpleNamespace(plan=plan, statistics=ModelStatistics(batches=batches))


def model_of(name: str, *replicas: Any) -> Any:
    return SimpleNamespace(name=name, replicas=list(replicas))


def test_neighbours_are_those_that_ran_on_the_same_device_or_instance() -> None:
    models = [
        model_of("a", served_replica("a/0", "n/0", 16.0), served_replica("a/1", "n/1", 8.0, mig="1g@0")),
        model_of("heavy", served_replica("heavy/0", "n/0", 8.0), served_replica("heavy/1", "n/1", 8.0, mig="1g@1")),
        model_of("idle", served_replica("idle/0", "n/0", 8.0, count=0)),
    ]
    assert find_neighbour_slowdowns(models) == {"a": {"heavy": 2.0}, "heavy": {"a": 1.0}}


def test_slowdowns_of_several_neighbours_multiply() -> None:
    peers = [model_of(name, served_replica(f"{name}/0", "n/0", 8.0)) for name in ("b", "c")]
    slowdowns = find_neighbour_slowdowns([model_of("a", served_replica("a/0", "n/0", 24.0)), *peers])
    assert slowdowns["a"] == pytest.approx({"b": 3.0**0.5, "c": 3.0**0.5})


def test_only_what_came_since_counts() -> None:
    models = [model_of("a", served_replica("a/0", "n/0", 16.0)), model_of("b", served_replica("b/0", "n/0", 8.0))]
    earlier = {"a/0": {2: (6, int(6 * 8e6))}}  # the first six took 8 ms each, the last four the rest
    assert find_neighbour_slowdowns(models, earlier)["a"]["b"] == pytest.approx((160.0 - 48.0) / 32.0)
    assert find_neighbour_slowdowns(models, {"a/0": {2: (10, int(160e6))}}) == {}


def _merged() -> tuple[Any, list[Inference]]:
    """Return a merged model of two members with an input and two outputs each, and the list of its requests."""
    sent: list[Inference] = []
    inputs = tuple(TensorSpec(f"{member}/x", "FP32", (-1, 3)) for member in "ab")
    outputs = tuple(TensorSpec(f"{member}/{name}", "FP32", (-1, 2)) for member in "ab" for name in ("u", "v"))
    spec = ModelSpec("merged", "1", "onnxruntime_onnx", inputs, outputs, 8)
    merged = SimpleNamespace(
        name="merged", arena=None, reserve=SimpleNamespace(percentile=99.0), replicas=[], spec=spec, submit=sent.append
    )
    return merged, sent


@pytest.mark.parametrize(("wanted", "names"), [(None, ["u", "v"]), ([1], ["v"]), ([1, 0], ["v", "u"])])
def test_a_member_has_its_own_inputs_and_outputs_alone(wanted: list[int] | None, names: list[str]) -> None:
    asyncio.run(_answer_a_member(wanted, names))  # models are made within a running loop


async def _answer_a_member(wanted: list[int] | None, names: list[str]) -> None:
    merged, sent = _merged()
    values = tuple(MergedValue(name, f"b/{name}", "float32", (None, 2)) for name in ("u", "v"))
    tensors = MergedMember("b", "b.onnx", "", (MergedValue("x", "b/x", "float32", (None, 3)),), values)
    member = MemberModel(cast(ServedModel, merged), PlannedMember(PublicName("b"), 50.0, tensors))
    assert [spec.name for spec in member.spec.outputs] == ["u", "v"]
    answers: list[list[OutputTensor]] = []
    member.submit(
        Inference(
            rows=4,
            inputs=[InputTensor([4, 3], b"rows of b")],
            wanted=wanted,
            arrived=0.0,
            deadline_ms=50.0,
            on_done=lambda inference, outputs, slot: answers.append(outputs),
            on_refused=lambda error: None,
        )
    )
    (request,) = sent
    assert [(tensor.shape, bytes(tensor.data)) for tensor in request.inputs] == [([0, 3], b""), ([4, 3], b"rows of b")]
    assert request.wanted == [2, 3]
    # The worker answers in an order of its own.
    request.on_done(request, [OutputTensor(3, [4, 2], b"b/v"), OutputTensor(2, [4, 2], b"b/u")], None)
    (outputs,) = answers
    positions = {"u": 0, "v": 1}
    assert [(tensor.position, bytes(tensor.data)) for tensor in outputs] == [
        (positions[name], f"b/{name}".encode()) for name in names
    ]


def request(name: Any, priority: int = 0, arrived: float = 0.0, deadline_ms: float = 100.0) -> Inference:
    return Inference(1, [], [name], arrived, deadline_ms, lambda *_: None, lambda *_: None, priority)


def names(requests: Any) -> list[Any]:
    return [request.wanted[0] for request in requests]


def test_one_client_s_requests_go_as_they_came() -> None:
    queue = RequestQueue()
    for name in range(5):
        queue.add(request(name), ("a", False))
    assert names(queue) == [0, 1, 2, 3, 4]
    assert names(queue.take(2)) == [0, 1]
    queue.add(request(5), ("a", False))
    assert names(queue.take(9)) == [2, 3, 4, 5]
    assert queue.rows == 0


def test_a_client_with_many_requests_waits_for_one_with_few() -> None:
    queue = RequestQueue()
    for name in range(6):
        queue.add(request(name), ("many", False))
    assert queue.rows_before(0, ("few", False)) == 1
    assert queue.rows_before(0, ("many", False)) == 6
    for letter in "ab":
        queue.add(request(letter), ("few", False))
    assert names(queue) == [0, "a", 1, "b", 2, 3, 4, 5]


def test_requests_that_may_wait_for_an_hour_leave_the_others_of_their_client_every_second_turn() -> None:
    queue = RequestQueue()
    for name in range(60):
        queue.add(request(name), ("a", True))
    queue.take(10)
    assert queue.rows_before(0, ("a", False)) <= 1


def test_a_higher_priority_goes_first_whoever_sends_it() -> None:
    queue = RequestQueue()
    for name in range(3):
        queue.add(request(name, priority=1), ("a", False))
    assert queue.rows_before(0, ("a", False)) == 0
    queue.add(request("urgent"), ("a", False))
    assert names(queue) == ["urgent", 0, 1, 2]


def test_only_what_others_went_before_is_given_up_and_only_when_it_is_late() -> None:
    queue = RequestQueue()
    queue.add(request("first", priority=1), ("a", False))
    assert queue.remove_late(10.0, 5.0) == []  # late, but nobody went before it
    queue.add(request("second", priority=1, arrived=9.95), ("a", False))
    queue.add(request("urgent", arrived=9.9), ("a", False))
    assert names(queue.remove_late(10.0, 5.0)) == ["first"]
    assert names(queue) == ["urgent", "second"]
    assert queue.rows == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), min_size=1, max_size=40))
def test_what_is_said_to_go_before_a_request_does_and_nothing_is_lost(coming: list[tuple[str, int]]) -> None:
    queue = RequestQueue()
    for number, (client, priority) in enumerate(coming):
        before = queue.rows_before(priority, (client, False))
        queue.add(request(number, priority), (client, False))
        assert names(queue).index(number) == before
        if number % 5 == 4:
            queue.take(2)
    left = names(queue)
    for client in "abc":
        for priority in range(3):
            numbers = [number for number in left if coming[number] == (client, priority)]
            assert numbers == sorted(numbers)
