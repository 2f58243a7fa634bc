from __future__ import annotations

import os
import subprocess
import sys

ASK = "import os; from gpuprof.machine.scheduling import *; {}; print(os.sched_getscheduler(0), os.getpriority(0, 0))"


def _after(call: str) -> str:
    return subprocess.run([sys.executable, "-c", ASK.format(call)], capture_output=True, text=True, check=True).stdout


def test_who_answers_quickly_stays_an_ordinary_process_of_the_same_priority() -> None:
    assert _after("shorten_wakeup_latency()") == f"{os.SCHED_OTHER} {os.getpriority(os.PRIO_PROCESS, 0)}\n"


def test_a_machine_of_another_kind_is_left_as_it_is() -> None:
    call = "os.uname = lambda: type('U', (), {'machine': 's390x'}); assert shorten_wakeup_latency() is False"
    assert _after(call).startswith(f"{os.SCHED_OTHER} ")
