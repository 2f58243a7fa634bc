"""How the figures of a killed worker are made of what a client saw."""

from __future__ import annotations

import math

import pytest

from bench.reliability import Killed, Window, run_parts


def make_killed(*p99_ms: float, refused: tuple[int, ...] = ()) -> Killed:
    """Windows of half a second, the first four before the kill."""
    windows = tuple(
        Window(0.5 * number - 2.0, 50, 1 if number in refused else 0, value) for number, value in enumerate(p99_ms)
    )
    return Killed(2, 2, 100.0, 100.0, 80.0, 500, 500, 0, 0, 0, 0, 0.1, windows)


def test_the_latency_is_back_with_two_good_windows_in_a_row() -> None:
    got = make_killed(99.0, 10.0, 12.0, 11.0, 80.0, 14.0, 60.0, 13.0, 14.0, 90.0)
    assert got.before_ms == 12.0  # the first window is that of the connections
    assert got.worst_ms == 90.0
    assert got.back_s(15.0) == 1.5


def test_a_window_with_a_refusal_is_not_good() -> None:
    assert make_killed(9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, refused=(5,)).back_s(10.0) == math.inf
    assert make_killed(9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, refused=(4,)).back_s(10.0) == pytest.approx(0.5)


def test_what_never_suffered_was_never_away() -> None:
    assert make_killed(9.0, 9.0, 9.0, 9.0, 9.0, 9.0).back_s(10.0) == 0.0


def test_a_part_that_fails_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    ran = []

    def fail() -> None:
        raise TimeoutError("nobody answered")

    assert not run_parts({"first": fail, "second": lambda: ran.append(2), "third": lambda: False})
    assert ran == [2]
    first, second, third = capsys.readouterr().out.splitlines()[-3:]
    assert first.startswith("first") and first.endswith("FAILED: TimeoutError: nobody answered")
    assert second.endswith("done") and third.endswith("NOT AS IT MUST BE")
    assert run_parts({"second": lambda: None})
