"""The run on a GPU: its script, and what stands in for a GPU when it is rehearsed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.check import find_wrong_rows
from bench.gpu.rehearsal import kernels
from gpuprof.profiling.nsight.ncu import parse_ncu_csv, read_text
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.timeline import join_kernels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUN = ROOT / "bench" / "gpu" / "run.sh"
#: Steps that are done anew each time.
LAST = {"08-compact", "08-calibrate", "08-check", "08-evaluate", "08-page", "08-options"}


def _event(name: str, start: float, duration: float, kind: str = "cpu_op") -> dict[str, object]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 7, "tid": 7, "ts": start, "dur": duration, "args": {}}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    events = [_event("gpuprof-run", 100.0 * turn, 90, "user_annotation") for turn in range(2)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_each_run_of_a_trace_gets_kernels_and_copies(trace: Path) -> None:
    kernels.add_kernels(str(trace))
    timeline = read_json_trace(trace).select_runs()
    names = [name.split("::")[1].split("<")[0] for name in timeline.kernels["name"]]
    assert names == [f"{name}_kernel" for name in kernels.KERNELS] * 2
    assert timeline.kernels["repeat"].tolist() == [0] * len(kernels.KERNELS) + [1] * len(kernels.KERNELS)
    assert timeline.copies["direction"].tolist() == ["h2d", "d2h"] * 2


def test_the_played_counters_join_the_timeline_kernel_by_kernel(trace: Path, tmp_path: Path) -> None:
    """With a word among the attributes of the device, which once cost a run its counters."""
    kernels.write_counters(tmp_path / "ncu.csv")
    kernels.add_kernels(str(trace))
    joined, unmatched = join_kernels(
        read_json_trace(trace).select_runs().kernels, parse_ncu_csv(read_text(tmp_path / "ncu.csv"), "ncu.csv").kernels
    )
    assert not unmatched and joined["joined"].tolist() == ["both"] * 2 * len(kernels.KERNELS)
    assert set(joined["achieved_occupancy_pct"]) == {37.5}


def _played_python(directory: Path) -> Path:
    """A Python that says what it was asked, fails at one verb, and starts the real one for scripts."""
    path = directory / "python"
    path.write_text(
        f"#!/bin/sh\n"
        f'case "$*" in *local_gpus*) echo gpu h200 cupti cupti+ncu nvml,ncu CUDAExecutionProvider;;\n'
        f"*mps_daemon*) exit ${{MPS_CODE:-0}};;\n"
        f'-c*) exec {sys.executable} "$@";;\n'
        f'*"zoo build"*) touch "$7";; *" doctor"*) exit 3;; *) echo "asked: $*";; esac\n'
    )
    path.chmod(0o755)
    return path


def _run(out: Path, directory: Path, **more: str) -> None:
    """Run the script with the played Python in ``directory``."""
    environment = {**os.environ, "PYTHON": str(_played_python(directory)), "PATH": f"{directory}:{os.environ['PATH']}"}
    environment |= {"LIMIT_S": "600", "REHEARSE": "", **more}
    completed = subprocess.run(
        ["bash", str(RUN), str(out)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.fixture
def ran(tmp_path: Path) -> list[str]:
    _run(tmp_path / "out", tmp_path)
    return (tmp_path / "out" / "steps.csv").read_text().splitlines()[1:]


def test_a_step_that_fails_stops_none_of_those_after_it(ran: list[str]) -> None:
    codes = dict(line.split(",")[:2] for line in ran)
    assert codes["01-doctor"] == "3"
    assert all(code == "0" for step, code in codes.items() if step != "01-doctor")
    for step in (
        "01-ceilings",
        "02-plain",
        "05-counted",
        "05-float16",
        "04-shares-resnet50",
        "04-triple",
        "06-igniter-bert_base",
        "08-calibrate",
    ):
        assert step in codes


def test_at_least_eight_architectures_are_profiled(ran: list[str]) -> None:
    steps = [line.split(",")[0] for line in ran]
    assert len([step for step in steps if step.startswith(("02-profile-", "05-profile-"))]) >= 8
    assert max(map(steps.index, [step for step in steps if step.startswith("02-build-")])) < steps.index(
        "02-profile-bert_base"
    )
    order = ["02-plain", "02-profile-bert_base", "04-triple", "05-counted", "05-profile-vgg19", "05-float16"]
    order += [
        "06-igniter-resnet50",
        "07-batches-vgg19",
        "07-with-ncu",
        "07-counted-bert_base",
        "08-calibrate",
        "08-check",
    ]
    assert [step for step in steps if step in order] == order


def _read_log(out: Path, step: str) -> str:
    return (out / f"{step}.log").read_text()


def test_efficientnet_b7_has_no_batch_above_16_and_nothing_is_measured_again(tmp_path: Path, ran: list[str]) -> None:
    out = tmp_path / "out"
    for step in ("05-profile-efficientnet_b7", "07-batches-efficientnet_b7"):
        assert "64" not in _read_log(out, step)
    assert "--batch 1,4,16,32,64" in _read_log(out, "02-profile-resnet50")
    assert all(
        "--keep-unstable" in _read_log(out, step) for step in ("02-profile-resnet50", "04-triple", "07-batches-vgg19")
    )
    assert "--share 10,20,30,50,70 " in _read_log(out, "04-shares-resnet50")  # the whole was measured without MPS


def test_what_is_packed_is_copied_where_it_is_asked_for(tmp_path: Path) -> None:
    _run(tmp_path / "out", tmp_path, COPY_TO=str(tmp_path / "back"))
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["gpu-run.tar.gz.aa"]


def test_where_no_client_of_mps_starts_no_row_tries_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run(out, tmp_path, MPS_CODE="1")
    steps = [line.split(",")[0] for line in (out / "steps.csv").read_text().splitlines()[1:]]
    assert "04-mps" in steps and "05-profile-vgg19" in steps
    assert not [step for step in steps if step.startswith(("04-shares", "04-pair", "04-triple", "06-"))]


def test_what_went_well_or_failed_by_itself_is_not_run_again(tmp_path: Path, ran: list[str]) -> None:
    def again(**more: str) -> set[str]:
        before = len((tmp_path / "out" / "steps.csv").read_text().splitlines())
        _run(tmp_path / "out", tmp_path, **more)
        return {line.split(",")[0] for line in (tmp_path / "out" / "steps.csv").read_text().splitlines()[before:]}

    assert again() == LAST
    assert again(RETRY="1") == {"01-doctor", *LAST}


def test_what_was_packed_is_gone_on_with_elsewhere(tmp_path: Path, ran: list[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    _run(elsewhere, tmp_path, RESUME=str(tmp_path / "out" / "packed"))
    steps = [line.split(",")[0] for line in (elsewhere / "steps.csv").read_text().splitlines()[1 + len(ran) :]]
    assert {step for step in steps if not step.startswith("02-build-")} == LAST
    assert (elsewhere / "models" / "resnet50.onnx").exists()  # made again: models are not packed


def test_without_time_every_step_is_skipped_and_said_to_be(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run(out, tmp_path, LIMIT_S="60")
    lines = (out / "steps.csv").read_text().splitlines()[1:]
    assert {line for line in lines if not line.startswith("08-")} >= {"01-doctor,skipped,0", "01-ceilings,skipped,0"}
    assert sorted(path.name for path in (out / "packed").iterdir()) == ["gpu-run.tar.gz.aa"]


def _tables(**rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    run = {"run_id": "r", "device": "h200", "provider": "CUDAExecutionProvider", "collector": "cupti"}
    model = {
        "run_id": "r", "model": "net", "device": "h200", "batch": 1, "sm_share_pct": 100.0, "mig_profile": None,
        "processes": 1, "runtime": "onnxruntime", "precision": "tf32", "dispatch_ms": 0.5, "latency_mean_ms": 2.0,
        "client_sms": 132, "error": None, "execution": "fused",
    }  # fmt: skip
    plain: dict[str, list[dict[str, Any]]] = {"runs": [run], "models": [model], "kernels": [], "colocations": []}
    return {name: [{**plain[name][0], **row} for row in rows[name]] if name in rows else plain[name] for name in plain}


def test_the_check_after_a_run_finds_what_did_not_happen_there() -> None:
    assert find_wrong_rows(_tables()) == {}
    half = {"sm_share_pct": 50.0, "client_sms": 66}
    assert find_wrong_rows(_tables(models=[{}, half])) == {}
    wrong: list[tuple[dict[str, list[dict[str, Any]]], str]] = [
        (_tables(runs=[{"provider": "CPUExecutionProvider"}]), "of the CPU's provider under a GPU's name"),
        (_tables(models=[{}, {"runtime": "pytorch", "batch": 2}]), "of two runtimes in one database"),
        (_tables(models=[{"precision": "int64"}]), "with the precision of an input instead of the arithmetic's"),
        (_tables(models=[{"dispatch_ms": 2.5}]), "with a gap between launches that is longer than the batch"),
        (_tables(models=[{}, {}, {}]), "measured again within the run"),
        (_tables(models=[{"batch": 16}] * 2), "measured again within the run"),
        (_tables(models=[{}, {**half, "client_sms": 132}]), "whose client got other SMs than its share"),
    ]
    for tables, rule in wrong:
        assert find_wrong_rows(tables) == {rule: 1}
    nothing = {
        **_tables(),
        "kernels": [{"achieved_occupancy_pct": None, "launch_occupancy_pct": 0.0, "duration_ns": 5}],
    }
    assert find_wrong_rows(nothing) == {"of kernels that ran and occupied nothing": 1}
