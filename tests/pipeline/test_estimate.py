from __future__ import annotations

from pathlib import Path

import pytest
from onnx import helper

import gpuprof
from gpuprof.domain.estimate import MEASURED, Estimate, Figure
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.pipeline.estimate import describe_full_occupancy
from tests.profiling.models import write_mlp
from tests.small_models import write_model


@pytest.fixture
def mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUPROF_DB", raising=False)
    return write_mlp(tmp_path / "mlp.onnx")


def test_text_and_types_of_shares_and_neighbours_mean_the_same(mlp: Path) -> None:
    by_text = gpuprof.estimate([mlp], device="a100-80", share="50", beside=[f"{mlp}@1:50"])
    typed = gpuprof.estimate(
        [mlp], device="a100-80", share=Share(50.0), beside=[gpuprof.Workload(str(mlp), 1, Share(50.0))]
    )
    assert by_text == typed
    assert by_text.rows()[0]["beside"] == "mlp@1:50%"


def test_a_neighbour_without_a_share_gets_what_is_left(mlp: Path) -> None:
    assert gpuprof.estimate([mlp], device="a100-80", share="60", beside=[str(mlp)]).beside[0].share == Share(40.0)
    with pytest.raises(InputError, match="leave nothing of the device"):
        gpuprof.estimate([mlp], device="a100-80", beside=[str(mlp)])


def test_the_frame_has_a_row_for_each_batch_and_the_notebook_shows_it(mlp: Path) -> None:
    result = gpuprof.estimate([mlp], batches=(1, 4), device="a100-80")
    assert result.to_frame()["batch"].tolist() == [1, 4]
    assert result._repr_html_().count("<tr") == 3
    with pytest.raises(InputError, match=r"batches of EstimateOptions must be"):
        gpuprof.estimate([mlp], batches=(0,), device="a100-80")


def test_by_default_a_model_is_estimated_at_the_batch_that_it_fixes(tmp_path: Path, mlp: Path) -> None:
    fixed = write_model(tmp_path / "fixed.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": [8, 64]}, {"y": None})
    estimates = gpuprof.estimate([fixed, mlp], device="a100-80").estimates
    assert [estimate.workload.batch for estimate in estimates] == [8, 1]


def test_a_named_database_in_which_nothing_stands_is_told_and_a_directory_of_others_refused(
    tmp_path: Path, mlp: Path
) -> None:
    (tmp_path / "db").mkdir()
    demand = gpuprof.Demand(str(mlp), rate_rps=10.0, slo=gpuprof.Slo(50.0))
    for notes in (
        gpuprof.estimate([mlp], db=tmp_path / "db", device="l4").notes,
        gpuprof.place([demand], fleet="l4", db=tmp_path / "db").notes,
    ):
        assert any("db is empty: nothing in it was measured" in note for note in notes)
    with pytest.raises(
        InputError, match=r"unknown model 'mlp': nothing was measured, and it is no file \(give an ONNX"
    ):
        gpuprof.estimate(["mlp"], db=tmp_path / "db", device="l4")
    (tmp_path / "db" / "notes.txt").touch()
    with pytest.raises(InputError, match=r"db is no kernel database: it holds notes\.txt and no run"):
        gpuprof.estimate([mlp], db=tmp_path / "db", device="l4")


@pytest.mark.parametrize(
    ("second", "source", "is_told"), [(100.0, MEASURED, True), (60.0, MEASURED, False), (100.0, "roofline", False)]
)
def test_a_maximum_occupancy_that_is_full_everywhere_is_told(second: float, source: str, is_told: bool) -> None:
    estimates = [
        Estimate(
            gpuprof.Workload("net", batch, Share()),
            "h200",
            Figure(1.0, source),
            creq_pct=(("max_occupancy", Figure(value, source)), ("wavg_occupancy", Figure(30.0, source))),
        )
        for batch, value in ((1, 100.0), (4, second))
    ]
    notes = describe_full_occupancy(estimates)
    assert bool(notes) == is_told and all("maximum occupancy is 100% for all 2" in note for note in notes)
