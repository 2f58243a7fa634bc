"""Reports of other people's programs: boards outside the catalogue, several GPUs, steps, counters alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuprof.cli.main import main
from gpuprof.domain.catalogue import GpuDescription, describe_device, device
from gpuprof.errors import InputError
from gpuprof.kernel_db.store import KernelDb
from gpuprof.profiling.gpu.replay import device_of_recording
from gpuprof.profiling.nsight.ncu import parse_ncu_csv
from gpuprof.profiling.timeline.json_trace import read_json_trace
from tests.profiling import kineto_files
from tests.profiling.ncu_files import kernel, long_csv, raw_csv
from tests.profiling.nsys_files import Export, two_runs
from tests.profiling.requests import ingest_reports, read_reports

REPORTS, CASES = (Path(__file__).parents[1] / name for name in ("reports", "cases"))
HTA = REPORTS / "hta_backward_thread.json"


def test_a_real_kernel_with_96_kib_of_shared_memory_occupies_what_its_grid_fills_and_not_nothing(
    tmp_path: Path,
) -> None:
    (event,) = (event for event in json.loads(HTA.read_text())["traceEvents"] if event["cat"] == "kernel")
    assert event["args"]["est. achieved occupancy %"] == 0  # what torch.profiler says of it
    database = KernelDb.create(tmp_path / "db")
    ingest_reports(database, [HTA], device("a100-40"), batch=1)
    (row,) = database.read_table("kernels").to_pylist()
    assert row["achieved_occupancy_pct"] is None  # nothing was counted
    assert row["launch_occupancy_pct"] == pytest.approx(event["args"]["warps per SM"] / 64 * 100)
    (model,) = database.read_table("models").to_pylist()
    assert model["max_occupancy_pct"] == pytest.approx(3.7037, abs=1e-3)
    assert model["wavg_sm_util_pct"] == pytest.approx(100 * 64 / 108)  # 97 KiB of 164: one block an SM


def test_a_step_of_torch_profilers_schedule_is_a_run_though_another_thread_launches() -> None:
    timeline = read_json_trace(HTA)
    assert timeline.kernels["repeat"].tolist() == [0]
    assert timeline.kernels["range"].tolist() == ["aten::mm"]
    assert not any("counts as one run" in note for note in timeline.select_runs().notes)


def test_steps_count_runs_unless_runs_are_marked(tmp_path: Path) -> None:
    document = kineto_files.trace(runs=3)
    for event in document["traceEvents"]:
        if event.get("name") == "gpuprof-run":
            event["name"] = f"ProfilerStep#{event['ts'] % 7}"
    path = kineto_files.write(tmp_path / "t.json", document)
    assert read_json_trace(path).repeats == 3


def test_a_real_trace_of_a_board_outside_the_catalogue_describes_it() -> None:
    (recording,) = read_reports([REPORTS / "pytorch_profile_analysis.json"])
    board = device_of_recording(recording)
    assert (board.name, board.compute_units, board.compute_capability) == ("h100", 132, "9.0")
    assert board.dram_bytes == 101997215744 and board.sm is not None
    assert board.sm.max_shared_memory_per_block_bytes == 232448
    assert "the report" in board.sources["compute"]
    assert recording.kernels["repeat"].tolist() == [0, 0]  # kernels without a launch belong to no range


def test_a_board_is_described_by_nsys(tmp_path: Path) -> None:
    export = Export()
    export.kernel("a", 0, 10, 20, 1)
    export.add(
        "TARGET_INFO_GPU", id=4, cuDevice=0, name="NVIDIA Curious 90", computeMajor=8, computeMinor=9, smCount=100,
        totalMemory=24 * 2**30, memoryBandwidth=800 * 10**9, clockRate=2_500_000_000, l2CacheSize=64 * 2**20,
    )  # fmt: skip
    (recording,) = read_reports([export.write(tmp_path / "r.sqlite", new=True)])
    board = device_of_recording(recording)
    assert (board.name, board.compute_units, board.clock_mhz) == ("curious-90", 100, 2500.0)
    assert (board.dram_bytes_per_s, board.l2_bytes, board.dram_bytes) == (800e9, 64 * 2**20, 24 * 2**30)


def test_the_gpu_of_a_kernel_is_told_by_cudas_index_in_newer_exports(tmp_path: Path) -> None:
    export = Export()
    export.kernel("a", 0, 10, 20, 1, deviceId=0)
    export.add("TARGET_INFO_GPU", id=0, name="NVIDIA A100-SXM4-40GB")
    export.add("TARGET_INFO_GPU", id=1, name="Tesla V100-SXM2-16GB")
    export.add("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0)
    export.add("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=1)
    (recording,) = read_reports([export.write(tmp_path / "r.sqlite")])
    assert device_of_recording(recording).name == "v100"


def test_ranks_that_see_a_gpu_each_as_their_first_are_of_two_gpus(tmp_path: Path) -> None:
    """``CUDA_VISIBLE_DEVICES`` renumbers a process's GPUs: both ranks' kernels carry the index 0."""
    export = Export()
    for rank in range(2):
        export.kernel("a", 0, 10, 20, 1, pid=7 + rank)
        export.add("TARGET_INFO_GPU", id=rank, cuDevice=rank, name="NVIDIA A100-SXM4-40GB")
        export.add("TARGET_INFO_CUDA_DEVICE", gpuId=rank, cudaId=0, pid=7 + rank)
    recordings = read_reports([export.write(tmp_path / "r.sqlite", new=True)])
    assert [len(recording.kernels) for recording in recordings] == [1, 1]
    assert [recording.kernels["device_index"].tolist() for recording in recordings] == [[0], [1]]


def test_memsets_whole_graphs_and_unread_tables_are_told(tmp_path: Path) -> None:
    export = two_runs()
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", start=1111, end=1150, globalPid=7 << 24, bytes=4096)
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1300, end=1800, globalPid=7 << 24, graphId=1)
    export.add("CUDA_UM_CPU_PAGE_FAULT_EVENTS", start=1, end=2)
    (recording,) = read_reports([export.write(tmp_path / "r.sqlite")])
    timeline = recording.timeline
    assert timeline is not None and timeline.memsets["duration_ns"].tolist() == [39]
    assert timeline.graphs["repeat"].tolist() == [0]
    needed = recording.requirement(device("v100"))
    assert needed is not None and needed.max_occupancy_pct is None and needed.kernel_count is None
    notes = "; ".join(recording.notes)
    assert "1 CUDA graphs were recorded as wholes, 0.0005 of 0.00088 ms" in notes
    assert "not read: CUDA_UM_CPU_PAGE_FAULT_EVENTS" in notes


ATTRIBUTES = {
    "device__attribute_display_name": "NVIDIA Curious 90",
    "device__attribute_compute_capability_major": "9",
    "device__attribute_compute_capability_minor": "0",
    "device__attribute_multiprocessor_count": "114",
    "device__attribute_clock_rate": "1,755,000",
    "device__attribute_memory_clock_rate": "1,593,000",
    "device__attribute_global_memory_bus_width": "5,120",
    "device__attribute_l2_cache_size": "52,428,800",
}


@pytest.mark.parametrize("write", [raw_csv, long_csv])
def test_a_board_is_described_by_ncus_attributes(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "net.csv"
    path.write_text(write([kernel("a", more=ATTRIBUTES)]))
    (recording,) = read_reports([path])
    board = device_of_recording(recording)
    assert (board.name, board.compute_units, board.clock_mhz) == ("curious-90", 114, 1755.0)
    assert board.dram_bytes_per_s == pytest.approx(5120 / 8 * 1.593e9 * 2) and board.l2_bytes == 52_428_800


def test_a_board_of_a_capability_that_nobody_knows_is_refused_with_its_name() -> None:
    assert describe_device(GpuDescription("NVIDIA Future", "99.0", 100)) is None
    assert describe_device(GpuDescription("NVIDIA Curious 90", "9.0")) is None  # without SMs nothing can be scaled
    assert describe_device(GpuDescription("Tesla V100-SXM2-16GB")) is device("v100")


def _two_gpus(tmp_path: Path) -> Path:
    export = two_runs()
    export.add("TARGET_INFO_GPU", id=1, cuDevice=1, name="NVIDIA A100-SXM4-40GB")
    for run in range(2):
        begin = 1000 * (run + 1)
        export.kernel("other", begin + 55, begin + 60, begin + 160, 900 + run, deviceId=1)
        export.copy(begin + 2, 8192, 1, 950 + run, deviceId=1)
    for row in export.rows["CUPTI_ACTIVITY_KIND_MEMCPY"]:
        row.setdefault("deviceId", 0)
    return export.write(tmp_path / "net.sqlite", new=True)


def test_several_gpus_of_one_report_are_told_apart(tmp_path: Path) -> None:
    first, second = read_reports([_two_gpus(tmp_path)])
    assert device_of_recording(first).name == "v100" and device_of_recording(second).name == "a100-40"
    assert set(first.kernels["name"]) == {"void k0(float*)", "void k1(float*)"}
    assert set(second.kernels["name"]) == {"void other(float*)"}
    needed = second.requirement(device("a100-40"))
    assert needed is not None and needed.kernel_count == 1 and needed.h2d_bytes == 8192
    assert "GPU 1 of 2 in the report" in second.notes


def test_each_gpu_of_a_report_is_a_run_of_its_own_in_the_database(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, db = _two_gpus(tmp_path), str(tmp_path / "db")
    assert main(["profile", "net", "--from-report", str(report), "--batch", "4", "--db", db, "--json"]) == 0
    assert [row["device"] for row in json.loads(capsys.readouterr().out)] == ["v100", "a100-40"]
    assert KernelDb(Path(db)).read_table("runs").num_rows == 2


def test_counters_of_several_gpus_are_told_apart(tmp_path: Path) -> None:
    rows = raw_csv([kernel("a", "10"), kernel("b", "20")]).splitlines()
    rows[3] = rows[3].replace('"0","9.0"', '"1","9.0"')
    path = tmp_path / "net.csv"
    path.write_text("\n".join(rows) + "\n")
    assert [recording.kernels["name"].tolist() for recording in read_reports([path])] == [["a"], ["b"]]


RULES = ["Rule Name", "Rule Type", "Rule Description", "Estimated Speedup Type", "Estimated Speedup"]


def _details_csv(tail: str) -> str:
    """As ``ncu --csv`` prints by default: people's names of metrics, and columns of rules at the end."""
    head = ["ID", "Process ID", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC"]
    head += ["Section Name", "Metric Name", "Metric Unit", "Metric Value", *RULES]
    fixed = '"0","7","gemm(float*)","1","7","(256, 1, 1)","(64, 1, 1)","0","8.0"'
    metrics = [
        ("GPU Speed Of Light Throughput", "Duration", "usecond", "12.50"),
        ("Occupancy", "Achieved Occupancy", "%", "48.20"),
        ("Launch Statistics", "Registers Per Thread", "register/thread", "96"),
    ]
    lines = [",".join(f'"{name}"' for name in head)]
    lines += [f"{fixed}," + ",".join(f'"{part}"' for part in metric) + tail for metric in metrics]
    lines.append(f'{fixed},"Occupancy","","","","Occupancy","OPT","two lines,\nof advice","local","51.8"')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("tail", [',"","","","",""', ",,,,,", ""])
def test_a_table_whose_columns_of_rules_are_empty_is_whole(tail: str) -> None:
    kernels = parse_ncu_csv(_details_csv(tail), "net.csv").kernels
    assert kernels["achieved_occupancy_pct"].tolist() == [48.2]
    assert kernels["duration_ns"].tolist() == [12_500.0] and kernels["registers_per_thread"].tolist() == [96.0]


def test_a_table_that_is_cut_off_in_a_rules_text_is_refused() -> None:
    text = _details_csv(',"","","","",""')
    with pytest.raises(InputError, match="is not a whole row"):
        parse_ncu_csv(text[: text.rindex("of advice")], "net.csv")
