from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from gpuprof.kernel_db.schema import arrow_schema
from gpuprof.kernel_db.store import KernelDb
from gpuprof.kernel_db.verification import verify
from tests.kernel_db.rows import a_run


def _database(path: Path) -> KernelDb:
    database = KernelDb.create(path)
    database.append(a_run("r1", kernels=500))
    database.append(a_run("r2", kernels=500))
    return database


def test_a_whole_database_has_no_problems(tmp_path: Path) -> None:
    assert verify(_database(tmp_path / "db")) == []


def test_a_single_flipped_bit_in_the_data_is_found(tmp_path: Path) -> None:
    database = _database(tmp_path / "db")
    file = database.path / "r1" / "kernels.parquet"
    column = pq.ParquetFile(file).metadata.row_group(0).column(arrow_schema("kernels").get_field_index("start_ns"))
    content = bytearray(file.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0x10
    file.write_bytes(content)
    (problem,) = verify(database)
    assert problem.path == file
    assert not problem.is_harmless


def test_a_missing_runs_table_and_strange_rows_are_found(tmp_path: Path) -> None:
    database = _database(tmp_path / "db")
    (database.path / "r1" / "runs.parquet").unlink()
    problems = verify(database)
    assert {problem.path.name for problem in problems} == {"r1", "models.parquet", "ops.parquet", "kernels.parquet"}


def test_a_copied_run_is_found_twice(tmp_path: Path) -> None:
    import shutil

    database = _database(tmp_path / "db")
    shutil.copytree(database.path / "r1", database.path / "r3")
    assert any("which is in r1 too" in problem.what for problem in verify(database))


def test_leftovers_are_harmless_and_repair_removes_them(tmp_path: Path) -> None:
    database = _database(tmp_path / "db")
    (database.path / ".tmp-r8").mkdir()
    (problem,) = verify(database)
    assert problem.is_harmless
    assert verify(database, repair=True) == []
    assert not (database.path / ".tmp-r8").exists()
