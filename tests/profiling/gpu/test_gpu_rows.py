"""Rows of ops and kernels: from ranges that name ops, and from ONNX Runtime's nodes in pairs with known answers."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from onnx import helper, save

from gpuprof.cli.main import main
from gpuprof.domain.catalogue import device
from gpuprof.errors import InputError
from gpuprof.graph.executed_graph import ExecutedNode
from gpuprof.graph.load import load_graph
from gpuprof.profiling.gpu import recording
from gpuprof.profiling.gpu.gpu_rows import LEAST_BYTES, Recording, device_rows, join_nodes, kernel_rows, op_rows
from gpuprof.profiling.gpu.recording import (
    INDEX,
    KINETO,
    KINETO_NODES,
    join_node_profile,
    record_with_kineto,
    run_for_recording,
    run_nodes_for_recording,
)
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.timeline import Timeline
from gpuprof.profiling.worker.process import package_path, task_command
from gpuprof.profiling.worker.tasks import Resident, WorkerSetup
from tests.profiling.kineto_files import EPOCH_US, trace, write
from tests.profiling.models import write_mlp
from tests.profiling.requests import a_job, a_request
from tests.reruns import waits_for_processes


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
    directory: Path, runs: int = 8, warm_up: int = 3, shift_us: float = 0.0, overhead_us: int = 12
) -> tuple[Path, Path, dict[str, str]]:
    """Write a trace of torch.profiler and ONNX Runtime's profile of one session; return them and kernel → node.

    ``shift_us``: of the profile's clock beyond what both say; ``overhead_us``: of each call outside of the session.
    """
    draw = random.Random(7)
    events: list[dict[str, Any]] = []
    profile: list[dict[str, Any]] = []
    answers: dict[str, str] = {}
    now, correlation = 1000.0, 1
    for run in range(warm_up + runs):
        begin = now
        now += overhead_us * draw.uniform(0.2, 1.8)
        session = now
        launches: list[tuple[str, float, str]] = [(kernel, now + 1.5, "") for kernel in OUTSIDE]
        now += 6.0
        for node, kernels in KERNELS.items():
            start = now
            for kernel in kernels:
                now += draw.uniform(3.0, 9.0)
                launches.append((f"{kernel}_{node}", now, node))
                now += 4.0
            now += draw.uniform(0.5, 3.0)
            kind = next((executed.op_type for executed in EXECUTED if executed.name == node), "Gemm")
            arguments = {"op_name": kind, "provider": "CUDAExecutionProvider"}
            named = {"cat": "Node", "pid": 7, "tid": 7, "ph": "X", "name": f"{node}_kernel_time", "args": arguments}
            # ONNX Runtime writes whole microseconds.
            profile.append({**named, "ts": int(start - shift_us), "dur": int(now - start)})
            now += draw.uniform(0.0, 0.4)
        profile.append(
            {"cat": "Session", "pid": 7, "tid": 7, "ph": "X", "name": "model_run", "ts": int(session - shift_us),
             "dur": int(now - session), "args": {}}
        )  # fmt: skip
        now += overhead_us * draw.uniform(0.2, 1.8)
        if run < warm_up:
            continue
        mark = {"ph": "X", "pid": 7, "tid": 70_000, "args": {}}
        events.append(
            {**mark, "cat": "user_annotation", "name": "gpuprof-run", "ts": EPOCH_US + begin, "dur": now - begin}
        )
        for kernel, launched, node in launches:
            correlation += 1
            given = {"correlation": correlation, "device": 0, "stream": 7, "grid": [80, 1, 1], "block": [256, 1, 1],
                     "registers per thread": 32, "shared memory": 0}  # fmt: skip
            call = {**mark, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": EPOCH_US + launched, "dur": 3.5}
            events.append({**call, "args": {"correlation": correlation}})
            # On the device a kernel runs long after its launch.
            ran = {**mark, "pid": 0, "cat": "kernel", "name": kernel, "ts": EPOCH_US + launched + 500, "dur": 40.0}
            events.append({**ran, "args": given})
            answers[kernel] = node
    path = write(directory / "kernels.json", {"traceEvents": events})
    (directory / "nodes.json").write_text(json.dumps(profile))
    return path, directory / "nodes.json", answers


@pytest.mark.parametrize("clock", ["known", "unknown", "wrong"])
@pytest.mark.parametrize("overhead_us", [2, 60])
def test_every_kernel_of_a_pair_belongs_to_the_node_that_launched_it(
    tmp_path: Path, clock: str, overhead_us: int
) -> None:
    """The clocks are joined by what both files say of them, by the runs alone, or in spite of a wrong clock."""
    kernels, nodes, answers = _write_pair(tmp_path, shift_us=250.0, overhead_us=overhead_us)
    timeline, profile = read_json_trace(kernels).select_runs(), read_json_trace(nodes)
    if clock != "unknown":
        epoch_ns = (EPOCH_US + 250) * 1000 + (0 if clock == "known" else 5_000_000)
        timeline, profile = replace(timeline, epoch_ns=0), replace(profile, epoch_ns=epoch_ns)
    joined = join_nodes(timeline, profile)
    tied = joined.kernels["range"].fillna("").tolist()
    durations = joined.kernels["duration_ns"].to_numpy()
    right = [answers[name] == node for name, node in zip(joined.kernels["name"], tied, strict=True)]
    assert durations[right].sum() / durations.sum() >= 0.99
    assert any("outside of any node: fill" in note for note in joined.notes)


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
    kernels, _, _ = _write_pair(tmp_path)
    timeline = read_json_trace(kernels).select_runs()
    _, report, _ = _write_pair(tmp_path, runs=8, overhead_us=900)
    with pytest.raises(InputError, match="not of the recorded runs"):
        slow = read_json_trace(report)
        stretched = slow.ranges.assign(end_ns=slow.ranges["end_ns"] + 5_000_000)
        join_nodes(timeline, replace(slow, ranges=stretched))


def test_the_gk_estimator_answers_from_a_pair_of_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace of kernels, ONNX Runtime's profile, and the graph that it executed, named together."""
    monkeypatch.chdir(tmp_path)
    write_mlp(tmp_path / "mlp.onnx")
    kernels, nodes, _ = _write_pair(tmp_path)
    made = [helper.make_node(n.op_type, n.inputs, n.outputs, n.name) for n in EXECUTED]
    save(helper.make_model(helper.make_graph(made, "executed", [], [])), str(tmp_path / "executed.onnx"))
    reports = [word for path in (kernels, nodes, tmp_path / "executed.onnx") for word in ("--from-report", str(path))]
    assert main(["profile", "mlp.onnx", "--batch", "2", "--device", "v100", *reports, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["node_time_ms"] == pytest.approx(0.2) and row["kernel_count"] == 6
    assert main(["estimate", "mlp", "--batch", "2", "--device", "v100", "--estimator", "gk", "--json"]) == 0
    (estimate,) = json.loads(capsys.readouterr().out)
    # The kernels of ops: 80 us of the fused node, 40 of each of the two others, and gaps between launches.
    assert estimate["latency_ms"] >= 0.16


def _copies(*rows: tuple[int, int, str, str | None]) -> Recording:
    copies = pd.DataFrame(rows, columns=["bytes", "duration_ns", "direction", "memory"]).assign(start_ns=0, repeat=0)
    kernels = pd.DataFrame({"name": [], "repeat": []})
    return Recording(kernels, (), {"nsys": "1", "ncu": "2"}, timeline=Timeline(kernels, "nsys", "1", copies=copies))


def test_the_rate_of_the_link_is_that_of_the_commonest_large_copies_and_unknown_directions_are_null(
    tmp_path: Path,
) -> None:
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
