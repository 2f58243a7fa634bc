"""The process that only sleeps beside a measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest

from bench.bystander import run_bystander


def test_a_bystander_that_the_machine_held_up_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = subprocess.Popen.__init__

    def remember(self: Any, *words: Any, **options: Any) -> None:
        start(self, *words, **options)
        started.append(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", remember)
    with run_bystander() as end:
        (process,) = started
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.05)
        assert end() > 200.0
    assert process.returncode == 0


def test_a_bystander_ends_with_the_measurement_that_fails() -> None:
    with pytest.raises(ValueError, match="measurement"), run_bystander():
        raise ValueError("the measurement failed")
