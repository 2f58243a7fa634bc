"""Timelines of every tool: traces of JSON, ranges around launches, runs, and kernels joined with their counters."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.catalogue import GpuDescription
from gpuprof.errors import InputError
from gpuprof.profiling.cpu.op_rows import read_node_events
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.timeline import NO_RANGE, find_innermost_ranges, join_kernels
from tests.profiling.kineto_files import EPOCH_US, trace, write

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.integers(1, 2), st.integers(1, 2)), max_size=12)
MOMENTS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 2), st.integers(1, 3)), max_size=20)
CASES = Path(__file__).parents[1] / "cases"
SHAPE = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")


def _frame(ranges: list[tuple[int, int, int, int]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "start_ns": [start for start, *_ in ranges],
            "end_ns": [start + length for start, length, *_ in ranges],
            "process_id": [process for *_, process, _ in ranges],
            "thread_id": [thread for *_, thread in ranges],
        },
        dtype=np.int64,
    )


@given(RANGES, MOMENTS)
def test_the_innermost_range_is_the_one_that_began_last_of_those_around(
    ranges: list[tuple[int, int, int, int]], moments: list[tuple[int, int, int]]
) -> None:
    innermost = find_innermost_ranges(
        _frame(ranges),
        np.array([process for _, process, _ in moments], dtype=np.int64),
        np.array([thread for *_, thread in moments], dtype=np.int64),
        np.array([moment for moment, *_ in moments], dtype=np.int64),
    )
    for (moment, process, thread), row in zip(moments, innermost.tolist(), strict=True):
        around = [
            start for start, length, p, t in ranges if (p, t) == (process, thread) and start <= moment < start + length
        ]
        if not around:
            assert row == NO_RANGE
        else:
            start, length, p, t = ranges[row]
            assert (p, t) == (process, thread) and start <= moment < start + length
            assert start == max(around)


def test_of_ranges_that_begin_together_the_shorter_is_the_inner_one() -> None:
    ranges = _frame([(10, 5, 1, 1), (10, 20, 1, 1)])
    ids = np.array([1, 1], dtype=np.int64)
    assert find_innermost_ranges(ranges, ids, ids, np.array([12, 18])).tolist() == [0, 1]


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


def test_times_keep_nanoseconds_and_copies_and_memsets_have_their_run(tmp_path: Path) -> None:
    document = trace()
    copy = next(event for event in document["traceEvents"] if event.get("cat") == "gpu_memcpy")
    document["traceEvents"].append({**copy, "cat": "gpu_memset", "name": "Memset (Device)"})
    timeline = read_json_trace(write(tmp_path / "t.json", document))
    assert timeline.kernels["start_ns"].tolist()[1] == (EPOCH_US + 1200) * 1000
    assert timeline.kernels["duration_ns"].tolist() == [40_125] * 5
    copies = timeline.copies
    assert sorted(zip(copies["repeat"], copies["direction"], copies["bytes"], strict=True)) == [
        (run, *copied) for run in (0, 1) for copied in (("d2h", 64), ("h2d", 4096))
    ]
    assert timeline.memsets["duration_ns"].tolist() == [5000] and timeline.memsets["repeat"].tolist() == [0]


def test_a_compressed_or_plain_trace_is_read_and_a_cut_one_refused(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps(trace()).encode())
    whole, cut = tmp_path / "t.json.gz", tmp_path / "c.json.gz"
    whole.write_bytes(packed)
    cut.write_bytes(packed[:-20])
    assert len(read_json_trace(whole).kernels) == 5
    plain = write(tmp_path / "t.json", trace()["traceEvents"])  # a list of events
    assert len(read_json_trace(plain).kernels) == 5
    with pytest.raises(InputError, match="not a whole JSON file"):
        read_json_trace(cut)


def test_a_trace_without_kernels_is_an_error_where_some_were_expected(tmp_path: Path) -> None:
    document = trace()
    document["traceEvents"] = [event for event in document["traceEvents"] if event.get("cat") != "kernel"]
    path = write(tmp_path / "t.json", document)
    with pytest.raises(InputError, match="has no kernel"):
        read_json_trace(path)
    assert len(read_json_trace(path, expect_kernels=False).kernels) == 0


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
    fence = {"cat": "Node", "name": "a_fence_before", "ts": 111, "dur": 1, "args": {}}
    events = [_node("a", 110, 5), _node("a", 210, 6), _run(100, 50), _run(200, 50), _node("b", 120, 1, "Relu"), fence]
    trace = read_node_events(write(tmp_path / "p.json", events))
    assert [(event.name, event.op_type, event.repeat, event.duration_ns) for event in trace] == [
        ("a", "Conv", 0, 5000),
        ("b", "Relu", 0, 1000),
        ("a", "Conv", 1, 6000),
    ]
    assert read_node_events(write(tmp_path / "p.json", [_run(0, 9)])) == ()  # of a model of constants


@pytest.mark.parametrize("text", ['[{"cat": "Node"', "", '{"a": 1}', "[1, 2]", "[]"])
def test_what_is_no_whole_profile_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_node_events(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
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


def timeline(*runs: str) -> pd.DataFrame:
    """A kernel for each letter; capital letters have another grid."""
    letters = [(letter, repeat) for repeat, run in enumerate(runs) for letter in run]
    frame = _launches([letter for letter, _ in letters])
    frame["repeat"] = [repeat for _, repeat in letters]
    return frame.assign(start_ns=range(len(letters)), duration_ns=1)


def counted_launches(letters: str) -> pd.DataFrame:
    return _launches(list(letters)).assign(achieved_occupancy_pct=np.arange(len(letters), dtype=float))


def _launches(letters: list[str]) -> pd.DataFrame:
    frame = pd.DataFrame({"name": [f"void k{letter.lower()}(int, float*)" for letter in letters]})
    for name in SHAPE:
        frame[name] = [2 if name == "grid_x" and letter.isupper() else 1 for letter in letters]
    return frame


@pytest.mark.parametrize(
    ("runs", "counted", "occupancies"),
    [
        (["aba"], "aba", [0.0, 1.0, 2.0]),
        (["ab", "ab"], "ab", [0.0, 1.0, 0.0, 1.0]),  # counters of one run stand at each run
        (["ab", "ab"], "abab", [0.0, 1.0, 2.0, 3.0]),
        (["abcd"], "cdab", [2.0, 3.0, 0.0, 1.0]),  # streams may launch in another order
    ],
)
def test_kernels_match_by_name_and_order(runs: list[str], counted: str, occupancies: list[float]) -> None:
    joined, notes = join_kernels(timeline(*runs), counted_launches(counted))
    assert joined["joined"].tolist() == ["both"] * len(occupancies) and notes == ()
    assert joined["achieved_occupancy_pct"].tolist() == occupancies


def test_what_only_one_of_them_has_or_launches_otherwise_is_kept_and_said() -> None:
    joined, notes = join_kernels(timeline("aB"), counted_launches("ab"))
    assert joined["joined"].tolist() == ["both", "timeline", "counters"]
    assert len(notes) == 2 and "1 kernels that the timeline has but no counter" in notes[0]
    assert np.isnan(joined["achieved_occupancy_pct"][1])
    joined, notes = join_kernels(timeline("acb"), counted_launches("abd"))
    assert joined["joined"].tolist() == ["both", "timeline", "both", "counters"]
    assert "kc" in notes[0] and "kd" in notes[1]


def test_spaces_and_the_results_type_do_not_matter() -> None:
    kernels, counters = timeline("a"), counted_launches("a")
    kernels["name"] = ["void k<1, 2>(float *)"]
    counters["name"] = ["k<1,2>(float*)"]
    assert join_kernels(kernels, counters)[0]["joined"].tolist() == ["both"]


@given(st.text("abcAB", max_size=12), st.text("abcAB", max_size=12))
def test_nothing_is_lost_and_nothing_counted_twice(launched: str, counted_letters: str) -> None:
    if not launched and not counted_letters:
        return
    joined, _ = join_kernels(timeline(launched), counted_launches(counted_letters))
    assert (joined["joined"] != "counters").sum() == len(launched)
    assert (joined["joined"] != "timeline").sum() == len(counted_letters)
    common = sum(min(launched.count(letter), counted_letters.count(letter)) for letter in set(launched))
    assert (joined["joined"] == "both").sum() == common


def test_templates_match_although_two_tools_write_their_arguments_in_two_ways() -> None:
    kernels, counters = timeline("aba"), counted_launches("aba")
    traced = {
        "a": "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, std::array<char*, 3ul> >"
        "(int, at::native::AddFunctor<float>, std::array<char*, 3ul>)",
        "b": "void at::native::(anonymous namespace)::CatArray<128>(float*)",
    }
    replayed = {
        "a": "void at::native::vectorized_elementwise_kernel<(int)4, at::native::AddFunctor<float>, "
        "std::array<char *, (unsigned long)3>>(int, T2, T3)",
        "b": "void at::native::<unnamed>::CatArray<(int)128>(T1 *)",
    }
    joined, notes = join_kernels(
        kernels.assign(name=[traced[name[6]] for name in kernels["name"]]),
        counters.assign(name=[replayed[name[6]] for name in counters["name"]]),
    )
    assert joined["joined"].tolist() == ["both"] * 3 and notes == ()
    assert joined["achieved_occupancy_pct"].tolist() == [0.0, 1.0, 2.0]
