"""Time limits count from the start of the process."""

from __future__ import annotations

import subprocess
import sys
import time

_ASK = (
    "import time; time.sleep(0.6); from gpuprof.cli import start_time; {}; "
    "print(time.monotonic(), start_time.verb_start_s())"
)


def _ask(before: str) -> tuple[float, float, float]:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _ASK.format(before)], capture_output=True, text=True, check=True)
    asked, start = map(float, done.stdout.split())
    return began, asked, start


def test_a_verb_began_with_the_process_that_was_started_for_it() -> None:
    began, asked, start = _ask("start_time.note_process_start()")
    assert began - 0.1 <= start <= asked - 0.5  # the system counts in ticks of a hundredth


def test_a_verb_of_a_longer_process_begins_when_it_is_called() -> None:
    _, asked, start = _ask("pass")
    assert start >= asked
