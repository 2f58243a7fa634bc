from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuprof.errors import InputError
from gpuprof.profiling.cpu.ort_trace import read_trace


def _node(name: str, ts: int, dur: int, op: str = "Conv") -> dict[str, Any]:
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": {"op_name": op}}


def _run(ts: int, dur: int) -> dict[str, Any]:
    return {"cat": "Session", "name": "model_run", "ts": ts, "dur": dur}


def _write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_nodes_belong_to_the_run_that_holds_them(tmp_path: Path) -> None:
    events = [_node("a", 110, 5), _node("a", 210, 6), _run(100, 50), _run(200, 50), _node("b", 120, 1, "Relu")]
    trace = read_trace(_write(tmp_path / "p.json", events))
    assert [(event.name, event.op_type, event.repeat, event.duration_ns) for event in trace] == [
        ("a", "Conv", 0, 5000),
        ("b", "Relu", 0, 1000),
        ("a", "Conv", 1, 6000),
    ]


def test_other_events_are_passed_over(tmp_path: Path) -> None:
    fence = {"cat": "Node", "name": "a_fence_before", "ts": 1, "dur": 1, "args": {}}
    trace = read_trace(_write(tmp_path / "p.json", [fence, _run(0, 9), _node("a", 2, 3), {"ph": "M"}]))
    assert len(trace) == 1


def test_runs_of_a_model_of_constants_have_no_nodes(tmp_path: Path) -> None:
    assert read_trace(_write(tmp_path / "p.json", [_run(0, 9)])) == ()


@pytest.mark.parametrize("text", ['[{"cat": "Node"', "", '{"a": 1}', "[1, 2]", "[]"])
def test_what_is_no_whole_profile_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "none.json")
