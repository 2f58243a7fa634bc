from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bench.admission import batch_times, measure, most_alone, show_clients, show_priorities
from bench.pooled_admission import most_pooled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("batch", "slo_batches", "load", "replicas"),
    [
        (32, 2.0, 1.15, 1),
        (32, 2.0, 3.0, 1),
        (8, 3.0, 1.5, 1),
        (64, 1.5, 4.0, 1),
        (1, 2.0, 2.0, 4),
        (8, 2.0, 3.0, 4),
        (8, 3.0, 1.0, 1),
    ],
)
def test_under_overload_goodput_is_the_capacity_and_the_simulator_says_so(
    batch: int, slo_batches: float, load: float, replicas: int
) -> None:
    for cv in (0.0, 0.05):
        cell = measure(batch, slo_batches, load, replicas, 3000, cv)
        assert cell.is_enough and cell.agrees, cell


def test_near_the_capacity_batches_are_filled_where_one_request_would_take_nearly_as_long() -> None:
    cell = measure(4, 1.5, 1.15, 4, 3000, 0.0)
    assert cell.served > 0.9 and cell.agrees, cell  # 0.84 where a free process takes whatever waits


def test_goodput_stays_where_batch_times_vary_and_the_simulator_says_so() -> None:
    cell = measure(4, 3.0, 2.0, 1, 3000, 0.4)
    # 0.49 where a batch waits so long to be filled that a measured time of a smaller one refuses whoever would join it
    assert cell.served > 0.8 and cell.agrees, cell


@pytest.mark.parametrize("show", [show_priorities, show_clients])
def test_priorities_and_clients_get_their_part_under_overload(show: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(show)
    assert show(0.02, 8.0), capsys.readouterr().out


def test_what_replicas_of_batches_of_one_can_serve_is_that_of_all_choices() -> None:
    random = np.random.default_rng(5)
    for _ in range(20):
        arrivals = np.sort(random.uniform(0.0, 30.0, 8))
        assert most_alone(arrivals.tolist(), 5.0, 8.0, 1) == max(
            sum(chosen)
            for chosen in product((False, True), repeat=8)
            if _fits(arrivals[np.array(chosen)].tolist(), [5.0], 8.0)
        )
    assert most_alone([0.0, 0.0, 0.0, 4.0], 5.0, 8.0, 2) == 3.0
    assert most_alone([0.0, 0.0, 3.0, 4.0], 5.0, 8.0, 2) == 4.0


def _fits(arrivals: list[float], times: list[float], slo_ms: float, free_at: float = -1e9) -> bool:
    """Whether all of these can be answered in time, tried in every way."""
    if not arrivals:
        return True
    for rows in range(1, min(len(times), len(arrivals)) + 1):
        done = max(free_at, arrivals[rows - 1]) + times[rows - 1]
        if done <= arrivals[0] + slo_ms and _fits(arrivals[rows:], times, slo_ms, done):
            return True
    return False


def test_with_an_slo_of_one_and_a_half_batches_goodput_is_nearly_what_the_best_rule_reaches() -> None:
    cell = measure(32, 1.5, 1.0, 1, 6000, 0.0)
    assert cell.possible is not None and cell.possible < 0.92
    assert cell.is_enough and cell.agrees, cell


@pytest.mark.parametrize(("replicas", "lost"), [(1, 0.5), (2, 0.4), (4, 0.3107)])
def test_where_nobody_can_wait_replicas_together_lose_what_erlang_says(replicas: int, lost: float) -> None:
    # Erlang's B of as many servers as load; ticks make it a little less
    served = most_pooled([10.0], 100.0 * replicas, 10.0, replicas) / (100.0 * replicas)
    assert 1.0 - lost <= served <= (1.0 - lost) * 1.04


def test_replicas_together_reach_more_than_each_alone_and_no_more_than_their_capacity() -> None:
    times = batch_times(2)
    capacity_rps = 1000.0 * 2 / times[-1]
    slo_ms = 1.5 * times[-1]
    alone = most_pooled(times, capacity_rps, slo_ms, 1)
    assert 2.0 * alone < most_pooled(times, 2.0 * capacity_rps, slo_ms, 2) < 2.0 * capacity_rps


def test_no_rule_serves_95_percent_where_batches_of_4_cannot_wait_for_long() -> None:
    cell = measure(4, 1.5, 1.0, 4, 60_000, 0.0)
    assert cell.possible is not None and cell.possible < 0.95
    assert 0.97 * cell.possible < cell.served <= cell.possible
    assert cell.agrees and cell.is_enough, cell
