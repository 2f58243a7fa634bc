"""Who is no worker stays off the workers' cores: tried in a process of its own, whose affinity may change."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CORES = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="takes two cores")


def run(program: str) -> str:
    modules = "gpuprof.machine.cores", "gpuprof.machine.cgroup"
    head = "import os, subprocess, sys, threading\n" + "".join(f"from {module} import *\n" for module in modules)
    completed = subprocess.run([sys.executable, "-c", head + program], capture_output=True, text=True, check=True)
    return completed.stdout.strip()


@needs_two
def test_every_thread_stays_off_and_the_cores_that_are_planned_with_stay_the_same() -> None:
    program = f"""
done = threading.Event()
threading.Thread(target=done.wait, daemon=True).start()
before = own_cores()
print(avoid_cores([{CORES[0]}]), own_cores() == before)
print({{str(sorted(os.sched_getaffinity(int(task)))) for task in os.listdir('/proc/self/task')}} == {{'{CORES[1:]}'}})
print(avoid_cores([]), sorted(os.sched_getaffinity(0)) == {CORES})
"""
    assert run(program).splitlines() == ["True True", "True", "False True"]


def test_where_every_core_computes_nothing_changes() -> None:
    assert run(f"print(avoid_cores({CORES}), sorted(os.sched_getaffinity(0)) == {CORES})") == "False True"


@needs_two
def test_processes_that_are_started_inside_stay_off_too() -> None:
    program = f"""
with avoiding_cores([{CORES[0]}]):
    told = 'import os; print(sorted(os.sched_getaffinity(0)))'
    print(subprocess.check_output([sys.executable, '-c', told], text=True))
print(sorted(os.sched_getaffinity(0)) == {CORES})
"""
    assert run(program).split("\n") == [str(CORES[1:]), "", "True"]


def test_who_answers_quickly_stays_an_ordinary_process_of_the_same_priority() -> None:
    program = "shorten_wakeup_latency(); print(os.sched_getscheduler(0), os.getpriority(0, 0))"
    assert run(program) == f"{os.SCHED_OTHER} {os.getpriority(os.PRIO_PROCESS, 0)}"
