from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bench.admission import measure, most_in_time, show_clients, show_priorities


@pytest.mark.parametrize(
    ("batch", "slo_batches", "load", "replicas"),
    [(32, 2.0, 1.15, 1), (32, 2.0, 3.0, 1), (8, 3.0, 1.5, 1), (64, 1.5, 4.0, 1), (1, 2.0, 2.0, 4), (8, 2.0, 3.0, 4)],
)
def test_under_overload_goodput_is_the_capacity_and_the_simulator_says_so(
    batch: int, slo_batches: float, load: float, replicas: int
) -> None:
    for cv in (0.0, 0.05):
        cell = measure(batch, slo_batches, load, replicas, 3000, cv)
        assert cell.is_enough and cell.agrees, cell


@pytest.mark.parametrize("show", [show_priorities, show_clients])
def test_priorities_and_clients_get_their_part_under_overload(show: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(show)
    assert show(0.02, 8.0), capsys.readouterr().out


def test_the_most_that_is_possible_is_that_of_all_choices() -> None:
    random = np.random.default_rng(3)
    times, slo_ms = [4.0, 5.0, 5.5], 9.0
    for _ in range(20):
        arrivals = np.sort(random.uniform(0.0, 20.0, 7))
        assert most_in_time(arrivals, times, slo_ms) == max(
            sum(chosen)
            for chosen in product((False, True), repeat=7)
            if _fits(arrivals[np.array(chosen)].tolist(), times, slo_ms)
        )


def _fits(arrivals: list[float], times: list[float], slo_ms: float, free_at: float = -1e9) -> bool:
    """Whether all of these can be answered in time, tried in every way."""
    if not arrivals:
        return True
    for rows in range(1, min(len(times), len(arrivals)) + 1):
        done = max(free_at, arrivals[rows - 1]) + times[rows - 1]
        if done <= arrivals[0] + slo_ms and _fits(arrivals[rows:], times, slo_ms, done):
            return True
    return False
