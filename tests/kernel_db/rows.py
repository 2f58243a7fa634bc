"""Small runs to put into databases under test."""

from datetime import UTC, datetime
from pathlib import Path

from gpuprof.kernel_db.schema import TABLES, KernelRow, ModelRow, OpRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def make_database(path: Path, *run_ids: str) -> KernelDb:
    """Return a new database of runs."""
    database = KernelDb.create(path)
    for run_id in run_ids:
        database.append(a_run(run_id))
    return database


def a_run(run_id: str = "r1", model: str = "net", batch: int = 1, kernels: int = 3) -> Run:
    return Run(
        RunRow(run_id, START, "cpu", "ort", model, batch=batch),
        models=[ModelRow(run_id, model, "cpu", batch, latency_mean_ms=1.5, stable=True)],
        ops=[OpRow(run_id, model, "cpu", batch, 0, "n0", "Conv", "s0", flops=10)],
        kernels=[
            KernelRow(run_id, model, "cpu", batch, "CPU:Conv", i, op_type="Conv", start_ns=10 * i, duration_ns=7)
            for i in range(kernels)
        ],
    )


def assert_sound(database: KernelDb) -> None:
    """Check that every run is there once, every row belongs to a run, and nothing is left behind."""
    tables = {table: database.read_table(table).column("run_id").to_pylist() for table in TABLES}
    assert len(tables["runs"]) == len(set(tables["runs"]))
    assert all(set(run_ids) <= set(tables["runs"]) for run_ids in tables.values())
    assert not list(database.path.glob(".tmp-*")) and not database.replaced_segments()
