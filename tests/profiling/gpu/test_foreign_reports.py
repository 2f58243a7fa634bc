"""Reports of other people's programs: boards outside the catalogue, several GPUs, steps, counters alone."""

import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from onnx import helper, save

from gpuprof.domain.catalogue import GpuDescription, describe_device, device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.graph.executed_graph import ExecutedNode
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.store import KernelDb
from gpuprof.profiling.gpu import recording
from gpuprof.profiling.gpu.gpu_rows import LEAST_BYTES, Recording, device_rows, kernel_rows, op_rows
from gpuprof.profiling.gpu.node_join import join_nodes
from gpuprof.profiling.gpu.recording import (
    INDEX,
    KINETO,
    KINETO_NODES,
    join_node_profile,
    record_with_kineto,
    run_for_recording,
    run_nodes_for_recording,
)
from gpuprof.profiling.gpu.replay import device_of_recording, read_report_set, recordings_of, replayed_job, split_runs
from gpuprof.profiling.nsight.ncu import parse_ncu_csv
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.timeline import Timeline
from gpuprof.profiling.worker.process import task_command
from gpuprof.profiling.worker.tasks import Resident, WorkerSetup
from gpuprof.runtime.child_process import package_path
from tests.command_line import CommandLine
from tests.profiling import kineto_files
from tests.profiling.kineto_files import EPOCH_US, trace, write
from tests.profiling.models import write_mlp
from tests.profiling.ncu_files import NOISE, kernel, long_csv, raw_csv
from tests.profiling.nsys_files import Export, two_runs
from tests.profiling.requests import a_job, a_request, ingest_reports, read_reports
from tests.reruns import waits_for_processes

REPORTS, CASES = (Path(__file__).parents[1] / name for name in ("reports", "cases"))
HTA = REPORTS / "hta_backward_thread.json"


def test_a_real_kernel_with_96_kib_of_shared_memory_occupies_what_its_grid_fills(tmp_path: Path) -> None:
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


def test_copies_of_a_gpu_without_kernels_are_not_those_of_the_other(tmp_path: Path) -> None:
    export = two_runs()
    export.copy(1002, 8192, 1, 950, deviceId=1)
    (recorded,) = read_reports([export.write(tmp_path / "net.sqlite")])
    needed = recorded.requirement(device("v100"))
    assert needed is not None and needed.h2d_bytes == 4096


def test_each_gpu_of_a_report_is_a_run_of_its_own_in_the_database(tmp_path: Path, cli: CommandLine) -> None:
    report, db = _two_gpus(tmp_path), tmp_path / "db"
    rows = cli.json("profile net --batch 4 --from-report", report, "--db", db)
    assert [row["device"] for row in rows] == ["v100", "a100-40"]
    assert KernelDb(db).read_table("runs").num_rows == 2


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


V100 = device("v100")


@pytest.fixture
def nsys(tmp_path: Path) -> Path:
    return two_runs().write(tmp_path / "net.sqlite")


@pytest.fixture
def ncu(tmp_path: Path) -> Path:
    """Counters of one of those runs, and of a kernel that the timeline does not have."""
    path = tmp_path / "net.csv"
    counted = [kernel(f"k{i % 2}(float*)", f"{20 * (i + 1)}", 80 + i) for i in range(3)]
    path.write_text(NOISE + raw_csv([*counted, kernel("other(int)", "5")]))
    return path


def _ingest_reports(tmp_path: Path, *reports: Path, model: str | None = "net") -> KernelDb:
    database = KernelDb.create(tmp_path / "db")
    ingest_reports(database, reports, V100, model)
    return database


