from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from gpuprof.domain.catalogue import GpuDescription
from gpuprof.errors import InputError
from gpuprof.profiling.cpu.node_times import read_node_events
from gpuprof.profiling.timeline.json_trace import read_json_trace
from tests.profiling.kineto_files import EPOCH_US, trace, write

CASES = Path(__file__).parents[1] / "cases"


def test_kernels_carry_their_launch_their_operator_and_their_run(tmp_path: Path) -> None:
    timeline = read_json_trace(write(tmp_path / "t.json", trace()))
    kernels = timeline.kernels
    assert kernels["name"].tolist() == ["warm", *["conv_kernel", "relu_kernel"] * 2]
    assert kernels["repeat"].tolist() == [-1, 0, 0, 1, 1]
    assert kernels["range"].tolist() == [None, "aten::conv2d", None, "aten::conv2d", None]
    assert kernels["grid_x"].tolist() == [216] * 5 and kernels["block_x"].tolist() == [128] * 5
    assert kernels["registers_per_thread"].tolist() == [64] * 5
    assert "achieved_occupancy_pct" not in kernels  # torch.profiler's own estimate is 0 above 48 KiB of shared memory
    assert timeline.gpus == {0: GpuDescription("NVIDIA A100-SXM4-80GB", "8.0", 108)}


def test_times_keep_their_nanoseconds_though_they_count_from_the_epoch(tmp_path: Path) -> None:
    kernels = read_json_trace(write(tmp_path / "t.json", trace())).kernels
    assert kernels["start_ns"].tolist()[1] == (EPOCH_US + 1200) * 1000
    assert kernels["duration_ns"].tolist() == [40_125] * 5


def test_copies_have_their_direction_and_run(tmp_path: Path) -> None:
    copies = read_json_trace(write(tmp_path / "t.json", trace())).copies
    assert sorted(zip(copies["repeat"], copies["direction"], copies["bytes"], strict=True)) == [
        (0, "d2h", 64),
        (0, "h2d", 4096),
        (1, "d2h", 64),
        (1, "h2d", 4096),
    ]


def test_a_compressed_trace_is_read_and_a_cut_one_refused(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps(trace()).encode())
    whole, cut = tmp_path / "t.json.gz", tmp_path / "c.json.gz"
    whole.write_bytes(packed)
    cut.write_bytes(packed[:-20])
    assert len(read_json_trace(whole).kernels) == 5
    with pytest.raises(InputError, match="not a whole JSON file"):
        read_json_trace(cut)


def test_a_trace_without_kernels_is_an_error_where_some_were_expected(tmp_path: Path) -> None:
    document = trace()
    document["traceEvents"] = [event for event in document["traceEvents"] if event.get("cat") != "kernel"]
    path = write(tmp_path / "t.json", document)
    with pytest.raises(InputError, match="has no kernel"):
        read_json_trace(path)
    assert len(read_json_trace(path, expect_kernels=False).kernels) == 0


def test_a_plain_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    assert len(read_json_trace(write(tmp_path / "t.json", trace()["traceEvents"])).kernels) == 5


def test_memsets_are_read(tmp_path: Path) -> None:
    document = trace(runs=1)
    copy = next(event for event in document["traceEvents"] if event.get("cat") == "gpu_memcpy")
    document["traceEvents"].append({**copy, "cat": "gpu_memset", "name": "Memset (Device)"})
    memsets = read_json_trace(write(tmp_path / "t.json", document)).memsets
    assert memsets["duration_ns"].tolist() == [5000] and memsets["repeat"].tolist() == [0]


@pytest.mark.parametrize(
    "document",
    [[], {}, {"traceEvents": 5}, {"traceEvents": ["x"]}, [1, 2], [{"cat": "x", "ph": "X", "ts": 1, "dur": 1}]],
)
def test_json_of_another_tool_is_refused(tmp_path: Path, document: object) -> None:
    with pytest.raises(InputError, match=r"not a trace of torch\.profiler|has no kernel"):
        read_json_trace(write(tmp_path / "t.json", document))


def _node(name: str, ts: int, dur: int, op: str = "Conv") -> dict[str, Any]:
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": {"op_name": op}}


def _run(ts: int, dur: int) -> dict[str, Any]:
    return {"cat": "Session", "name": "model_run", "ts": ts, "dur": dur}


def test_nodes_belong_to_the_run_that_holds_them(tmp_path: Path) -> None:
    events = [_node("a", 110, 5), _node("a", 210, 6), _run(100, 50), _run(200, 50), _node("b", 120, 1, "Relu")]
    trace = read_node_events(write(tmp_path / "p.json", events))
    assert [(event.name, event.op_type, event.repeat, event.duration_ns) for event in trace] == [
        ("a", "Conv", 0, 5000),
        ("b", "Relu", 0, 1000),
        ("a", "Conv", 1, 6000),
    ]


def test_other_events_are_passed_over(tmp_path: Path) -> None:
    fence = {"cat": "Node", "name": "a_fence_before", "ts": 1, "dur": 1, "args": {}}
    trace = read_node_events(write(tmp_path / "p.json", [fence, _run(0, 9), _node("a", 2, 3), {"ph": "M"}]))
    assert len(trace) == 1


def test_runs_of_a_model_of_constants_have_no_nodes(tmp_path: Path) -> None:
    assert read_node_events(write(tmp_path / "p.json", [_run(0, 9)])) == ()


@pytest.mark.parametrize("text", ['[{"cat": "Node"', "", '{"a": 1}', "[1, 2]", "[]"])
def test_what_is_no_whole_profile_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_node_events(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_node_events(tmp_path / "none.json")


def test_times_within_bodies_are_not_counted_twice() -> None:
    """One run of a loop: its body's nodes stand in the profile before it and inside its time."""
    timeline = read_json_trace(CASES / "ort_profile.json")
    assert timeline.nodes[["name", "op_type", "duration_ns", "repeat"]].to_numpy().tolist() == [
        ["Loop_0", "Loop", 297_000, 0]
    ]
    assert timeline.notes == (
        "within bodies of loops and branches, part of these nodes' times: MatMul 64 us, Add 57 us, Less 32 us",
    )
    assert timeline.select_runs().run_times_ns()[0] == [317_000]


def test_kernels_of_a_build_with_cuda_profiling_are_those_of_their_nodes(tmp_path: Path) -> None:
    arguments = {"stream": "7", "grid_x": "80", "grid_y": "1", "grid_z": "1", "block_x": "256", "block_y": "1",
                 "block_z": "1", "parent_name": "a"}  # fmt: skip
    launched = {"cat": "Kernel", "ph": "X", "name": "gemm", "ts": 120, "dur": 30, "args": arguments}
    timeline = read_json_trace(write(tmp_path / "p.json", [_node("a", 110, 5), _run(100, 90), launched]))
    (row,) = timeline.kernels.to_dict("records")
    assert (row["name"], row["range"], row["repeat"], row["duration_ns"]) == ("gemm", "a", 0, 30_000)
    assert (row["grid_x"], row["block_x"], row["stream_id"]) == (80, 256, 7)
