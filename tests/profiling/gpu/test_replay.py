from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.kernel_db.store import KernelDb
from gpuprof.profiling.gpu.replay import (
    device_of_recording,
    read_report_set,
    recordings_of,
    replayed_job,
    split_runs,
)
from tests.profiling import kineto_files
from tests.profiling.models import write_mlp
from tests.profiling.ncu_files import NOISE, kernel, raw_csv
from tests.profiling.nsys_files import Export, two_runs
from tests.profiling.requests import ingest_reports, read_reports

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


def test_a_timeline_and_counters_give_joined_rows_and_the_metrics_of_creq(
    tmp_path: Path, nsys: Path, ncu: Path
) -> None:
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
