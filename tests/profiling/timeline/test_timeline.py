"""Timelines of every tool: traces of JSON, ranges around launches, runs, and kernels joined with their counters."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.catalogue import GpuDescription, device
from gpuprof.domain.device import Device
from gpuprof.errors import InputError
from gpuprof.profiling.cpu.op_rows import read_node_events
from gpuprof.profiling.timeline.creq import GpuRequirement, compute_requirement, sum_overlapping
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.timeline import NO_RANGE, Timeline, find_innermost_ranges, join_kernels
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


def test_times_since_the_epoch_keep_their_nanoseconds(tmp_path: Path) -> None:
    """Also where an id without a value is the largest unsigned number, and where a kernel has no launch call."""
    kernel = '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1712345678901234.567, "dur": 1.321, "args": {}}'
    called = kernel.replace("{}", '{"correlation": 7, "context": 18446744073709551615, "grid": [18446744073709551615]}')
    call = called.replace("kernel", "cuda_runtime").replace("234.567", "233.001")
    (tmp_path / "t.json").write_text(f'{{"traceEvents": [{kernel}, {called}, {call}]}}')
    rows = read_json_trace(tmp_path / "t.json").kernels.to_dict("records")
    assert [(row["start_ns"], row["duration_ns"]) for row in rows] == [(1712345678901234567, 1321)] * 2
    assert [row["launch_start_ns"] for row in rows] == [NO_RANGE, 1712345678901233001]


def test_kernels_of_a_build_with_cuda_profiling_are_those_of_their_nodes(tmp_path: Path) -> None:
    """Events on the device have no process of their own, and copies neither a grid nor their bytes."""
    shape = {f"{part}_{axis}": "1" for part in ("grid", "block") for axis in "xyz"} | {"grid_x": "80", "stream": "7"}
    launched = {"cat": "Kernel", "pid": -1, "ph": "X", "name": "gemm", "ts": 120, "dur": 30}
    launched |= {"args": {**shape, "op_name": "Conv", "parent_name": "a_kernel_time"}}
    copied = {**launched, "name": "MemcpyHostToDevice", "ts": 110, "dur": 5, "args": {"grid_x": "-1"}}
    events = [{**event, "pid": 9} for event in (_node("a", 110, 5), _run(100, 90))] + [launched, copied]
    timeline = read_json_trace(write(tmp_path / "p.json", events))
    (row,) = timeline.kernels.to_dict("records")
    assert (row["name"], row["range"], row["op_type"], row["repeat"]) == ("gemm", "a", "Conv", 0)
    assert (row["duration_ns"], row["grid_x"], row["block_x"], row["stream_id"]) == (30_000, 80, 1, 7)
    assert timeline.copies[["direction", "duration_ns", "repeat"]].to_numpy().tolist() == [["h2d", 5_000, 0]]
    needed = compute_requirement(timeline.kernels, timeline, None)
    assert needed is not None and (needed.kernel_count, needed.copy_ms) == (1, 0.005)
    assert needed.h2d_bytes is None and needed.d2h_bytes == 0.0


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


V100 = device("v100")


def kernels(*rows: tuple[int, int, float, int], repeat: int = 0) -> pd.DataFrame:
    """Start, end, occupancy, blocks of each."""
    return pd.DataFrame(
        {
            "start_ns": [start for start, *_ in rows],
            "duration_ns": [end - start for start, end, *_ in rows],
            "achieved_occupancy_pct": [occupancy for *_, occupancy, _ in rows],
            "l2_throughput_pct": [10.0 * (1 + i) for i in range(len(rows))],
            "grid_x": [blocks for *_, blocks in rows],
            **dict.fromkeys(("grid_y", "grid_z", "block_y", "block_z"), 1),
            "block_x": 1024,
            "registers_per_thread": 32,
            "repeat": repeat,
        }
    )


def _copies(*rows: tuple[int, int, int, str, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["start_ns", "duration_ns", "bytes", "direction", "repeat"])


def _require(
    frame: pd.DataFrame, timeline: Timeline | None = None, gpu: Device | None = None, latency_ms: float | None = None
) -> GpuRequirement:
    requirement = compute_requirement(frame, timeline, gpu, latency_ms)
    assert requirement is not None
    return requirement


def test_occupancies_of_kernels_that_overlap_add_up() -> None:
    requirement = _require(kernels((0, 10, 40.0, 1), (5, 15, 30.0, 1), (20, 25, 60.0, 1)))
    assert requirement.max_occupancy_pct == 70.0
    # 40 for 5 ns, 70 for 5, 30 for 5, nothing for 5, 60 for 5.
    assert requirement.wavg_occupancy_pct == pytest.approx((40 + 70 + 30 + 0 + 60) * 5 / 25)
    assert requirement.busy_ms == 20e-6 and requirement.dispatch_ms == 5e-6
    assert requirement.kernel_count == 3
    full = _require(kernels((0, 10, 80.0, 1), (5, 15, 70.0, 1)))  # no more than the device
    assert full.max_occupancy_pct == 100.0 and full.wavg_occupancy_pct == pytest.approx((80 + 100 + 70) / 3)


def test_sm_utilisation_is_the_thesis_on_a_v100() -> None:
    # 1024 threads: two blocks an SM, so that 80 blocks need 40 of 80 SMs and 400 more than there are.
    requirement = _require(kernels((0, 10, 1.0, 80), (10, 30, 1.0, 400)), None, V100)
    assert requirement.wavg_sm_util_pct == pytest.approx((50.0 * 10 + 100.0 * 20) / 30)
    assert _require(kernels((0, 10, 1.0, 80))).wavg_sm_util_pct is None


def test_runs_are_averaged_and_copies_counted_for_one_and_bandwidths_are_weighted_by_time() -> None:
    requirement = _require(kernels((0, 10, 1.0, 1), (10, 40, 1.0, 1)))
    assert requirement.l2_pct == pytest.approx((10 * 10 + 20 * 30) / 40) and requirement.dram_pct is None
    both = pd.concat([kernels((0, 10, 20.0, 1)), kernels((100, 110, 40.0, 1), (110, 120, 40.0, 1), repeat=1)])
    copies = _copies((0, 1, 100, "h2d", 0), (100, 1, 300, "h2d", 1), (110, 1, 8, "d2h", 1))
    requirement = _require(both, Timeline(both, "t", "1", copies), None)
    assert requirement.max_occupancy_pct == 30.0
    assert requirement.kernel_count == 1.5
    assert (requirement.h2d_bytes, requirement.d2h_bytes) == (200.0, 4.0)
    unknown = _require(both, Timeline(both, "t", "1", copies.assign(direction="unknown")), None)
    assert unknown.h2d_bytes is None and unknown.d2h_bytes is None


def test_what_is_not_known_of_every_kernel_is_null() -> None:
    some = kernels((0, 10, 20.0, 1), (10, 20, np.nan, 1))
    requirement = _require(some, None, V100)
    assert requirement.max_occupancy_pct is None and requirement.wavg_occupancy_pct is None
    assert requirement.h2d_bytes is None
    assert requirement.wavg_sm_util_pct is not None
    assert _require(some.drop(columns="registers_per_thread"), None, V100).wavg_sm_util_pct is None


def test_kernels_without_any_time_say_nothing() -> None:
    frame = kernels((0, 10, 1.0, 1)).drop(columns="start_ns")
    assert compute_requirement(frame.drop(columns="duration_ns"), None, V100) is None
    counted = _require(frame, None, V100)  # as ncu leaves it: a duration, and no place in time
    assert counted.max_occupancy_pct == 1.0 and counted.busy_ms is None


def test_the_gap_is_what_a_batch_takes_beyond_kernels_and_copies_without_a_profiler() -> None:
    ms = 1_000_000
    frame = kernels((0, 2 * ms, 40.0, 1), (10 * ms, 12 * ms, 20.0, 1))  # the profiler stretches what lies between
    # The second runs while a kernel does, of the first a millisecond lies beyond one.
    copies = _copies((0, 3 * ms, 1, "h2d", 0), (11 * ms, ms, 1, "d2h", 0))
    recorded = Timeline(frame, "t", "1", copies)
    requirement = _require(frame, recorded, None, latency_ms=8.0)
    assert (requirement.busy_ms, requirement.copy_ms, requirement.dispatch_ms) == (4.0, 1.0, 3.0)
    over_batch = (2 * 40.0 + 2 * 20.0) / 8.0  # not over the trace
    assert requirement.wavg_occupancy_pct == pytest.approx(over_batch)
    in_trace = _require(frame, recorded, None)
    assert in_trace.dispatch_ms == 7.0  # the first copy runs for one of the 8 ms between


def test_memsets_are_no_waiting_and_whole_graphs_hide_what_a_run_is_made_of() -> None:
    frame = kernels((0, 10, 40.0, 1), (30, 40, 20.0, 1))
    event = pd.DataFrame({"start_ns": [10], "duration_ns": [15], "repeat": [0]})
    cleared = _require(frame, Timeline(frame, "t", "1", memsets=event), None)
    assert (cleared.dispatch_ms, cleared.copy_ms) == (5e-6, 15e-6)
    with_graph = _require(frame, Timeline(frame, "t", "1", graphs=event), None)
    assert (with_graph.dispatch_ms, with_graph.busy_ms) == (5e-6, 35e-6)
    assert with_graph.max_occupancy_pct is None and with_graph.kernel_count is None


def test_occupancy_stands_on_counters_of_all_kernels_or_on_their_launches() -> None:
    counted = kernels((0, 10, 40.0, 1), (10, 20, 20.0, 1)).assign(launch_occupancy_pct=5.0)
    requirement = _require(counted)
    assert (requirement.max_occupancy_pct, requirement.occupancy_source) == (40.0, "achieved_occupancy_pct")
    some = counted.assign(achieved_occupancy_pct=[40.0, np.nan])
    requirement = _require(some)
    assert (requirement.max_occupancy_pct, requirement.occupancy_source) == (5.0, "launch_occupancy_pct")


def test_a_gap_below_nothing_is_noise_or_refused() -> None:
    frame = kernels((0, 4_000_000, 40.0, 1))
    near = _require(frame, latency_ms=3.9)
    assert near.dispatch_ms == 0.0 and not near.notes
    far = _require(frame, latency_ms=2.0)
    assert far.dispatch_ms is None
    assert far.notes[0].startswith("no gap between launches: kernels and copies took 4 ms under the profiler")


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(0, 100)), min_size=1, max_size=10)


@given(SPANS)
def test_intervals_are_what_counting_every_nanosecond_gives(spans: list[tuple[int, int, int]]) -> None:
    starts = np.array([start for start, *_ in spans], dtype=np.int64)
    ends = starts + np.array([length for _, length, _ in spans], dtype=np.int64)
    values = np.array([value for *_, value in spans], dtype=np.float64)
    lengths, sums, counts = sum_overlapping(starts, ends, values)
    moments = range(int(starts.min()), int(ends.max()))
    expected = [sum(v for s, e, v in zip(starts, ends, values, strict=True) if s <= t < e) for t in moments]
    assert np.repeat(sums, lengths) == pytest.approx(expected)
    assert np.repeat(counts, lengths).tolist() == [int(((starts <= t) & (t < ends)).sum()) for t in moments]


def test_a_first_run_that_the_profiler_slowed_down_does_not_speak_for_the_others() -> None:
    runs = [
        pd.DataFrame({"name": ["a", "b"], "start_ns": [at, at + gap], "duration_ns": [10, 10], "repeat": turn})
        for turn, (at, gap) in enumerate([(0, 5_000_000), (10_000_000, 110), (20_000_000, 130)])
    ]
    needed = _require(pd.concat(runs, ignore_index=True))
    assert needed.dispatch_ms == pytest.approx(120e-6)