def test_a_timeline_and_counters_give_joined_rows_and_creq(tmp_path: Path, nsys: Path, ncu: Path) -> None:
    database = _ingest_reports(tmp_path, nsys, ncu)
    kernels = database.read_table("kernels").to_pylist()
    assert [row["joined"] for row in kernels] == ["both"] * 6 + ["counters"]
    assert [row["achieved_occupancy_pct"] for row in kernels] == [20.0, 40.0, 60.0, 20.0, 40.0, 60.0, 5.0]
    assert [row["start_ns"] for row in kernels] == [0, 100, 200, 1000, 1100, 1200, None]
    assert [row["position"] for row in kernels[:6]] == [0, 1, 2, 0, 1, 2]
    (model,) = database.read_table("models").to_pylist()
    assert model["max_occupancy_pct"] == 60.0
    assert model["wavg_occupancy_pct"] == pytest.approx((20 + 40 + 60) * 60 / 260)
    # 256 threads of 32 registers: eight blocks an SM, so that 80 to 82 blocks need 10 or 11 of 80 SMs.
    assert model["wavg_sm_util_pct"] == pytest.approx((10 + 11 + 11) / 80 * 100 * 60 / 260)
    assert (model["kernel_count"], model["h2d_bytes"], model["d2h_bytes"]) == (3, 4096, 64)
    assert model["latency_mean_ms"] == 900e-6 and model["power_w"] is None
    assert model["occupancy_source"] == "achieved_occupancy_pct"


def test_provenance_says_what_was_read_and_what_did_not_match(tmp_path: Path, nsys: Path, ncu: Path) -> None:
    (run,) = _ingest_reports(tmp_path, nsys, ncu).read_table("runs").to_pylist()
    assert run["collector"] == "replay" and run["device"] == "v100" and run["batch"] == 4
    assert run["collector_version"] == "nsys 2022.4.2.1 (schema 3.0.0), ncu"
    assert run["source"] == f"{nsys} + {ncu}" and len(run["source_sha256"]) == 64
    assert json.loads(run["settings"]) == {"reports": [str(nsys), str(ncu)]}
    assert "1 kernels that the counters have but not the timeline: other(int)" in run["notes"]
    assert "latencies are of runs under the profiler" in run["notes"]


def test_counters_alone_give_what_needs_no_order_in_time(tmp_path: Path, ncu: Path) -> None:
    database = _ingest_reports(tmp_path, ncu)
    (model,) = database.read_table("models").to_pylist()
    assert model["max_occupancy_pct"] == 60.0 and model["kernel_count"] == 4
    assert model["wavg_occupancy_pct"] is None and model["dispatch_ms"] is None and model["h2d_bytes"] is None
    assert len(database.read_table("kernels").to_pylist()) == 4


def test_a_torch_trace_is_ingested_with_our_own_occupancy(tmp_path: Path) -> None:
    path = kineto_files.write(tmp_path / "t.json", kineto_files.trace())
    database = KernelDb.create(tmp_path / "db")
    ingest_reports(database, [path], device("a100-80"))
    (model,) = database.read_table("models").to_pylist()
    # 216 blocks of 128 threads on 108 SMs of 64 warps: eight warps an SM, though 64 registers allow 32.
    assert model["max_occupancy_pct"] == 12.5 and model["kernel_count"] == 2
    assert model["occupancy_source"] == "launch_occupancy_pct"
    assert "occupancy is estimated from the launches" in database.read_table("runs").to_pylist()[0]["notes"]
    rows = database.read_table("kernels").to_pylist()
    assert {row["op_name"] for row in rows} == {"aten::conv2d", None}
    assert {(row["runtime"], row["theoretical_occupancy_pct"]) for row in rows} == {("pytorch", 50.0)}


