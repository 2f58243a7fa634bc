import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.errors import InputError, UnavailableError
from gpuprof.profiling.nsight.ncu import (
    COUNTERS,
    ONE_PASS,
    find_decimal_mark,
    in_column_unit,
    listed_metrics,
    number_of,
    parse_ncu_csv,
    read_ncu_rep,
    read_text,
    resolve_metrics,
)
from tests.profiling.ncu_files import NOISE, OCCUPANCY, READ, kernel, long_csv, raw_csv
from tests.reruns import waits_for_processes

CASES = Path(__file__).parents[1] / "cases"
TWO = [kernel("void k0(float*)", "25.50", more={READ: "1.5"}), kernel("void k1<1, 2>(float*, int)", "75.00", grid=81)]


@pytest.mark.parametrize("text", [NOISE + raw_csv(TWO), NOISE + long_csv(TWO)], ids=["raw", "long"])
def test_both_pages_are_read_through_the_noise(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text)
    kernels = parse_ncu_csv(read_text(path), "ncu.csv").kernels
    assert kernels["name"].tolist() == ["void k0(float*)", "void k1<1, 2>(float*, int)"]
    assert kernels["achieved_occupancy_pct"].tolist() == [25.5, 75.0]
    assert kernels["duration_ns"].tolist() == [1_234_500.0] * 2
    assert kernels["grid_x"].tolist() == [80, 81] and kernels["block_x"].tolist() == [256, 256]
    assert kernels["process_id"].tolist() == [4711, 4711]


def test_a_metric_that_a_kernel_lacks_is_null_and_not_zero() -> None:
    kernels = parse_ncu_csv(raw_csv([*TWO, kernel("k2", "n/a")]), "r").kernels
    assert kernels["dram_read_bytes"][0] == 1.5e6
    assert math.isnan(kernels["dram_read_bytes"][1])
    assert math.isnan(kernels["achieved_occupancy_pct"][2])


def test_lines_between_the_rows_are_skipped() -> None:
    head, units, *rows = raw_csv(TWO).splitlines()
    mixed = "\n".join([head, units, rows[0], "==WARNING== clocks changed", "epoch 3, loss 0.1", rows[1]])
    assert len(parse_ncu_csv(mixed, "r").kernels) == 2


def test_a_row_that_is_cut_off_is_an_error() -> None:
    text = raw_csv(TWO)
    with pytest.raises(InputError, match=r"r:4 .*cut off"):
        parse_ncu_csv(text[: len(text) - 40], "r")
    with pytest.raises(InputError, match=r"r:4 .*cut off"):  # a digit less would be another number
        parse_ncu_csv(text.replace('"",""\n', "")[: len(text) - 12], "r")


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "counters .ERR_NVGPUCTRPERM.*SYS_ADMIN"),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", "another profiler.*dcgmi"),
        ("==WARNING== No kernels were profiled.", "ncu saw no kernel"),
    ],
)
def test_what_ncu_complains_of_is_said_with_its_cure(printed: str, message: str) -> None:
    with pytest.raises(UnavailableError, match=message):
        parse_ncu_csv(NOISE + printed, "r")


def test_another_tools_csv_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("Start (ns),Duration (ns),Name\n1,2,k\n")
    with pytest.raises(InputError, match="no table of Nsight Compute"):
        parse_ncu_csv(read_text(path), "ncu.csv")
    with pytest.raises(InputError, match="cannot read"):
        parse_ncu_csv(read_text(tmp_path / "none.csv"), "ncu.csv")


def test_a_table_without_kernels_is_an_error() -> None:
    with pytest.raises(InputError, match="r: it has no kernel"):
        parse_ncu_csv("\n".join(raw_csv(TWO).splitlines()[:2]), "r")


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["117,344", "27,595,520", "45.31"], [117344.0, 27595520.0, 45.31]),
        (["117.344", "27.595.520", "45,31"], [117344.0, 27595520.0, 45.31]),
        (["117\u202f344", "27\u202f595\u202f520", "45,31"], [117344.0, 27595520.0, 45.31]),
        (["117'344", "1'234.5"], [117344.0, 1234.5]),
        (["117,344", "n/a"], [117344.0, None]),
        (["1.234,5", "117.344"], [1234.5, 117344.0]),
    ],
)
def test_the_numbers_of_a_table_tell_its_locale(texts: list[str], numbers: list[float | None]) -> None:
    mark = find_decimal_mark(texts)
    assert [number_of(text, mark) for text in texts] == numbers


