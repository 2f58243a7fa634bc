from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpuprof.machine.lost_time import StolenTime, measure_lateness


def test_stolen_is_the_part_of_all_ticks_since_the_beginning(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 0 800 0 0 0 100 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    watched = StolenTime(stat)
    stat.write_text("cpu  150 0 0 1020 0 0 0 130 9 9\n")
    assert watched.part() == 0.1


@pytest.mark.parametrize("text", ["", "cpu  1 2 3\n", "cpu0 1 2 3 4 5 6 7 8\n", "cpu  1 2 3 4 5 6 7 x\n"])
def test_where_the_kernel_does_not_count_stolen_time_nothing_is_known(tmp_path: Path, text: str) -> None:
    stat = tmp_path / "stat"
    stat.write_text(text)
    assert StolenTime(stat).part() is None
    assert StolenTime(tmp_path / "none").part() is None


def test_no_time_has_passed_between_two_equal_readings(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 0 0 8 0 0 0 1 0 0\n")
    assert StolenTime(stat).part() is None


def test_the_latest_of_a_hundred_wake_ups_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, naps = [0.0], [0]

    def sleep(seconds: float) -> None:
        naps[0] += 1
        now[0] += seconds + (0.5 if naps[0] == 20 else 0.004 if naps[0] == 30 else 0.0001)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    assert measure_lateness(0.92) == pytest.approx(4.0)
    assert naps[0] >= 100
