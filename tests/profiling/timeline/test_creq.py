from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.catalogue import device
from gpuprof.domain.device import Device
from gpuprof.profiling.timeline.creq import GpuRequirement, compute_requirement, sum_overlapping
from gpuprof.profiling.timeline.timeline import Timeline

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
