from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from gpuprof.domain.catalogue import device
from gpuprof.profiling.gpu.gpu_rows import Recording, device_rows
from gpuprof.profiling.nsight.nsys_report import read_nsys
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.link import LEAST_BYTES, link_rates, link_row
from gpuprof.profiling.timeline.timeline import empty_frame
from tests.profiling import kineto_files
from tests.profiling.models import write_mlp
from tests.profiling.nsys_files import two_runs
from tests.profiling.requests import a_request

MIB = 2**20


def _copies(*rows: tuple[int, int, str, str | None]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["bytes", "duration_ns", "direction", "memory"]).assign(start_ns=0, repeat=0)


def test_the_rate_is_all_bytes_by_all_time_of_copies_that_are_large_enough() -> None:
    rates = link_rates(
        _copies(
            (10 * MIB, 1_000_000, "h2d", "pageable"),
            (30 * MIB, 1_000_000, "h2d", "pageable"),
            (LEAST_BYTES - 1, 900_000, "h2d", "pageable"),  # mostly overhead
            (64 * MIB, 10_000, "d2d", None),  # not over the link
            (64 * MIB, 10_000, "h2d", "unified"),  # pages on demand
        )
    )
    (rate,) = rates
    assert (rate.direction, rate.memory, rate.copies) == ("h2d", "pageable", 2)
    assert rate.bytes_per_s == pytest.approx(40 * MIB / 2e-3)


def test_pinned_and_pageable_memory_are_kept_apart_and_unknown_is_said() -> None:
    rates = link_rates(
        _copies((MIB, 100, "h2d", "pinned"), (MIB, 400, "h2d", "pageable"), (MIB, 200, "d2h", None))
    )  # fmt: skip
    assert {(rate.direction, rate.memory): rate.copies for rate in rates} == {
        ("d2h", None): 1, ("h2d", "pinned"): 1, ("h2d", "pageable"): 1,
    }  # fmt: skip


def test_small_copies_or_none_leave_no_row_rather_than_a_zero() -> None:
    for copies in (
        None,
        empty_frame("bytes", "duration_ns", "direction"),
        _copies((4096, 10, "h2d", "pinned"), (2 * MIB, 0, "h2d", None)),
    ):
        assert link_row("r", device("v100"), copies, "nsys") is None


def test_the_row_says_what_most_copies_were_of_and_leaves_unknown_directions_null() -> None:
    usual = [(MIB, 100_000, "h2d", "pageable")] * 3
    row = link_row("r", device("v100"), _copies(*usual, (MIB, 10_000, "h2d", "pinned")), "nsys")
    assert row is not None and row.measured
    assert row.pcie_bytes_per_s == pytest.approx(MIB / 1e-4) and row.pcie_memory == "pageable"
    assert row.pcie_d2h_bytes_per_s is None and row.dram_bytes_per_s is None
    assert row.source is not None and "3 copies h2d of pageable memory" in row.source


def test_a_timeline_of_nsys_gives_the_rate_of_its_runs(tmp_path: Path) -> None:
    export = two_runs()
    export.copy(5, 2**30, 1, 300, srcKind=0, dstKind=2, end=6)  # loading, outside of the runs
    for run in range(2):
        at = 1000 * (run + 1) + 700
        export.copy(at, 4 * MIB, 1, 301 + run, srcKind=1, dstKind=2, end=at + 100)
    timeline = read_nsys(export.write(tmp_path / "r.sqlite")).select_runs()
    request = a_request(write_mlp(tmp_path / "mlp.onnx"))
    (row,) = device_rows(request, Recording(timeline.kernels, (), {"nsys": "1", "ncu": "2"}, timeline=timeline))
    assert row.run_id == request.run_id and row.pcie_memory == "pinned"
    assert row.pcie_bytes_per_s == pytest.approx(4 * MIB / 100e-9)
    assert row.source is not None and row.source.endswith("by nsys")


def test_a_trace_of_torch_gives_the_rate_of_its_runs(tmp_path: Path) -> None:
    document = kineto_files.trace()
    for event in document["traceEvents"]:
        if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
            event["args"]["bytes"] = 3 * MIB
    copies = read_json_trace(kineto_files.write(tmp_path / "t.json", document)).select_runs().copies
    (rates,) = link_rates(copies)
    assert (rates.direction, rates.memory, rates.copies) == ("h2d", "pageable", 2)
    assert rates.bytes_per_s == pytest.approx(3 * MIB / 5e-6)
