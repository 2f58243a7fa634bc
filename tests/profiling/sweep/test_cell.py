from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gpuprof.domain.sizes import describe_sizes
from gpuprof.kernel_db.schema import RunRow
from gpuprof.profiling.sweep.cell import DATA_SHA256, Cell, CellKey
from tests.profiling.models import write_mlp
from tests.profiling.requests import CPU, a_job


def _run_of(cell: Cell) -> RunRow:
    job = cell.job
    run = RunRow("r1", datetime(2026, 1, 1, tzinfo=UTC), CPU.name, "test", job.graph.name, job.graph.sha256)
    return replace(
        run, batch=job.graph.batch, sm_share_pct=job.share.sm_pct, processes=job.processes,
        dims=describe_sizes(job.graph.sizes), beside=cell.describe_neighbours() or None,
    )  # fmt: skip


def test_a_run_of_a_cell_has_its_key_and_another_beside_or_of_other_inputs_has_not(tmp_path: Path) -> None:
    job = a_job(write_mlp(tmp_path / "net.onnx"))
    alone, beside = Cell(job), Cell(job, (job,))
    run = _run_of(alone)
    assert CellKey.of_run(run, {}) == CellKey.of_cell(alone)
    assert CellKey.of_run(_run_of(beside), {}) == CellKey.of_cell(beside) != CellKey.of_cell(alone)
    assert CellKey.of_run(replace(run, settings=f'{{"{DATA_SHA256}": "other"}}'), {}) != CellKey.of_cell(alone)
    assert CellKey.of_run(replace(run, sm_share_pct=50.0), {}) != CellKey.of_cell(alone)


def test_a_run_without_sizes_was_at_those_that_are_assumed_for_its_file(tmp_path: Path) -> None:
    run = replace(_run_of(Cell(a_job(write_mlp(tmp_path / "net.onnx")))), dims=None)
    assert CellKey.of_run(run, {str(run.model_sha256): "seq=128"}).dims == "seq=128"
    assert CellKey.of_run(run, {"another": "seq=128"}).dims == ""