def test_numbers_that_contradict_one_another_are_refused_and_not_guessed() -> None:
    with pytest.raises(InputError, match="LC_ALL=C"):
        find_decimal_mark(["1.25", "1,25"])


@pytest.mark.parametrize(("name", "device"), [("bom", None), ("utf16", None), ("attribute_word", "NVIDIA H200")])
def test_tables_of_other_machines_give_their_counters(name: str, device: str | None) -> None:
    """PowerShell's byte-order mark and UTF-16; a word among the attributes of the device, as ncu 2025.3 writes."""
    counters = parse_ncu_csv(read_text(CASES / "ncu" / f"{name}.csv"), "ncu.csv")
    row, count = counters.kernels.iloc[0], len(counters.kernels)
    if device is None:
        assert (count, row["achieved_occupancy_pct"], row["dram_read_bytes"]) == (2, 45.31, 27_595_520)
    else:
        assert (count, row["achieved_occupancy_pct"], row["dram_read_bytes"]) == (1, 45.5, 1000)
        assert row["duration_ns"] == 2000 and counters.gpus[0].name == device and counters.gpus[0].sms == 132


@pytest.mark.parametrize("write", [raw_csv, long_csv])
def test_a_value_that_cannot_be_read_costs_none_of_the_others(write: Any) -> None:
    counters = parse_ncu_csv(write([kernel("k", "60", more={READ: "plenty"})]), "r")
    assert counters.kernels["achieved_occupancy_pct"].tolist() == [60.0] and "dram_read_bytes" not in counters.kernels
    assert counters.notes == ("1 of 1 values of dram_read_bytes could not be read: 'plenty' is no number",)
    counters = parse_ncu_csv(write([kernel("k", "60"), kernel("k", "inf"), kernel("k", "n/a")]), "r")
    assert counters.kernels["achieved_occupancy_pct"].fillna(-1).tolist() == [60.0, -1.0, -1.0]
    assert counters.notes == ("1 of 3 values of achieved_occupancy_pct could not be read: 'inf' is no number",)


def test_a_table_of_which_no_counter_can_be_read_is_refused() -> None:
    with pytest.raises(InputError, match="could not be read"):
        parse_ncu_csv(raw_csv([("k", (1, 1, 1), (32, 1, 1), {OCCUPANCY: "much"})]), "r")


@given(st.floats(0, 1e15))
def test_separators_of_thousands_change_nothing(value: float) -> None:
    assert number_of(f"{value:,.3f}") == number_of(f"{value:.3f}")


@pytest.mark.parametrize(
    ("column", "value", "unit", "expected"),
    [
        ("duration_ns", 1.5, "msecond", 1.5e6),
        ("duration_ns", 17.0, "ns", 17.0),
        ("duration_ns", 2.0, "us", 2000.0),
        ("dram_read_bytes", 2.5, "Gbyte", 2.5e9),
        ("static_shared_bytes", 49.15, "Kbyte/block", 49150.0),
        ("registers_per_thread", 32.0, "register/thread", 32.0),
        ("instruction_count", 1e6, "inst", 1e6),
        ("l2_hit_pct", 12.5, "%", 12.5),
    ],
)
def test_values_come_in_the_unit_of_their_column(column: str, value: float, unit: str, expected: float) -> None:
    assert in_column_unit(column, value, unit) == expected


@pytest.mark.parametrize(
    ("column", "unit"), [("duration_ns", "byte"), ("l2_hit_pct", "Gbyte"), ("dram_read_bytes", "%")]
)
def test_a_unit_that_does_not_fit_is_an_error(column: str, unit: str) -> None:
    with pytest.raises(InputError, match="does not fit"):
        in_column_unit(column, 1.0, unit)


