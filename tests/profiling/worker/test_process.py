from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from gpuprof.errors import InputError, UnavailableError
from gpuprof.profiling.worker.process import Worker
from gpuprof.profiling.worker.tasks import Resident, WorkerSetup, check_model
from gpuprof.rules.cpu_slices import CpuSlice
from tests.profiling.models import write_mlp
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time


def _answer(resident: Resident, word: str) -> tuple[int, str]:
    return os.getpid(), word


def _hang(resident: Resident) -> None:
    os.system("sleep 60")


def _crash(resident: Resident) -> None:
    raise KeyError("odd")


def _exhaust(resident: Resident) -> None:
    raise MemoryError


def test_a_worker_runs_tasks_one_after_another_and_is_gone_afterwards(tmp_path: Path) -> None:
    with Worker(WorkerSetup(), "m") as worker:
        process = worker.process_id
        assert [worker.call(_answer, word) for word in "ab"] == [(process, "a"), (process, "b")]
        assert worker.call(check_model, write_mlp(tmp_path / "m.onnx"), True) is None
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_tasks_own_error_keeps_its_kind_and_the_worker_goes_on(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"rubbish")
    with Worker(WorkerSetup(), "x") as worker:
        with pytest.raises(InputError, match="not an ONNX model") as refused:
            worker.call(check_model, tmp_path / "x.onnx", False)
        assert refused.value.fix
        with pytest.raises(UnavailableError, match="out of memory"):
            worker.call(_exhaust)
        assert worker.call(_answer, "on")[1] == "on"


def test_a_share_that_cannot_be_enforced_is_the_error_of_the_first_task() -> None:
    with (
        Worker(WorkerSetup(part=CpuSlice((4095,))), "m") as worker,
        pytest.raises(UnavailableError, match="cannot run on cores 4095"),
    ):
        worker.call(_answer, "a")


def test_a_worker_that_is_killed_is_said_to_be_and_one_that_crashes_quoted() -> None:
    with Worker(WorkerSetup(), "m at batch 1") as worker:
        worker.send(_hang)
        os.kill(worker.process_id, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"m at batch 1: the process died \(signal SIGKILL\)"):
            worker.receive(60)
        assert not worker.is_alive
    with Worker(WorkerSetup(), "m") as worker, pytest.raises(UnavailableError, match="its last words: KeyError: 'odd'"):
        worker.call(_crash)


def test_a_worker_that_hangs_is_ended_in_time_with_what_it_started() -> None:
    with Worker(WorkerSetup(), "m") as worker:
        worker.call(_answer, "up")
        worker.send(_hang)
        with pytest.raises(UnavailableError, match=r"no answer within 0\.2 s"):
            worker.receive(0.2)
        group = worker.process_id
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the worker's own child lives on")
