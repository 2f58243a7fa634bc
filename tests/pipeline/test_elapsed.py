from __future__ import annotations

import threading

from gpuprof.pipeline.load import report_elapsed
from gpuprof.pipeline.result import Progress


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