def test_kernels_are_tied_to_the_nodes_whose_ranges_launched_them(tmp_path: Path) -> None:
    model = write_mlp(tmp_path / "mlp.onnx")
    export = Export()
    export.range("gpuprof-run", 0, 1000)
    export.range("matmul0", 10, 20)
    export.range("unheard of", 30, 40)
    export.kernel("gemm", launched=12, start=100, end=150, correlation=1)
    export.kernel("splitk", launched=14, start=150, end=160, correlation=2)
    export.kernel("strange", launched=35, start=160, end=170, correlation=3)
    export.kernel("own", launched=50, start=170, end=180, correlation=4)
    report = export.write(tmp_path / "r.sqlite")
    database = _ingest_reports(tmp_path, report, model=str(model))
    kernels = database.read_table("kernels").to_pylist()
    assert [(row["op_name"], row["op_type"]) for row in kernels] == [
        ("matmul0", "MatMul"),
        ("matmul0", "MatMul"),
        ("unheard of", None),
        (None, None),
    ]
    ops = database.read_table("ops").to_pylist()
    assert [row["duration_mean_ns"] for row in ops] == [60, None, None, None, None, None]
    assert {row["model_sha256"] for row in ops} != {None}


def test_a_report_without_marked_runs_counts_as_one(tmp_path: Path) -> None:
    export = Export()
    export.kernel("a", 0, 10, 20, 1)
    export.kernel("b", 1, 20, 30, 2)
    (recorded,) = read_reports([export.write(tmp_path / "r.sqlite")])
    assert recorded.kernels["repeat"].tolist() == [0, 0]
    assert "no gpuprof-run range" in recorded.notes[0]


def test_the_device_is_the_one_that_the_reports_name(tmp_path: Path, nsys: Path, ncu: Path) -> None:
    assert device_of_recording(*read_reports([nsys])).name == "v100"
    with pytest.raises(InputError, match=r"name no GPU.*--device"):
        device_of_recording(*read_reports([ncu]))


def test_two_timelines_cannot_be_joined(tmp_path: Path, nsys: Path) -> None:
    report = kineto_files.write(tmp_path / "t.json", kineto_files.trace())
    with pytest.raises(InputError, match="got 2, 0, 0 and 0"):
        read_reports([nsys, report])
    with pytest.raises(InputError, match="got 0, 0, 0 and 0"):
        read_reports([])


def test_a_model_that_is_not_there_is_not_taken_for_a_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no model file gone\.onnx"):
        replayed_job("gone.onnx", 1, Share(), [tmp_path / "r.sqlite"])
    assert replayed_job(None, 1, Share(), [tmp_path / "bert.b8.sqlite"]).graph.name == "bert"


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").touch()
    with pytest.raises(InputError, match="is empty"):
        read_reports([tmp_path / "x.sqlite"])


def _epochs(names: list[str]) -> Export:
    """Ranges of a user's own, each around the launch of two kernels that end within it."""
    export = Export()
    for turn, name in enumerate(names):
        origin = 1000 * (turn + 1)
        export.range(name, origin, origin + 500)
        export.kernel("a", origin + 10, origin + 100, origin + 200, 10 * turn)
        export.kernel("b", origin + 20, origin + 210, origin + 310, 10 * turn + 1)
    return export


def test_runs_are_ranges_that_a_pattern_names(tmp_path: Path) -> None:
    path = _epochs(["load", "iteration 1", "iteration 2"]).write(tmp_path / "r.sqlite")
    (recorded,) = read_reports([path], r"iteration \d+")
    assert recorded.kernels["repeat"].tolist() == [0, 0, 1, 1]
    assert recorded.timeline is not None and recorded.timeline.run_times_ns()[0] == [500, 500]
    assert not any("counts as one run" in note for note in recorded.notes)
    with pytest.raises(InputError, match=r"no range of the report matches.*load, iteration 1"):
        read_reports([path], "step.*")
    with pytest.raises(InputError, match="no regular expression"):
        read_reports([path], "(")


def test_runs_are_as_many_equal_parts_as_a_number_says(tmp_path: Path) -> None:
    path = _epochs(["x", "y", "z"]).write(tmp_path / "r.sqlite")
    (recorded,) = read_reports([path], "3")
    assert recorded.kernels["repeat"].tolist() == [0, 0, 1, 1, 2, 2]
    assert recorded.timeline is not None and recorded.timeline.run_times_ns()[0] == [1000, 1000]
    with pytest.raises(InputError, match="are not 4 times the same"):
        read_reports([path], "4")


