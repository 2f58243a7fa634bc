"""What is said of a model at sizes of its free dimensions: measured, between, beyond, and asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpuprof.domain.estimate import EXTRAPOLATED, INTERPOLATED, MEASURED, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import ColocationRow, ModelRow, workload_label
from tests.estimators.rows import CPU, database, measured_row
from tests.small_models import write_text_model

WHOLE = Share()


def at(seq: int, batch: int, latency_ms: float, **more: object) -> ModelRow:
    return replace(measured_row("text", batch, latency_ms, **more), dims=f"seq={seq}")  # type: ignore[arg-type]


@pytest.fixture
def rows(tmp_path: Path) -> list[ModelRow]:
    path = write_text_model(tmp_path / "text.onnx")
    file = {"path": str(path), "sha256": load_graph(path).sha256}
    return [
        at(seq, batch, 1.0 + 0.01 * seq * batch, memory=1000 * seq, std_ms=0.1, repeats=25, **file)
        for seq in (64, 256)
        for batch in (1, 4)
    ]


@pytest.fixture
def estimator(tmp_path: Path, rows: list[ModelRow]) -> DatabaseEstimator:
    return DatabaseEstimator(database(tmp_path / "db", rows))


def test_each_size_has_what_was_measured_of_it(estimator: DatabaseEstimator) -> None:
    assert estimator.models == ("text[seq=256]", "text[seq=64]")
    estimate = estimator.estimate("text[seq=64]", CPU, 4, WHOLE)
    assert (estimate.latency_ms.value, estimate.latency_ms.source) == (3.56, MEASURED)
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value == 64_000


def test_between_measured_sizes_stands_the_line_as_over_the_batch(estimator: DatabaseEstimator) -> None:
    estimate = estimator.estimate("text[seq=160]", CPU, 4, WHOLE)
    assert estimate.latency_ms.value == pytest.approx(7.4)
    assert estimate.latency_ms.source == INTERPOLATED
    assert estimate.latency_ms.low is not None and estimate.latency_ms.low < 7.4 < estimate.latency_ms.upper()
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value == pytest.approx(160_000)
    both = estimator.estimate("text[seq=160]", CPU, 2, WHOLE).latency_ms
    assert both.value == pytest.approx(1.0 + 0.01 * 160 * 2)
    assert both.source == INTERPOLATED
    assert estimator.batches("text[seq=160]", CPU, WHOLE) == (1, 4)


def test_beyond_measured_sizes_the_op_costs_carry_the_nearest_over_and_the_interval_is_wide(
    estimator: DatabaseEstimator,
) -> None:
    estimate = estimator.estimate("text[seq=1024]", CPU, 1, WHOLE)
    nearest = estimator.estimate("text[seq=256]", CPU, 1, WHOLE)
    assert estimate.latency_ms.source == EXTRAPOLATED
    assert estimate.latency_ms.value > 3.0 * nearest.latency_ms.value
    assert estimate.latency_ms.low is not None and estimate.latency_ms.upper() / estimate.latency_ms.low > 2.0
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value > 256_000


def test_without_the_file_nothing_is_said_beyond_measured_sizes(tmp_path: Path, rows: list[ModelRow]) -> None:
    lost = DatabaseEstimator(database(tmp_path / "lost", [replace(row, model_path="gone.onnx") for row in rows]))
    assert lost.estimate("text[seq=128]", CPU, 1, WHOLE).latency_ms.source == INTERPOLATED
    with pytest.raises(InputError, match=r"measured on cpu-test-4c at seq=256 and seq=64, .*--dim seq=1024"):
        lost.estimate("text[seq=1024]", CPU, 1, WHOLE)
    with pytest.raises(InputError, match=r"measured at seq=64 and at seq=256: say which"):
        lost.estimate("text[width=3]", CPU, 1, WHOLE)


def test_where_several_sizes_were_measured_none_is_guessed(estimator: DatabaseEstimator) -> None:
    with pytest.raises(InputError, match=r"text was measured at seq=64 and at seq=256: say which .*--dim seq=SIZE"):
        estimator.estimate("text", CPU, 1, WHOLE)


def test_where_one_size_was_measured_it_is_taken_and_said(tmp_path: Path, rows: list[ModelRow]) -> None:
    estimator = DatabaseEstimator(database(tmp_path / "one", [row for row in rows if row.dims == "seq=64"]))
    assert estimator.estimate("text", CPU, 1, WHOLE).latency_ms.value == pytest.approx(1.64)
    assert estimator.known.describe_sizes("text") == "text: seq=64 as it was measured; another size: --dim seq=SIZE"
    assert estimator.known.describe_sizes("text[seq=64]") is None
    assert estimator.known.find_model("text").sizes == (("seq", 64),)


def test_rows_of_older_databases_are_of_the_usual_size(tmp_path: Path, rows: list[ModelRow]) -> None:
    old = [replace(row, dims=None) for row in rows if row.dims == "seq=64"]
    estimator = DatabaseEstimator(database(tmp_path / "old", old))
    assert estimator.estimate("text", CPU, 1, WHOLE).latency_ms.value == pytest.approx(1.64)
    assert estimator.estimate("text[seq=128]", CPU, 1, WHOLE).latency_ms.source == MEASURED
    assert estimator.estimate("text[seq=64]", CPU, 1, WHOLE).latency_ms.source == EXTRAPOLATED


def test_a_file_is_known_by_its_content_at_its_sizes(tmp_path: Path, rows: list[ModelRow]) -> None:
    copy = tmp_path / "copy.onnx"
    copy.write_bytes((tmp_path / "text.onnx").read_bytes())
    estimator = DatabaseEstimator(database(tmp_path / "db", rows), {"mine": copy})
    assert estimator.estimate("mine[seq=64]", CPU, 1, WHOLE).latency_ms.source == MEASURED
    assert estimator.estimate("mine[seq=128]", CPU, 1, WHOLE).latency_ms.source == INTERPOLATED
    assert estimator.known.list_dims("mine") == ("seq",)
    with pytest.raises(InputError, match="no free dimension 'width'"):
        estimator.estimate("mine[width=64]", CPU, 1, WHOLE)


def test_what_failed_at_a_size_is_ruled_out_at_larger_ones(tmp_path: Path, rows: list[ModelRow]) -> None:
    failed = replace(rows[-1], latency_mean_ms=None, error="out of memory", dims="seq=512", memory_peak_bytes=None)
    estimator = DatabaseEstimator(database(tmp_path / "db", [*rows, failed]))
    with pytest.raises(InputError, match="out of memory"):
        estimator.estimate("text[seq=1024]", CPU, 4, WHOLE)
    assert estimator.estimate("text[seq=256]", CPU, 4, WHOLE).latency_ms.source == MEASURED
    assert (
        estimator.known.find_model("text[seq=1024]").tried_runs("text[seq=1024]").failed[0].workload.model
        == "text[seq=1024]"
    )


def test_what_ran_beside_a_size_is_found_by_it(tmp_path: Path, rows: list[ModelRow]) -> None:
    label = workload_label("text[seq=64]", 1, 50.0, None, 1)
    row = ColocationRow(
        "r1", CPU.name, 0, 0, "text", 1, label, 50.0, latency_mean_ms=3.0, solo_latency_mean_ms=2.0, dims="seq=64"
    )
    half = [replace(whole, sm_share_pct=50.0) for whole in rows]
    estimator = DatabaseEstimator(database(tmp_path / "db", half, colocations=[row]))
    neighbour = Workload("text[seq=64]", 1, Share(50.0))
    beside = estimator.estimate("text[seq=64]", CPU, 1, Share(50.0), [neighbour]).latency_ms
    assert beside.value == pytest.approx(1.5 * 1.64)
