from __future__ import annotations

import threading

import pytest

from gpuprof.pipeline.load import report_elapsed
from gpuprof.pipeline.result import Progress, say_nothing


def test_seconds_are_told_while_the_block_goes_on_and_the_last_at_its_end() -> None:
    told: list[Progress] = []
    came = threading.Event()

    def hear(step: Progress) -> None:
        told.append(step)
        if len(told) == 2:
            came.set()

    with report_elapsed(hear, "sending", 1.0):
        assert came.wait(60)
    assert {step.step for step in told} == {"sending"}
    assert told[0].done == 0
    assert [step.done for step in told] == sorted(step.done for step in told)
    assert all(step.done <= step.total == 1 for step in told)
    assert told[-1].done == 1


def test_an_error_ends_the_reports_and_nobody_is_told_of_an_end() -> None:
    told: list[Progress] = []
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="refused"), report_elapsed(told.append, "sending", 1000.0):
        raise ValueError("refused")
    assert [step.done for step in told] == [0]
    assert set(threading.enumerate()) <= before


def test_where_nobody_listens_no_thread_runs() -> None:
    before = set(threading.enumerate())
    with report_elapsed(say_nothing, "sending", 1.0):
        assert set(threading.enumerate()) <= before
