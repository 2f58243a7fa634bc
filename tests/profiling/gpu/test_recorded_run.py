"""What a profiler records: once without ranges around nodes, for times, and once with them, for ties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuprof.profiling.child.measurement import save_inputs
from gpuprof.profiling.child.task import RecordedTask, write_task
from gpuprof.profiling.gpu import recorded_run
from gpuprof.profiling.timeline.timeline import RUN_RANGE
from gpuprof.runtime.providers import NODE_RANGE, ORT_CPU, TORCH_CPU
from tests.profiling.models import write_mlp
from tests.profiling.requests import a_job


def _names(trace: Path) -> list[str]:
    return [str(event.get("name", "")) for event in json.loads(trace.read_text())["traceEvents"]]


@pytest.mark.slow
@pytest.mark.parametrize("provider", [TORCH_CPU, ORT_CPU])
def test_ranges_around_nodes_are_in_a_recording_of_their_own(tmp_path: Path, provider: str) -> None:
    pytest.importorskip("torch")  # of the extra `export`
    job = a_job(write_mlp(tmp_path / "m.onnx"))
    save_inputs(job, tmp_path / "inputs.npz")
    plain, nodes = tmp_path / "plain.json", tmp_path / "nodes.json"
    task = RecordedTask(
        provider=provider,
        model=job.path,
        inputs=tmp_path / "inputs.npz",
        warm_up=1,
        repeats=2,
        kineto=plain,
        kineto_nodes=nodes,
    )
    (tmp_path / "task.json").write_text(write_task(task))
    assert recorded_run.main([str(tmp_path / "task.json")]) == 0
    names = _names(plain)
    assert names.count(RUN_RANGE) == 2 and not any(name.startswith(NODE_RANGE) for name in names)
    assert nodes.exists() == (provider == TORCH_CPU)  # ONNX Runtime opens none
    if provider == TORCH_CPU:
        names = _names(nodes)
        within = [name for name in names if name.startswith(NODE_RANGE)]
        assert names.count(RUN_RANGE) == 2 and len(within) == 2 * len(job.graph.ops)
