"""A few of the kinds of models that bench.model_families takes from file to server."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import model_families
from bench.model_families import KINDS, FamilyOutcome, render_table, take_kinds
from bench.model_kinds.odd import ODD
from gpuprof.errors import InputError
from gpuprof.graph.load import load_runnable, only_batch
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
            load_runnable(path, only_batch(path) or 1, dims=kind.dims)
        except InputError as error:
            assert error.fix, f"{kind.name}: {error}"


def test_the_table_has_what_became_of_each() -> None:
    rows = [FamilyOutcome("a", 1.25, 0.5, 2, 40, 40), FamilyOutcome("b", remark="profile: no | such op")]
    lines = render_table(rows).splitlines()
    assert lines[2] == "| a | 1.25 | 0.5 | 2 | 40 of 40 |  |"
    assert lines[3] == "| b | – | – | – | – | profile: no \\| such op |"
    assert [row.is_served for row in rows] == [True, False]
    assert [row.is_settled for row in rows] == [True, True]
    assert not FamilyOutcome("c", 1.0, 1.0, 1, remark="place: bug: KeyError: 'c'").is_settled


def test_a_command_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_families, "_LIMIT_S", 0.01)
    with pytest.raises(model_families.CommandRefusedError, match=r"zoo: it did not end within 0\.01 s"):
        model_families.run_command(tmp_path, "zoo", "list")


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
