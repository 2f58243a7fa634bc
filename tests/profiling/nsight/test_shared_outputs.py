from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuprof.profiling.child.job import Job
from gpuprof.profiling.child.task import RecordedTask
from gpuprof.profiling.nsight.recorded_program import RecordedProgram
from gpuprof.profiling.nsight.shared_outputs import SharedOutputs
from gpuprof.runtime.providers import ORT_CPU
from tests.profiling.models import write_mlp
from tests.profiling.requests import a_job
from tests.reruns import waits_for_processes


class _Played(RecordedProgram):
    """Answers ``answer`` without a share, and counts how often it was asked."""

    def __init__(self, job: Job, directory: Path, answer: dict[str, Any] | None) -> None:
        super().__init__(job, directory, ORT_CPU)
        self.answer, self.asked = answer, 0

    def run(self, environment: Any, task: RecordedTask) -> None:
        self.asked += 1
        assert environment == {}
        if self.answer is not None:
            assert task.outputs is not None
            np.savez(task.outputs, **self.answer)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return a_job(write_mlp(tmp_path / "mlp.onnx"))


def _save_shared(program: RecordedProgram, **arrays: Any) -> Path:
    np.savez(program.outputs("shared"), **arrays)
    return program.outputs("shared")


def test_the_answers_without_a_share_are_asked_for_once_a_batch(tmp_path: Path, job: Job) -> None:
    outputs, program = SharedOutputs(), _Played(job, tmp_path, {"y": np.ones(3, np.float32)})
    assert outputs.difference(job, program, _save_shared(program, y=np.ones(3, np.float32))) is None
    wrong = outputs.difference(job, program, _save_shared(program, y=np.full(3, 2.0, np.float32)))
    assert wrong is not None and "output y differs under the share by 1" in wrong
    assert program.asked == 1
    other = replace(job, graph=replace(job.graph, batch=64))
    outputs.difference(other, program, _save_shared(program, y=np.ones(3, np.float32)))
    assert program.asked == 2


def test_of_a_model_that_never_answers_the_same_nothing_is_said(tmp_path: Path, job: Job) -> None:
    program = _Played(job, tmp_path, None)
    assert SharedOutputs().difference(job, program, program.outputs("shared")) is None
    assert program.asked == 0
    assert SharedOutputs().difference(job, program, _save_shared(program, y=np.ones(3))) is None


@waits_for_processes
def test_the_program_leaves_its_outputs_and_none_where_they_change_from_run_to_run(tmp_path: Path, job: Job) -> None:
    program = RecordedProgram(job, tmp_path, ORT_CPU)
    program.run({}, replace(program.task, outputs=program.outputs("same")))
    assert set(np.load(program.outputs("same"))) == {one.name for one in job.graph.outputs}
