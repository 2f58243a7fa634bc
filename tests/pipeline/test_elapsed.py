from __future__ import annotations

import threading

from gpuprof.pipeline.load import report_elapsed
from gpuprof.pipeline.result import Progress


def test_seconds_are_told_while_the_block_goes_on_and_the_last_at_its_end() -> None:
    steps: list[Progress] = []
    two_steps = threading.Event()

    def hear(step: Progress) -> None:
        steps.append(step)
        if len(steps) == 2:
            two_steps.set()

    with report_elapsed(hear, "sending", 1.0):
        assert two_steps.wait(60)
    assert {step.step for step in steps} == {"sending"}
    assert steps[0].done == 0
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert all(step.done <= step.total == 1 for step in steps)
    assert steps[-1].done == 1
