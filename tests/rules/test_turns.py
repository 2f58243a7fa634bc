"""Turns in one share: how long a batch waits for its own at most, and who runs at once with whom."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.rules.cpu_slices import plan_shared_slices
from gpuprof.rules.turns import estimate_in_turn, held_shares

ALONE_MS = {"a": 4.0, "b": 6.0, "c": 10.0, "d": 1.0}
SLOWS = {"a": 1.1, "b": 1.2, "c": 1.5, "d": 2.0}


class TurnQuestions:
    """Knows times alone and what each neighbour multiplies them by; remembers what it was asked."""

    def __init__(self) -> None:
        self.beside: list[tuple[str, ...]] = []

    def __call__(self, workload: Workload, beside: Sequence[Workload]) -> Estimate:
        assert not workload.turns and not any(neighbour.turns for neighbour in beside)
        self.beside.append(tuple(neighbour.model for neighbour in beside))
        time = ALONE_MS[workload.model] * math.prod(SLOWS[neighbour.model] for neighbour in beside)
        return Estimate(workload, "device", Figure(time, "measured", 0.9 * time, 1.1 * time), latency_cv=0.1)


def runs(model: str, turns: int = 0, share: float = 40.0) -> Workload:
    return Workload(model, 1, Share(share), turns=turns)


def test_the_longest_wait_is_a_batch_of_each_of_those_who_take_turns_too() -> None:
    estimate = estimate_in_turn(TurnQuestions(), runs("a", 1), [runs("b", 1), runs("c", 1)])
    assert estimate.latency_ms.source == "measured"
    time = estimate.latency_ms
    assert [time.value, time.low, time.high] == pytest.approx([20.0, 18.0, 22.0])
    assert estimate.throughput_rps.value == pytest.approx(50.0)  # a batch of one in each cycle
    # Deviations of 0.4, 0.6 and 1 ms, which have nothing to do with one another.
    assert estimate.latency_cv == pytest.approx(math.sqrt(0.4**2 + 0.6**2 + 1.0) / 20.0)


def test_those_who_take_turns_do_not_slow_one_another_and_others_slow_each_of_them() -> None:
    ask = TurnQuestions()
    estimate = estimate_in_turn(ask, runs("a", 1), [runs("b", 1), runs("d")])
    assert estimate.latency_ms.value == pytest.approx(2.0 * 4.0 + 2.0 * 6.0)
    assert set(ask.beside) == {("d",)}


def test_of_others_who_take_turns_the_one_runs_that_slows_most() -> None:
    beside = [runs("c", 2, 60.0), runs("b", 2, 60.0)]
    assert estimate_in_turn(TurnQuestions(), runs("a"), beside).latency_ms.value == pytest.approx(1.5 * 4.0)
    assert estimate_in_turn(TurnQuestions(), runs("a"), beside[::-1]).latency_ms.value == pytest.approx(1.5 * 4.0)


def test_the_sum_is_called_by_the_least_sure_of_its_parts() -> None:
    def ask(workload: Workload, beside: Sequence[Workload]) -> Estimate:
        return Estimate(workload, "device", Figure(1.0, "roofline" if workload.model == "b" else "measured"))

    assert estimate_in_turn(ask, runs("a", 1), [runs("b", 1)]).latency_ms == Figure(2.0, "roofline")


def test_who_takes_turns_has_one_share_with_the_others_and_the_same_cores() -> None:
    shares = [(50.0, 1), (25.0, 0), (50.0, 1), (25.0, 0)]
    assert held_shares(shares) == [50.0, 25.0, 25.0]
    first, second, third, fourth = plan_shared_slices(shares, range(4))
    assert first == third and len(first.cores) == 2
    assert len({first.cores, second.cores, fourth.cores}) == 3
