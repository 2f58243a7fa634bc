"""What ops were measured to take, as merging asks for it."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuprof.kernel_db.schema import OpRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run
from gpuprof.machine.cpu import local_cpu
from gpuprof.pipeline.merge import read_op_seconds


def _row(run: str, digest: str, batch: int, name: str, position: int, **more: object) -> OpRow:
    values = {"sm_share_pct": 100.0, "duration_p50_ns": 1000 * batch} | more
    return OpRow(
        run,
        "m",
        local_cpu().name,
        batch,
        position,
        name,
        "MatMul",
        "s",
        model_sha256=digest,
        **values,  # type: ignore[arg-type]
    )


def test_curves_are_those_of_the_largest_share_and_last_run_by_names_that_say_which(tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    db = KernelDb.create(tmp_path / "db")
    rows = [_row("r1", digest, batch, "one", 0) for batch in (1, 2)]
    rows += [_row("r1", digest, 1, "fused", 1, duration_p50_ns=None)]
    rows += [_row("r1", digest, 1, "twice", position) for position in (2, 3)]
    rows += [_row("r1", digest, 1, "one", 0, sm_share_pct=50.0, duration_p50_ns=9000)]
    rows += [_row("r1", "another file", 1, "other", 0)]
    device = local_cpu().name
    for run, ops in (("r1", rows), ("r2", [_row("r2", digest, 2, "one", 0, duration_p50_ns=1500)])):
        db.append(Run(RunRow(run, datetime(2026, 1, int(run[1]), tzinfo=UTC), device, "test", "net"), ops=ops))
    curves = read_op_seconds(db, local_cpu(), [model, tmp_path / "gone.onnx"])
    assert curves == {(digest, "one"): {1: pytest.approx(1e-6), 2: pytest.approx(1.5e-6)}, (digest, "fused"): {1: 0.0}}
    assert read_op_seconds(None, local_cpu(), [model]) == {}