def test_kernels_that_outlast_their_range_leave_the_latency_unknown(tmp_path: Path) -> None:
    export = _epochs(["step 1", "step 2"])
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1]["end"] = 9000
    (recorded,) = read_reports([export.write(tmp_path / "r.sqlite")], "step .*")
    assert recorded.timeline is not None
    assert recorded.timeline.run_times_ns() == ([], "the report's ranges end before their kernels do")


def test_models_and_batches_of_a_report_are_told_by_its_ranges(tmp_path: Path) -> None:
    names = ["bert b1", "bert b8", "bert b8", "gpt b1"]
    evidence = read_report_set([_epochs(names).write(tmp_path / "r.sqlite")])
    parts = split_runs(evidence, r"(?P<model>\w+) b(?P<batch>\d+)")
    assert list(parts) == [("bert", 1), ("bert", 8), ("gpt", 1)]
    counts = [len(recordings_of(evidence, runs)[0].kernels) for runs in parts.values()]
    assert counts == [2, 4, 2]
    with pytest.raises(InputError, match="the batch '0'"):
        split_runs(read_report_set([_epochs(["b0"]).write(tmp_path / "z.sqlite")]), r"b(?P<batch>\d+)")


TRACE_CSV = """Generating SQLite file x.sqlite from x.nsys-rep
Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),\
Throughput (MBps),SrcMemKd,DstMemKd,Device,Ctx,Strm,Name
1000,100,1,,,,,,,,,,4.000,40000.0,Pageable,Device,NVIDIA A100-SXM4-80GB (0),1,7,[CUDA memcpy Host-to-Device]
1200,300,2,216,1,1,128,1,1,64,0.000,0.098,,,,,NVIDIA A100-SXM4-80GB (0),1,7,"void gemm<4, 2>(float*)"
1500,50,3,,,,,,,,,,0.001,20.0,Device,,NVIDIA A100-SXM4-80GB (0),1,7,[CUDA memset]
1600,200,4,108,1,1,128,1,1,64,0.000,0.000,,,,,NVIDIA A100-SXM4-80GB (0),1,7,relu
""".replace("\\\n", "")


def test_the_csv_of_nsys_stats_is_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    path.write_text(TRACE_CSV)
    (recorded,) = read_reports([path])
    assert recorded.kernels["name"].tolist() == ["void gemm<4, 2>(float*)", "relu"]
    assert recorded.kernels["grid_x"].tolist() == [216, 108]
    assert recorded.kernels["dynamic_shared_bytes"].tolist() == [98_000, 0]
    assert device_of_recording(recorded).name == "a100-80"
    needed = recorded.requirement(device("a100-80"))
    assert needed is not None and needed.h2d_bytes == 4_000_000
    assert needed.dispatch_ms == 50e-6  # the memset is no waiting
    summary = tmp_path / "sum.csv"
    summary.write_text("Time (%),Total Time (ns),Instances,Avg (ns),Name\n100.0,500,2,250.0,relu\n")
    with pytest.raises(InputError, match=r"is a summary.*cuda_gpu_trace"):
        read_reports([summary])


def _recording(timeline: Timeline) -> Recording:
    return Recording(timeline.kernels, (), {}, timeline=timeline)


def test_kernels_within_ranges_that_name_no_node_give_no_times_of_ops(tmp_path: Path) -> None:
    request = a_request(write_mlp(tmp_path / "m.onnx"))
    timeline = read_json_trace(write(tmp_path / "t.json", trace())).select_runs()
    assert op_rows(request, _recording(timeline)) == ()
    assert {row.op_name for row in kernel_rows(request, timeline.kernels)} == {"aten::conv2d", None}


