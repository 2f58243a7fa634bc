"""Models whose ops cannot be known without running them: measured, planned from that and never estimated otherwise."""

import re
from pathlib import Path

import pytest

import gpuprof
from gpuprof.kernel_db.store import KernelDb
from tests.small_models import write_classifier

pytestmark = pytest.mark.slow

REASON = "node scaled .*Scaler.* of domain ai.onnx.ml gives, cannot be inferred, so that nothing can be estimated"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with such a model and the database of it.

    It is measured anew where the machine stood still during a batch: no map may rest on times that vary so much.
    """
    for _ in range(6):
        folder = tmp_path_factory.mktemp("unread")
        result = _measure(folder)
        rows = KernelDb(folder / "db").read_table("models").to_pylist()
        kinds = ("latency", "latency_paused")
        if all(
            (row[f"{kind}_std_ms"] or 0.0) <= 5.0 * (row[f"{kind}_mean_ms"] or 0.0) for row in rows for kind in kinds
        ):
            break
    assert any("measured as a whole" in note and "Scaler" in note for note in result.notes)
    return folder


def _measure(folder: Path) -> gpuprof.ProfileResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuprof.pipeline.profile.measure_serving", lambda database, device, note: None)
        return gpuprof.profile(
            [write_classifier(folder / "classes.onnx")],
            batches=(1, 4),
            shares=("1core",),
            device="cpu",
            db=folder / "db",
            settings=gpuprof.ProfileSettings(time_limit_s=0.2, keep_unstable=True),
        )


@pytest.fixture
def measured_database(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder / "db"


def test_what_was_measured_is_an_estimate_by_name_and_by_file(measured_database: Path, folder: Path) -> None:
    rows = KernelDb(measured_database).read_table("models").to_pylist()
    assert [(row["batch"], row["flops"], row["weight_bytes"]) for row in rows] == [(1, None, None), (4, None, None)]
    for model in ("classes", str(folder / "classes.onnx")):
        result = gpuprof.estimate([model], batches=(1, 2, 4), share="1core", device="cpu", db=measured_database)
        # On a busy machine rows are marked unstable.
        sources = [str(row["latency_source"]).removeprefix("unstable, ") for row in result.rows()]
        assert sources == ["measured", "interpolated", "measured"]


def test_place_plans_what_was_measured_and_says_why_not_the_rest(measured_database: Path, folder: Path) -> None:
    demands = folder / "slo.csv"
    demands.write_text("model,rate_rps,slo_ms\nclasses.onnx,5,200\n")
    placed = gpuprof.place(demands, db=measured_database)
    assert {row["model"] for row in placed.rows()} == {"classes"}
    refused = gpuprof.place(demands, db=measured_database, fleet="a100-80", output=gpuprof.MapOutput(best_effort=True))
    assert re.search(REASON, " ".join(refused.notes))
