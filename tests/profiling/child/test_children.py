from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from gpuprof.errors import InputError, UnavailableError
from gpuprof.profiling.child.children import Child
from gpuprof.profiling.child.task import CheckTask, Effort, NodesTask
from gpuprof.runtime.providers import ORT_CPU
from tests.profiling.models import write_mlp
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time


def _task(path: Path) -> CheckTask:
    return CheckTask(provider=ORT_CPU, model=path)


def _nodes_task(path: Path) -> NodesTask:
    return NodesTask(
        provider=ORT_CPU,
        model=path,
        inputs=Path("/nonexistent"),
        profile_prefix="profile",
        optimized=path.with_suffix(".optimized"),
        compare=False,
        effort=Effort(time_s=0.0, min_repeats=1),
    )


def test_a_child_answers_and_is_gone_afterwards(tmp_path: Path) -> None:
    with Child(_task(write_mlp(tmp_path / "m.onnx")), "m") as child:
        assert child.expect("done", 60)["event"] == "done"
        process = child.process_id
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_childs_own_error_keeps_its_kind_and_its_fix(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"rubbish")
    with Child(_task(tmp_path / "x.onnx"), "x") as child, pytest.raises(InputError, match="not an ONNX model"):
        child.expect("done", 60)


def test_a_child_that_is_killed_is_said_to_be(tmp_path: Path) -> None:
    with Child(_nodes_task(write_mlp(tmp_path / "m.onnx")), "m at batch 1") as child:
        os.kill(child.process_id, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"m at batch 1: the process died \(signal SIGKILL\)"):
            child.expect("ready", 60)


def test_a_child_that_crashes_is_quoted(tmp_path: Path) -> None:
    with (
        Child(_nodes_task(tmp_path / "m.onnx"), "m") as child,
        pytest.raises(UnavailableError, match="FileNotFoundError"),
    ):
        child.expect("ready", 60)


def test_a_child_that_hangs_is_ended_in_time(tmp_path: Path) -> None:
    with Child(_task(tmp_path / "m.onnx"), "m", prefix=["sh", "-c", "sleep 60 & wait"]) as child:
        with pytest.raises(UnavailableError, match=r"no answer within 0\.2 s"):
            child.expect("done", 0.2)
        group = child.process_id
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:  # what the child started is ended, too
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the child's own child lives on")