#: Nodes that a runtime makes of `write_mlp`: two fused, with the kernels of each, and a copy back that is no op's.
EXECUTED = (
    ExecutedNode("gemm0", "FusedMatMul", ("x", "w0", "b0"), ("r0",)),
    ExecutedNode("", "Gemm", ("r0", "w1", "b1"), ("a1",)),
    ExecutedNode("relu1", "Relu", ("a1",), ("r1",)),
    ExecutedNode("Memcpy_r1", "MemcpyToHost", ("r1",), ("r1_host",)),
)
KERNELS = {"gemm0": ("sgemm", "epilogue"), "Gemm_1": ("sgemm",), "relu1": ("elementwise",), "Memcpy_r1": ("copy",)}
#: Kernels of the runtime itself, before its first node.
OUTSIDE = ("fill",)


def _write_pair(
    directory: Path,
    runs: int = 8,
    shift_us: float = 0.0,
    overhead_us: int = 12,
    marked: bool = True,
    threads: tuple[int, int] = (7, 70_000),
) -> tuple[Path, Path, dict[str, str]]:
    """Write a trace of torch.profiler and ONNX Runtime's profile of one session; return them and kernel → node.

    ``shift_us``: of the profile's clock beyond what both say; ``overhead_us``: of each call outside of the session;
    ``marked``: whether the trace has ranges; ``threads``: the thread's id in the profile and in the trace.
    """
    draw = random.Random(threads[0])
    events: list[dict[str, Any]] = []
    profile: list[dict[str, Any]] = []
    answers: dict[str, str] = {}
    now, correlation = 1000.0, 1000 * threads[0]
    for run in range(3 + runs):
        begin = now
        now += overhead_us * draw.uniform(0.2, 1.8)
        session = now
        launches: list[tuple[str, float, str]] = [(kernel, now + 1.5, "") for kernel in OUTSIDE]
        now += 6.0
        for node, kernels in KERNELS.items():
            start = now
            for kernel_name in kernels:
                now += draw.uniform(3.0, 9.0)
                launches.append((f"{kernel_name}_{node}", now, node))
                now += 4.0
            now += draw.uniform(0.5, 3.0)
            kind = next((executed.op_type for executed in EXECUTED if executed.name == node), "Gemm")
            arguments = {"op_name": kind, "provider": "CUDAExecutionProvider"}
            named = {
                "cat": "Node",
                "pid": 7,
                "tid": threads[0],
                "ph": "X",
                "name": f"{node}_kernel_time",
                "args": arguments,
            }
            # ONNX Runtime writes whole microseconds.
            profile.append({**named, "args": arguments, "ts": int(start - shift_us), "dur": int(now - start)})
            now += draw.uniform(0.0, 0.4)
        profile.append(
            {"cat": "Session", "pid": 7, "tid": threads[0], "ph": "X", "name": "model_run",
             "ts": int(session - shift_us), "dur": int(now - session), "args": {}}
        )  # fmt: skip
        now += overhead_us * draw.uniform(0.2, 1.8)
        if run < 3:
            continue
        mark = {"ph": "X", "pid": 7, "tid": threads[1], "args": {}}
        if marked:
            events.append(
                {**mark, "cat": "user_annotation", "name": "gpuprof-run", "ts": EPOCH_US + begin, "dur": now - begin}
            )
        for name, launched, node in launches:
            correlation += 1
            given = {"correlation": correlation, "device": 0, "stream": 7, "grid": [80, 1, 1], "block": [256, 1, 1],
                     "registers per thread": 32, "shared memory": 0}  # fmt: skip
            call = {**mark, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": EPOCH_US + launched, "dur": 3.5}
            events.append({**call, "args": {"correlation": correlation}})
            # On the device a kernel runs long after its launch.
            ran = {**mark, "pid": 0, "cat": "kernel", "name": name, "ts": EPOCH_US + launched + 500, "dur": 40.0}
            events.append({**ran, "args": given})
            answers[name] = node
    path = write(directory / "kernels.json", {"traceEvents": events})
    (directory / "nodes.json").write_text(json.dumps(profile))
    return path, directory / "nodes.json", answers


def _part_right(joined: Timeline, answers: dict[str, str]) -> float:
    """The part of the kernels' time that is tied to the node that launched them."""
    tied = joined.kernels["range"].fillna("").tolist()
    durations = joined.kernels["duration_ns"].to_numpy()
    right = [answers[name] == node for name, node in zip(joined.kernels["name"], tied, strict=True)]
    return float(durations[right].sum() / durations.sum())


@pytest.mark.parametrize("clock", ["known", "unknown", "wrong"])
@pytest.mark.parametrize("overhead_us", [2, 60, 3000])
@pytest.mark.parametrize("marked", [True, False])
def test_kernels_belong_to_their_launching_node(tmp_path: Path, clock: str, overhead_us: int, marked: bool) -> None:
    """The clocks are joined by what both files say of them, by the runs alone, or in spite of a wrong clock."""
    kernels, nodes, answers = _write_pair(tmp_path, shift_us=250.0, overhead_us=overhead_us, marked=marked)
    timeline, profile = read_json_trace(kernels), read_json_trace(nodes)
    timeline = timeline.select_runs() if marked else timeline
    if clock != "unknown":
        epoch_ns = (EPOCH_US + 250) * 1000 + (0 if clock == "known" else 5_000_000)
        timeline, profile = replace(timeline, epoch_ns=0), replace(profile, epoch_ns=epoch_ns)
    joined = join_nodes(timeline, profile)
    assert joined.repeats == 8 and _part_right(joined, answers) >= 0.99
    assert any("outside of any node: fill" in note for note in joined.notes)


@pytest.mark.parametrize("marked", [True, False])
def test_kernels_belong_to_nodes_of_their_own_thread(tmp_path: Path, marked: bool) -> None:
    """Two threads run models at once: the same session, or another one that was not profiled."""
    (tmp_path / "other").mkdir()
    kernels, nodes, answers = _write_pair(tmp_path, marked=marked, threads=(7, 7))
    others = _write_pair(tmp_path / "other", runs=7, marked=marked, threads=(8, 8))
    events = [json.loads(path.read_text())["traceEvents"] for path in (kernels, others[0])]
    timeline = read_json_trace(write(kernels, {"traceEvents": [*events[0], *events[1]]}))
    timeline = timeline.select_runs() if marked else timeline
    alone = join_nodes(timeline, read_json_trace(nodes)).kernels
    assert set(alone["node"][alone["thread_id"] == 8]) <= {-1}
    own = alone[alone["thread_id"] == 7]
    assert [answers[name] for name in own["name"]] == own["range"].fillna("").tolist()
    both = json.loads(nodes.read_text()) + json.loads(others[1].read_text())
    assert _part_right(join_nodes(timeline, read_json_trace(write(nodes, both))), answers) >= 0.99


def test_fused_nodes_stand_for_their_ops_and_copies_for_none(tmp_path: Path) -> None:
    model = write_mlp(tmp_path / "mlp.onnx")
    kernels, nodes, _ = _write_pair(tmp_path)
    timeline = read_json_trace(kernels).select_runs()
    profile = replace(read_json_trace(nodes), epoch_ns=EPOCH_US * 1000)
    recording = replace(_recording(join_nodes(replace(timeline, epoch_ns=0), profile)), executed=EXECUTED)
    recording = recording.tie_to_ops(load_graph(model, 2))
    request = replace(a_request(model), device=device("v100"))
    ops = {row.name: row for row in op_rows(request, recording)}
    assert {name: row.duration_p50_ns for name, row in ops.items()} == {
        "matmul0": 80_000, "add0": None, "relu0": None, "matmul1": 40_000, "add1": None, "relu1": 40_000,
    }  # fmt: skip
    assert (ops["matmul0"].fused, ops["add0"].note) == (3, "fused into matmul0")
    rows = kernel_rows(request, recording.kernels)
    assert {(row.name, row.op_name, row.op_type, row.op_signature is not None) for row in rows} == {
        ("fill", None, None, False),
        ("sgemm_gemm0", "matmul0", "MatMul", True),
        ("epilogue_gemm0", "matmul0", "MatMul", True),
        ("sgemm_Gemm_1", "matmul1", "MatMul", True),
        ("elementwise_relu1", "relu1", "Relu", True),
        ("copy_Memcpy_r1", "Memcpy_r1", "MemcpyToHost", False),
    }
    assert recording.nodes is not None and recording.nodes.total_ns == 200_000
    assert recording.nodes.untied_ns == 40_000 and any("MemcpyToHost" in note for note in recording.notes)


def test_a_profile_of_other_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    unmarked, _, _ = _write_pair(tmp_path, marked=False)
    _, other, _ = _write_pair(tmp_path / "other", threads=(8, 8))
    with pytest.raises(InputError, match="not of the recorded runs"):
        join_nodes(read_json_trace(unmarked), read_json_trace(other))
    kernels, _, _ = _write_pair(tmp_path)
    timeline = read_json_trace(kernels).select_runs()
    _, report, _ = _write_pair(tmp_path, runs=8, overhead_us=900)
    with pytest.raises(InputError, match="not of the recorded runs"):
        slow = read_json_trace(report)
        stretched = slow.ranges.assign(end_ns=slow.ranges["end_ns"] + 5_000_000)
        join_nodes(timeline, replace(slow, ranges=stretched))


def test_the_gk_estimator_answers_from_a_pair_of_reports(here: Path, cli: CommandLine) -> None:
    """A trace of kernels, ONNX Runtime's profile, and the graph that it executed, named together."""
    write_mlp(here / "mlp.onnx")
    kernels, nodes, _ = _write_pair(here)
    made = [helper.make_node(n.op_type, n.inputs, n.outputs, n.name) for n in EXECUTED]
    save(helper.make_model(helper.make_graph(made, "executed", [], [])), str(here / "executed.onnx"))
    reports = [word for path in (kernels, nodes, here / "executed.onnx") for word in ("--from-report", str(path))]
    (row,) = cli.json("profile mlp.onnx --batch 2 --device v100", *reports)
    assert row["node_time_ms"] == pytest.approx(0.2) and row["kernel_count"] == 6
    (estimate,) = cli.json("estimate mlp --batch 2 --device v100 --estimator gk")
    # The kernels of ops: 80 us of the fused node, 40 of each of the two others, and gaps between launches.
    assert estimate["latency_ms"] >= 0.16


def _copies(*rows: tuple[int, int, str, str | None]) -> Recording:
    copies = pd.DataFrame(rows, columns=["bytes", "duration_ns", "direction", "memory"]).assign(start_ns=0, repeat=0)
    kernels = pd.DataFrame({"name": [], "repeat": []})
    return Recording(kernels, (), {"nsys": "1", "ncu": "2"}, timeline=Timeline(kernels, "nsys", "1", copies=copies))


def test_the_rate_of_the_link_is_that_of_the_commonest_large_copies(tmp_path: Path) -> None:
    request, mib = a_request(write_mlp(tmp_path / "m.onnx")), 2**20
    copies = [
        *[(10 * mib, 1_000_000, "h2d", "pageable"), (30 * mib, 1_000_000, "h2d", "pageable")],
        (mib, 10_000, "h2d", "pinned"),
        (LEAST_BYTES - 1, 900_000, "h2d", "pageable"),  # mostly overhead
        (64 * mib, 10_000, "d2d", None),  # not over the link
        (64 * mib, 10_000, "h2d", "unified"),  # pages on demand
    ]
    (row,) = device_rows(request, _copies(*copies))
    assert row.measured and row.run_id == request.run_id and row.pcie_memory == "pageable"
    assert row.pcie_bytes_per_s == pytest.approx(40 * mib / 2e-3) and row.pcie_d2h_bytes_per_s is None
    assert row.source is not None and "2 copies h2d of pageable memory" in row.source and row.source.endswith("by nsys")
    (row,) = device_rows(request, _copies((mib, 200, "d2h", None)))
    assert row.pcie_bytes_per_s is None and row.pcie_memory is None
    assert row.pcie_d2h_bytes_per_s == pytest.approx(mib / 2e-7)
    assert device_rows(request, _copies((4096, 10, "h2d", "pinned"), (2 * mib, 0, "h2d", None))) == ()


def test_a_trace_of_torch_gives_the_rate_of_its_runs(tmp_path: Path) -> None:
    document = trace()
    for event in document["traceEvents"]:
        if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
            event["args"]["bytes"] = 3 * 2**20
    timeline = read_json_trace(write(tmp_path / "t.json", document)).select_runs()
    (row,) = device_rows(a_request(write_mlp(tmp_path / "m.onnx")), _recording(timeline))
    assert row.pcie_memory == "pageable" and row.pcie_bytes_per_s == pytest.approx(3 * 2**20 / 5e-6)


@pytest.mark.slow
def test_nodes_are_recorded_in_a_session_of_their_own_on_the_clock_of_the_trace(tmp_path: Path) -> None:
    """Real files of both on the CPU, where the trace has runs and no kernels: nodes lie within the runs."""
    pytest.importorskip("torch")  # of the extra `export`
    job = a_job(write_mlp(tmp_path / "m.onnx"))
    record_with_kineto(Resident(WorkerSetup()), job.path, job.inputs(), tmp_path, None)
    timelines = join_node_profile(
        tmp_path,
        read_json_trace(tmp_path / KINETO, False).select_runs(),
        lambda: read_json_trace(tmp_path / KINETO_NODES, False).select_runs(),
    )
    assert not any("not tied" in note for note in timelines.nodes.notes)
    op_types = {"MatMul", "Add", "Relu", "FusedMatMul", "FusedGemm", "Gemm"}
    assert {node.op_type for node in timelines.executed} <= op_types
    recorded, runs = timelines.nodes.nodes, timelines.nodes.ranges
    runs = runs[runs["name"] == "gpuprof-run"].sort_values("start_ns")
    assert len(runs) == 5 and sorted(recorded["repeat"].unique().tolist()) == [0, 1, 2, 3, 4]
    for turn, (start, end) in enumerate(zip(runs["start_ns"], runs["end_ns"], strict=True)):
        within = recorded[recorded["repeat"] == turn]
        assert len(within) == len(timelines.executed)
        assert (within["start_ns"] >= start - 1000).all() and (within["start_ns"] <= end).all()
    assert json.loads((tmp_path / INDEX).read_text())["epoch_ns"] > 1_600_000_000_000_000_000


def test_nodes_that_cannot_be_recorded_cost_none_of_the_plain_recording(tmp_path: Path) -> None:
    timeline = read_json_trace(write(tmp_path / "t.json", trace())).select_runs()
    for index in (None, '{"error": "out of memory"}'):
        if index is not None:
            (tmp_path / INDEX).write_text(index)
        timelines = join_node_profile(tmp_path, timeline, lambda: timeline)
        assert len(timelines.nodes.kernels) == len(timeline.kernels)
        assert timelines.nodes.notes[-1].startswith("kernels are not tied to nodes")
    assert "out of memory" in timelines.nodes.notes[-1]


@waits_for_processes
def test_a_profiler_can_run_the_program_by_itself(tmp_path: Path) -> None:
    job, environment = a_job(write_mlp(tmp_path / "m.onnx")), package_path()
    command = task_command(
        tmp_path / "a.task", WorkerSetup(), run_nodes_for_recording, job.path, job.inputs(), tmp_path, None
    )
    subprocess.run(command, env=environment, check=True)
    assert (tmp_path / recording.EXECUTED).is_file()
    job.path.write_bytes(b"no model")
    command = task_command(
        tmp_path / "b.task", WorkerSetup(), run_for_recording, job.path, job.inputs(), None, repeats=1
    )
    completed = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert completed.returncode == InputError.exit_code and completed.stderr.startswith("error: ")
