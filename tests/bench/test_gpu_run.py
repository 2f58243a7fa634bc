"""The run on a GPU: its script, and what stands in for a GPU when it is rehearsed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.rehearsal import kernels
from gpuprof.profiling.gpu.kineto_trace import read_kineto
from gpuprof.profiling.nsight.ncu_report import read_ncu_csv
from gpuprof.profiling.timeline.kernel_join import join_kernels

ROOT = Path(__file__).parents[2]
RUN = ROOT / "bench" / "gpu" / "run.sh"


def _event(name: str, start: float, duration: float, kind: str = "cpu_op") -> dict[str, object]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 7, "tid": 7, "ts": start, "dur": duration, "args": {}}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    events = [_event("gpuprof-run", 0, 100, "user_annotation"), _event("gpuprof-node:y", 5, 90, "user_annotation")]
    events += [_event("aten::linear", 10, 50), _event("aten::addmm", 20, 30), _event("aten::relu", 70, 10)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_operators_that_call_no_other_become_kernels_of_their_node(trace: Path) -> None:
    kernels.add_kernels(str(trace))
    timeline = read_kineto(trace).measured()
    assert [name.split("::")[1].split("<")[0] for name in timeline.kernels["name"]] == ["addmm_kernel", "relu_kernel"]
    assert timeline.kernels["range"].tolist() == ["gpuprof-node:y"] * 2
    assert timeline.copies["direction"].tolist() == ["h2d", "d2h"]


def test_what_the_played_ncu_counts_joins_the_timeline_kernel_by_kernel(trace: Path, tmp_path: Path) -> None:
    kernels._write_csv(tmp_path / "ncu.csv", kernels.leaves(json.loads(trace.read_text())["traceEvents"]))
    kernels.add_kernels(str(trace))
    joined, unmatched = join_kernels(
        read_kineto(trace).measured().kernels.drop(columns="achieved_occupancy_pct"),
        read_ncu_csv(tmp_path / "ncu.csv").kernels,
    )
    assert not unmatched and joined["joined"].tolist() == ["both"] * 2
    assert joined["achieved_occupancy_pct"].tolist() == [37.5] * 2


def _played_python(directory: Path) -> Path:
    """A Python that says what it was asked, fails at one verb, and starts the real one for scripts."""
    path = directory / "python"
    path.write_text(
        f"#!/bin/sh\n"
        f'case "$*" in *local_gpus*) echo gpu cupti cupti+ncu;; -c*) exec {sys.executable} "$@";;\n'
        f'*"zoo build"*) touch "$7";; *" doctor"*) exit 3;; *) echo "asked: $*";; esac\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def ran(tmp_path: Path) -> list[str]:
    environment = {**os.environ, "PYTHON": str(_played_python(tmp_path)), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {"LIMIT_S": "600", "REHEARSE": ""}
    out = tmp_path / "out"
    done = subprocess.run(["bash", str(RUN), str(out)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return (out / "steps.csv").read_text().splitlines()[1:]


def test_a_step_that_fails_stops_none_of_those_after_it(ran: list[str]) -> None:
    codes = dict(line.split(",")[:2] for line in ran)
    assert codes["01-doctor"] == "3"
    assert all(code == "0" for step, code in codes.items() if step != "01-doctor")
    for step in ("01-ceilings", "02-counted", "03-shares-bert_base", "03-triple", "04-calibrate-3", "02-per-op"):
        assert step in codes


def test_at_least_eight_architectures_are_profiled(ran: list[str]) -> None:
    steps = [line.split(",")[0] for line in ran]
    assert len([step for step in steps if step.startswith("02-profile-")]) >= 8
    assert steps.index("03-triple") < steps.index("04-calibrate-1") < steps.index("02-profile-vgg19")


def test_what_went_well_is_not_run_again_and_the_rest_is(tmp_path: Path, ran: list[str]) -> None:
    environment = {**os.environ, "PYTHON": str(tmp_path / "python"), "REHEARSE": ""}
    out = tmp_path / "out"
    subprocess.run(["bash", str(RUN), str(out)], env=environment, capture_output=True, check=True, timeout=120)
    again = (out / "steps.csv").read_text().splitlines()[1 + len(ran) :]
    assert {line.split(",")[0] for line in again} == {"01-doctor", "06-verify", "06-compact"}


def test_without_time_every_step_is_skipped_and_said_to_be(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": str(_played_python(tmp_path)), "LIMIT_S": "60", "REHEARSE": ""}
    out = tmp_path / "out"
    subprocess.run(["bash", str(RUN), str(out)], env=environment, capture_output=True, check=True, timeout=120)
    lines = (out / "steps.csv").read_text().splitlines()[1:]
    assert {line for line in lines if not line.startswith("06-")} >= {"01-doctor,skipped,0", "01-ceilings,skipped,0"}
    assert sorted(path.name for path in (out / "packed").iterdir()) == ["gpu-run.tar.gz.aa"]
