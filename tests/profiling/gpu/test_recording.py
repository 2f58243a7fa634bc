"""What a profiler records: once by itself, for times, and once with ONNX Runtime's profile of its nodes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpuprof.errors import InputError
from gpuprof.profiling.gpu.recording import (
    RecordedFiles,
    record_with_kineto,
    run_for_recording,
    run_nodes_for_recording,
)
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.worker.process import package_path, task_command
from gpuprof.profiling.worker.tasks import Resident, WorkerSetup
from tests.profiling.kineto_files import trace, write
from tests.profiling.models import write_mlp
from tests.profiling.requests import a_job
from tests.reruns import waits_for_processes


@pytest.mark.slow
def test_nodes_are_recorded_in_a_session_of_their_own_on_the_clock_of_the_trace(tmp_path: Path) -> None:
    """Real files of both on the CPU, where the trace has runs and no kernels: nodes lie within the runs."""
    pytest.importorskip("torch")  # of the extra `export`
    job, files = a_job(write_mlp(tmp_path / "m.onnx")), RecordedFiles(tmp_path)
    record_with_kineto(Resident(WorkerSetup()), job.path, job.inputs(), tmp_path, None)
    timelines = files.join(
        read_json_trace(files.kineto, False).select_runs(),
        lambda: read_json_trace(files.kineto_nodes, False).select_runs(),
    )
    assert not any("not tied" in note for note in timelines.nodes.notes)
    op_types = {"MatMul", "Add", "Relu", "FusedMatMul", "FusedGemm", "Gemm"}
    assert {node.op_type for node in timelines.executed} <= op_types
    recorded, runs = timelines.nodes.nodes, timelines.nodes.ranges
    runs = runs[runs["name"] == "gpuprof-run"].sort_values("start_ns")
    assert len(runs) == 5 and sorted(recorded["repeat"].unique().tolist()) == [0, 1, 2, 3, 4]
    for turn, (start, end) in enumerate(zip(runs["start_ns"], runs["end_ns"], strict=True)):
        within = recorded[recorded["repeat"] == turn]
        assert len(within) == len(timelines.executed)
        assert (within["start_ns"] >= start - 1000).all() and (within["start_ns"] <= end).all()
    assert json.loads(files.index.read_text())["epoch_ns"] > 1_600_000_000_000_000_000


def test_nodes_that_cannot_be_recorded_cost_none_of_the_plain_recording(tmp_path: Path) -> None:
    timeline = read_json_trace(write(tmp_path / "t.json", trace())).select_runs()
    for index in (None, '{"error": "out of memory"}'):
        files = RecordedFiles(tmp_path)
        if index is not None:
            files.index.write_text(index)
        timelines = files.join(timeline, lambda: timeline)
        assert len(timelines.nodes.kernels) == len(timeline.kernels)
        assert timelines.nodes.notes[-1].startswith("kernels are not tied to nodes")
    assert "out of memory" in timelines.nodes.notes[-1]


@waits_for_processes
def test_a_profiler_can_run_the_program_by_itself(tmp_path: Path) -> None:
    job, environment = a_job(write_mlp(tmp_path / "m.onnx")), package_path()
    command = task_command(
        tmp_path / "a.task", WorkerSetup(), run_nodes_for_recording, job.path, job.inputs(), tmp_path, None
    )
    subprocess.run(command, env=environment, check=True)
    assert RecordedFiles(tmp_path).executed.is_file()
    job.path.write_bytes(b"no model")
    command = task_command(
        tmp_path / "b.task", WorkerSetup(), run_for_recording, job.path, job.inputs(), None, repeats=1
    )
    completed = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert completed.returncode == InputError.exit_code and completed.stderr.startswith("error: ")
