"""A few of the kinds of models that bench.model_families takes from file to server."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench import model_families
from bench.model_families import KINDS, FamilyOutcome, render_table, take_kinds, write_demand
from bench.model_kinds import Kind
from bench.model_kinds.odd import ODD
from gpuprof.domain.demand import read_demands
from gpuprof.errors import InputError
from gpuprof.graph.load import load_runnable, read_fixed_batch
from tests.reruns import serves_in_real_time


def test_every_kind_has_a_name_of_its_own_and_a_file() -> None:
    names = [kind.name for kind in (*KINDS, *ODD)]
    assert len(names) == len(set(names)) >= 31 + 40


def test_every_odd_model_is_read_or_refused_with_a_remedy(tmp_path: Path) -> None:
    unwritten = {"weights of 128 MB inside", "chain of 5,000 nodes"}  # they take seconds
    for kind in ODD:
        if kind.name in unwritten:
            continue
        path = tmp_path / "model.onnx"
        kind.build(path)
        try:
            load_runnable(path, read_fixed_batch(path) or 1, dims=kind.dims)
        except InputError as error:
            assert error.fix, f"{kind.name}: {error}"


def test_the_table_has_what_became_of_each() -> None:
    rows = [
        FamilyOutcome("a", 1.25, 0.5, 2, 40, 40),
        FamilyOutcome("b", remark="profile: no | such op"),
        FamilyOutcome("c", 1.0, 1.0, remark="place: too large"),
        FamilyOutcome("d", 1.0, 1.0, 4, remark="serve: no such type"),
        FamilyOutcome("e", remark="profile: it did not end", is_retry_limit_reached=True),
    ]
    lines = render_table(rows).splitlines()
    assert lines[2] == "| a | served | 1.25 | 0.5 | 2 | 40 of 40 |  |"
    assert lines[3] == "| b | refused | – | – | – | – | profile: no \\| such op |"
    assert [row.became for row in rows[2:]] == ["measured, refused later", "planned, refused later", "too slow"]
    assert [row.is_served for row in rows] == [True, False, False, False, False]
    assert [row.is_settled for row in rows] == [True, True, True, True, False]
    assert not FamilyOutcome("c", 1.0, 1.0, 1, remark="place: bug: KeyError: 'c'").is_settled


def test_a_kind_that_does_not_end_is_given_up_and_the_command_is_named(tmp_path: Path) -> None:
    (outcome,) = take_kinds(ODD[:1], tmp_path, tmp_path / "models", limit_s=0.01)
    assert outcome.is_retry_limit_reached and outcome.became == "too slow"
    assert outcome.remark.startswith("profile: it did not end in the ")


def test_what_a_command_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_on = "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); child.wait()"
    )
    monkeypatch.setattr(model_families, "_ENDING_S", 0.1)
    with subprocess.Popen(
        [sys.executable, "-c", kept_on], stdout=-1, stderr=-1, text=True, start_new_session=True
    ) as one:
        assert one.stdout is not None
        child = psutil.Process(int(one.stdout.readline()))
        model_families.end_command(one)
    assert one.returncode == -signal.SIGKILL
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.timeout(900)  # six commands a kind, each a process of its own
@serves_in_real_time
def test_kinds_are_served_or_refused_with_the_true_reason(tmp_path: Path) -> None:
    pytest.importorskip("skl2onnx")
    wanted = ("If", "scikit-learn, numbers and texts", "sequence as input", "shape decided by a value that is sent")
    kinds = [kind for kind in KINDS if kind.name in wanted]
    found = {one.kind: one for one in take_kinds(kinds, tmp_path, tmp_path / "models")}
    branch, pipeline, sequence, resized = (found[name] for name in (wanted[0], wanted[1], wanted[2], wanted[3]))
    assert branch.is_served and branch.estimated_ms is not None and branch.remark == ""
    assert pipeline.is_served and pipeline.estimated_ms is None
    assert (
        pipeline.remark.startswith("estimate: ") and "of domain ai.onnx.ml gives, cannot be inferred" in pipeline.remark
    )
    assert not sequence.is_served and "input parts is of kind sequence, not a tensor" in sequence.remark
    assert not resized.is_served and "Resize" in resized.remark and "--input-data" in resized.remark


def test_a_demand_of_several_sizes_is_one_field_of_the_file(tmp_path: Path) -> None:
    kind = Kind("cache", lambda path: None, {"S": 4, "P": 12})
    write_demand(kind, tmp_path / "m.onnx", 1.0, tmp_path / "slo.csv")
    (demand,) = read_demands(tmp_path / "slo.csv")
    assert demand.dims == "P=12,S=4"
