from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import SCHEMA_VERSION, VERSION_KEY
from gpuprof.kernel_db.store import KernelDb, migrate_table
from tests.kernel_db.rows import a_run, assert_sound


def _as_version(file: Path, version: int) -> None:
    pq.write_table(pq.read_table(file).replace_schema_metadata({VERSION_KEY: str(version).encode()}), file)


def test_a_newer_version_is_refused_with_the_fix(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    _as_version(database.path / "r1" / "models.parquet", SCHEMA_VERSION + 1)
    with pytest.raises(InputError, match=r"models\.parquet has version .* \(upgrade gpuprof\)"):
        database.read_table("models")


def test_a_strangers_parquet_file_is_refused(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    pq.write_table(pa.table({"a": [1]}), database.path / "r1" / "models.parquet")
    with pytest.raises(InputError, match="was not written by gpuprof"):
        database.read_table("models")


def test_rows_of_version_2_say_what_their_runs_said_of_the_runtime(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    runs: dict[str, dict[str, Any]] = {
        "r1": {"runtime": "onnxruntime", "provider": "CPUExecutionProvider", "precision": "int64"},
        "r2": {"runtime": "torch", "provider": "TorchCUDA", "precision": "float32"},
        "r3": {"runtime": None, "provider": None, "precision": None},
    }
    expected = {
        "r1": ("onnxruntime", "fused", "float32"),  # whole numbers are what the model takes, not what it computes in
        "r2": ("pytorch", "eager", None),  # whether in TF32 was left to PyTorch
        "r3": (None, None, None),
    }
    for run_id, fields in runs.items():
        run = a_run(run_id)
        database.append(replace(run, run=replace(run.run, **fields)))
        for table in ("runs", "models", "ops", "kernels"):
            file = database.path / run_id / f"{table}.parquet"
            if table != "runs":
                content = pq.read_table(file).drop_columns(["runtime", "execution", "precision"])
                pq.write_table(content, file)
            _as_version(file, 2)
    for table in ("models", "ops", "kernels"):
        rows = database.read_table(table, ["run_id", "runtime", "execution", "precision"]).to_pylist()
        assert {row["run_id"]: (row["runtime"], row["execution"], row["precision"]) for row in rows} == expected
    assert_sound(database)


def test_occupancies_that_version_4_estimated_leave_the_column_of_counters() -> None:
    rows = {
        "run_id": ["r"] * 4,
        "joined": ["both", "counters", None, None],
        "start_ns": [0, None, 5, None],  # of a timeline alone, and of counters alone
        "achieved_occupancy_pct": [10.0, 20.0, 30.0, 40.0],
    }
    old = pa.table(rows).replace_schema_metadata({VERSION_KEY: b"4"})
    new = migrate_table("kernels", old, "kernels.parquet")
    assert new.column("achieved_occupancy_pct").to_pylist() == [10.0, 20.0, None, 40.0]
    assert new.column("launch_occupancy_pct").to_pylist() == [None, None, 30.0, None]