def test_names_are_resolved_for_the_gpu() -> None:
    hopper = listed_metrics(
        "Device NVIDIA H200 (GH100)\n"
        "------------------------------  --------- ------------ -----------\n"
        "Metric Name                     Metric Type  Metric Unit  Metric Description\n"
        "dram__bytes_read                Counter   byte   # of bytes read from DRAM\n"
        "sm__warps_active                Counter   warp   cumulative # of warps in flight\n"
    )
    blackwell = frozenset({"dram__bytes_op_read", "sm__warps_active"})
    wanted = ("achieved_occupancy_pct", "dram_read_bytes", "l2_hit_pct")
    assert resolve_metrics(wanted, hopper) == (
        {"achieved_occupancy_pct": OCCUPANCY, "dram_read_bytes": "dram__bytes_read.sum"},
        ("l2_hit_pct",),
    )
    assert resolve_metrics(wanted, blackwell)[0]["dram_read_bytes"] == "dram__bytes_op_read.sum"
    assert resolve_metrics(wanted, frozenset())[1] == ()


def test_what_is_counted_by_default_fits_one_pass() -> None:
    names, _ = resolve_metrics(ONE_PASS, frozenset())
    assert set(ONE_PASS) <= set(COUNTERS) and "sm_throughput_pct" not in ONE_PASS and "l2_hit_pct" not in ONE_PASS
    # The set that CUPTI's planner of passes was asked about.
    assert set(names.values()) == {
        "gpu__time_duration.sum", OCCUPANCY, "smsp__cycles_active.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed", READ, "dram__bytes_write.sum",
        "lts__t_sectors.avg.pct_of_peak_sustained_elapsed", "smsp__inst_executed.sum",
    }  # fmt: skip


def test_its_own_file_is_read_through_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, tuple[Any, str]]
    values = {OCCUPANCY: (33.0, "%"), "launch__grid_dim_x": (64.0, ""), "gpu__time_duration.sum": (12.0, "us")}
    values |= {"device__attribute_l2_cache_size": (None, ""), READ: ("much", "byte")}

    class Metric:
        def __init__(self, name: str) -> None:
            self.value, self._unit = values[name]

        def as_double(self) -> Any:
            return self.value

        def unit(self) -> str:
            return self._unit

    action = SimpleNamespace(name=lambda *_: "void k(int)", metric_names=lambda: list(values), metric_by_name=Metric)
    part = SimpleNamespace(num_actions=lambda: 1, action_by_idx=lambda _: action)
    context = SimpleNamespace(num_ranges=lambda: 1, range_by_idx=lambda _: part)
    package = SimpleNamespace(load_report=lambda _: context, IAction=SimpleNamespace(NameBase_DEMANGLED=1))
    monkeypatch.setitem(sys.modules, "ncu_report", package)
    report = tmp_path / "r.ncu-rep"
    report.write_bytes(b"NVR")
    (row,) = read_ncu_rep(report).kernels.to_dict("records")
    assert row["name"] == "void k(int)" and row["grid_x"] == 64 and row["duration_ns"] == 12_000
    assert row["achieved_occupancy_pct"] == 33.0


@waits_for_processes
def test_its_own_file_is_read_by_ncu_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "r.ncu-rep"
    report.write_bytes(b"NVR")
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="neither ncu nor the package ncu_report"):
        read_ncu_rep(report)
    table = tmp_path / "table.csv"
    table.write_text(raw_csv(TWO))
    fake = tmp_path / "ncu"
    fake.write_text(f"#!/bin/sh\n/bin/cat {table}\n")
    fake.chmod(0o755)
    assert len(read_ncu_rep(report).kernels) == 2
    fake.write_text("#!/bin/sh\necho '==ERROR== not a report' >&2\nexit 1\n")
    with pytest.raises(InputError, match=r"cannot read .*not a report"):
        read_ncu_rep(report)
