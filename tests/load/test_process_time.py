from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpuprof.load.process_time import cpu_seconds, list_process_tree, runs_module
from tests.serving.running import eventually


def test_a_process_that_computes_takes_time_and_one_that_sleeps_takes_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        before = cpu_seconds(busy.pid)
        assert eventually(lambda: cpu_seconds(busy.pid) > before + 0.1, 60.0)
        busy.kill()
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        first = cpu_seconds(sleeper.pid)
        assert cpu_seconds(sleeper.pid) - first < 0.1
        sleeper.kill()


def test_children_and_theirs_belong_to_the_family() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        grandchild = int(shell.stdout.readline())
        assert {shell.pid, grandchild} <= set(list_process_tree(os.getpid()))
        assert set(list_process_tree(shell.pid)) == {shell.pid, grandchild}
        subprocess.run(["kill", str(grandchild)], check=True)


def test_a_process_is_known_by_the_module_that_it_runs() -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert runs_module(process.pid, code)
        assert not runs_module(process.pid, "gpuprof")
        process.communicate()
    assert not runs_module(2**22 + 1, code)


def test_of_a_process_that_is_not_there_nothing_is_known() -> None:
    assert list(list_process_tree(2**22 + 1)) == [2**22 + 1]
    with pytest.raises(OSError, match="no process"):
        cpu_seconds(2**22 + 1)
