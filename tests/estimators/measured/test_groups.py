"""What failed beside others rules out whatever holds it, for estimators, policies and the check alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import gpuprof
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import ColocationRow, ModelRow
from gpuprof.kernel_db.store import KernelDb
from tests.estimators.rows import database, measured_row, two_layers

V100 = device("v100")
HALF = Share(50.0)
MEMORY, OUTPUTS = "out of memory", "wrong outputs under its share"


def make_group(error: str | None = MEMORY, run_id: str = "r1") -> ColocationRow:
    """Return what ``profile a --batch 4 --share 50 --beside b@2:50`` writes."""
    row = ColocationRow(run_id, V100.name, 0, 0, "a", 4, "b:2:50%", sm_share_pct=50.0, error=error)
    return replace(row, latency_mean_ms=9.0, solo_latency_mean_ms=8.0) if error is None else row


def make_rows() -> list[ModelRow]:
    return [
        measured_row(model, batch, (2.0 + batch) * 100.0 / share, device=V100.name, share=share, memory=2**30)
        for model in "ab"
        for batch in (1, 2, 4, 8)
        for share in (25.0, 50.0, 100.0)
    ]


def write(folder: Path, *groups: ColocationRow) -> KernelDb:
    return database(folder, make_rows(), colocations=groups)


@pytest.mark.parametrize("name", ["database", "usher"])
@pytest.mark.parametrize(
    ("asked", "beside", "reason", "is_refused"),
    [
        (Workload("a", 4, HALF), [Workload("b", 2, HALF)], MEMORY, True),
        (Workload("b", 2, HALF), [Workload("a", 4, HALF)], MEMORY, True),
        (Workload("a", 8, HALF), [Workload("b", 8, Share(25.0))], MEMORY, True),
        (Workload("a", 4, HALF), [Workload("a", 1, Share(25.0)), Workload("b", 2, Share(25.0))], MEMORY, True),
        (Workload("a", 2, HALF), [Workload("b", 2, HALF)], MEMORY, False),
        (Workload("a", 4, HALF), [Workload("b", 1, HALF)], MEMORY, False),
        (Workload("a", 4, HALF), [Workload("a", 4, HALF)], MEMORY, False),
        (Workload("a", 4, HALF), [], MEMORY, False),
        (Workload("a", 4, Share()), [Workload("b", 2, HALF)], MEMORY, True),
        (Workload("a", 4, Share()), [Workload("b", 2, HALF)], OUTPUTS, False),
        (Workload("a", 4, Share(25.0)), [Workload("b", 2, HALF)], OUTPUTS, True),
    ],
)
def test_whatever_holds_what_failed_together_is_refused(
    tmp_path: Path, name: str, asked: Workload, beside: list[Workload], reason: str, is_refused: bool
) -> None:
    estimator = make_estimator(name, write(tmp_path / "db", make_group(reason)))
    try:
        estimator.estimate(asked.model, V100, asked.batch, asked.share, beside)
        message = ""
    except InputError as error:
        message = str(error)
    assert ("failed on v100" in message) == is_refused, message


def test_what_ran_together_afterwards_does_not_count_as_failed(tmp_path: Path) -> None:
    db = write(tmp_path / "db", make_group())
    database(tmp_path / "db", colocations=[make_group(None, "r2")], run_id="r2")
    estimate = DatabaseEstimator(db).estimate("a", V100, 4, HALF, [Workload("b", 2, HALF)])
    assert estimate.latency_ms.value == pytest.approx(12.0 * 9.0 / 8.0)


@pytest.mark.parametrize("policy", ["optimal", "ffd", "igniter", "gpulet", "gslice"])
def test_no_policy_puts_beside_one_another_what_failed_together(tmp_path: Path, policy: str) -> None:
    demands = [Demand("a", 150.0, Slo(100.0)), Demand("twin", 150.0, Slo(100.0), source_model="b")]
    small = replace(make_group(), batch=1, beside="b:1:50%")
    apart = gpuprof.place(demands, fleet="v100", db=write(tmp_path / "failed", small).path, policy=policy)
    together = gpuprof.place(demands, fleet="v100", db=write(tmp_path / "ran").path, policy=policy)
    assert together.deployment.predicted.gpus == 1
    assert apart.deployment.predicted.gpus == 2
    assert not apart.deployment.unplaced
    assert gpuprof.check(apart.deployment, db=tmp_path / "failed").is_sound


def test_the_check_refuses_a_map_whose_neighbours_failed_together(tmp_path: Path) -> None:
    demands = [Demand("a", 150.0, Slo(100.0)), Demand("twin", 150.0, Slo(100.0), source_model="b")]
    deployment = gpuprof.place(demands, fleet="v100", db=write(tmp_path / "ran").path).deployment
    assert gpuprof.check(deployment, db=tmp_path / "ran").is_sound
    small = replace(make_group(), batch=1, beside="b:1:50%")
    violations = gpuprof.check(deployment, db=write(tmp_path / "failed", small).path).violations
    assert [violation.message for violation in violations if violation.rule == "failed"] == [
        "a at batch 1 under 50% beside twin at batch 1 under 50% failed on v100: out of memory"
    ]


def test_what_failed_under_another_name_counts_for_the_same_file(tmp_path: Path) -> None:
    file = two_layers(tmp_path / "renamed.onnx")
    failed = replace(_failed_row(), model_sha256=load_graph(file, 1).sha256)
    rows = [replace(row, model_sha256=failed.model_sha256) for row in make_rows() if row.model == "a"]
    whole = [replace(row, max_occupancy_pct=10.0) for row in rows if row.sm_share_pct == 100.0]
    db = database(tmp_path / "db", [*whole, failed])
    estimator = make_estimator("usher", db, {"renamed": file})
    assert estimator.estimate("renamed", V100, 2, HALF).latency_ms.value > 0.0
    with pytest.raises(InputError, match=r"renamed at batch 8 .* is ruled out: a at batch 4 under 50%"):
        estimator.estimate("renamed", V100, 8, HALF)


def _failed_row() -> ModelRow:
    return replace(measured_row("a", 4, 1.0, device=V100.name, share=50.0), latency_mean_ms=None, error=MEMORY)
