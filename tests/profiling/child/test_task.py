"""What a child process is told arrives as it was said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuprof.profiling.child.job import TimingLimits
from gpuprof.profiling.child.task import (
    BatchesTask,
    BatchTasks,
    CheckTask,
    ChildTask,
    Effort,
    KernelsTask,
    LatencyTask,
    NodesTask,
    OpFiles,
    OpsTask,
    PeakTask,
    RecordedTask,
    read_task,
    write_task,
)
from gpuprof.rules.cpu_slices import CpuSlice

MODEL, INPUTS = Path("m.onnx"), Path("inputs.npz")
EFFORT = Effort(time_s=0.5, min_repeats=3)
TIMED = LatencyTask(
    provider="cpu", model=MODEL, inputs=INPUTS, limits=TimingLimits(min_repeats=4), leads=True, beside_others=False
)
RECORDED = RecordedTask(
    provider="cpu",
    model=MODEL,
    inputs=INPUTS,
    warm_up=1,
    repeats=2,
    kineto=Path("trace.json"),
    nodes=Path("d"),
    only_nodes=True,
)


@pytest.mark.parametrize(
    "task",
    [
        CheckTask(provider="cpu", model=MODEL, batches=True),
        TIMED,
        NodesTask(
            provider="cpu",
            threads=2,
            part=CpuSlice((0, 3), 1.5),
            group="g",
            model=MODEL,
            inputs=INPUTS,
            profile_prefix="p",
            optimized=Path("o.onnx"),
            compare=True,
            effort=Effort(time_s=0.5, min_repeats=3, max_repeats=9),
        ),
        OpsTask(provider="cpu", part=CpuSlice((1,)), effort=EFFORT),
        KernelsTask(provider="cuda", effort=EFFORT, range="run"),
        OpFiles(model=MODEL, inputs=INPUTS),
        RECORDED,
        BatchesTask(
            provider="cuda", rows=(BatchTasks(timed=TIMED, recorded=RECORDED), BatchTasks(timed=TIMED, recorded=None))
        ),
    ],
    ids=lambda task: type(task).__name__,
)
def test_a_task_is_read_as_it_was_written_and_is_one_line(task: ChildTask | OpFiles) -> None:
    line = write_task(task)
    assert read_task(line) == task and "\n" not in line


def test_shapes_of_a_ceiling_are_read_as_lists() -> None:
    task = PeakTask(provider="cpu", model=MODEL, cases=[[(2, 3), (3, 2)]], effort=EFFORT)
    assert read_task(write_task(task)).cases == [[[2, 3], [3, 2]]]


def test_a_task_of_another_kind_or_with_other_fields_is_refused() -> None:
    with pytest.raises(KeyError, match="Nothing"):
        read_task('{"kind": "Nothing"}')
    with pytest.raises(TypeError, match="bach"):
        read_task(json.dumps({"kind": "CheckTask", "provider": "cpu", "model": "m.onnx", "bach": 1}))
