"""What a profiler records: once by itself, for times, and once with ONNX Runtime's profile of its nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuprof.profiling.child.measurement import save_inputs
from gpuprof.profiling.child.task import RecordedTask, write_task
from gpuprof.profiling.gpu import recorded_run
from gpuprof.profiling.gpu.timelines import NodeFiles
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.runtime.providers import ORT_CPU
from tests.profiling.kineto_files import trace, write
from tests.profiling.models import write_mlp
from tests.profiling.requests import a_job


@pytest.mark.slow
def test_nodes_are_recorded_in_a_session_of_their_own_on_the_clock_of_the_trace(tmp_path: Path) -> None:
    """Real files of both on the CPU, where the trace has runs and no kernels: nodes lie within the runs."""
    pytest.importorskip("torch")  # of the extra `export`
    job = a_job(write_mlp(tmp_path / "m.onnx"))
    save_inputs(job, tmp_path / "inputs.npz")
    plain, nodes = tmp_path / "plain.json", tmp_path / "with_nodes.json"
    task = RecordedTask(
        provider=ORT_CPU,
        model=job.path,
        inputs=tmp_path / "inputs.npz",
        warm_up=1,
        repeats=2,
        kineto=plain,
        kineto_nodes=nodes,
        nodes=tmp_path,
    )
    (tmp_path / "task.json").write_text(write_task(task))
    assert recorded_run.main([str(tmp_path / "task.json")]) == 0
    files = NodeFiles(tmp_path)
    timelines = files.join(
        read_json_trace(plain, False).select_runs(), lambda: read_json_trace(nodes, False).select_runs()
    )
    assert not any("not tied" in note for note in timelines.nodes.notes)
    assert {node.op_type for node in timelines.executed} <= {
        "MatMul",
        "Add",
        "Relu",
        "FusedMatMul",
        "FusedGemm",
        "Gemm",
    }
    recorded, runs = timelines.nodes.nodes, timelines.nodes.ranges
    runs = runs[runs["name"] == "gpuprof-run"].sort_values("start_ns")
    assert len(runs) == 2 and sorted(recorded["repeat"].unique().tolist()) == [0, 1]
    for turn, (start, end) in enumerate(zip(runs["start_ns"], runs["end_ns"], strict=True)):
        within = recorded[recorded["repeat"] == turn]
        assert len(within) == len(timelines.executed)
        assert (within["start_ns"] >= start - 1000).all() and (within["start_ns"] <= end).all()
    assert json.loads(files.index.read_text())["epoch_ns"] > 1_600_000_000_000_000_000


def test_nodes_that_cannot_be_recorded_cost_none_of_the_plain_recording(tmp_path: Path) -> None:
    timeline = read_json_trace(write(tmp_path / "t.json", trace())).select_runs()
    for index in (None, '{"error": "out of memory"}'):
        files = NodeFiles(tmp_path)
        if index is not None:
            files.index.write_text(index)
        timelines = files.join(timeline, lambda: timeline)
        assert len(timelines.nodes.kernels) == len(timeline.kernels)
        assert timelines.nodes.notes[-1].startswith("kernels are not tied to nodes")
    assert "out of memory" in timelines.nodes.notes[-1]
