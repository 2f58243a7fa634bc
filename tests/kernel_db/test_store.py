from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import arrow_schema
from gpuprof.kernel_db.store import KernelDb, merge_segments, new_run_id
from tests.kernel_db.rows import a_run


@pytest.mark.parametrize(
    ("where", "runs"),
    [
        ({}, "0123"),
        ({"model": "m1", "batch": (2, 4)}, "13"),
        ({"mig_profile": ["3g.40gb", None]}, "0123"),
        ({"batch": []}, ""),
        ({"batch": [1, 4]}, "03"),
        ({"mig_profile": None, "model": "m0"}, "02"),
        ({"mig_profile": "3g.40gb"}, ""),
        ({"model": "none"}, ""),
    ],
)
def test_rows_are_filtered_and_columns_come_in_the_order_that_was_asked_for(
    tmp_path: Path, where: dict[str, object], runs: str
) -> None:
    database = KernelDb.create(tmp_path / "db")
    assert database.read_table("models").num_rows == 0 and not (tmp_path / "db").exists()  # before the first run
    for number in range(4):
        database.append(a_run(f"r{number}", model=f"m{number % 2}", batch=number + 1))
    rows = database.read_table("models", ["latency_mean_ms", "run_id"], where)
    assert rows.column_names == ["latency_mean_ms", "run_id"]
    assert rows.column("run_id").to_pylist() == [f"r{number}" for number in runs]


def test_duckdb_reads_the_files_without_gpuprof(tmp_path: Path) -> None:
    import duckdb

    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    database.append(a_run("r2"))
    files = f"{tmp_path}/db/*/models.parquet"
    result = duckdb.connect().execute("select count(*), sum(latency_mean_ms) from read_parquet(?)", [files])
    assert result.fetchall() == [(2, 3.0)]


def test_a_database_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not exist \(gpuprof profile"):
        KernelDb(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a directory"):
        KernelDb(tmp_path / "file")
    with pytest.raises(InputError, match="file is not a directory"):
        KernelDb.create(tmp_path / "file" / "db")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir(mode=0o500)
    with pytest.raises(InputError, match="not writable"):
        KernelDb.create(tmp_path / "db")


def test_a_failing_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(InputError, match="no space left on device"):
        database.append(a_run("r2"))
    assert [path.name for path in database.path.iterdir() if path.is_dir()] == ["r1"]


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, damage: str) -> None:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    database.append(a_run("r2"))
    file = database.path / "r2" / "models.parquet"
    content = file.read_bytes()
    file.write_bytes({"cut": content[: len(content) // 2], "garbage": b"x" * 500, "empty": b""}[damage])
    with pytest.raises(InputError) as caught:
        database.read_table("models")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_dead_writer_left_is_cleared_but_not_beside_a_live_one(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    leftover = database.path / ".tmp-r9"
    leftover.mkdir()
    with database.writing():
        KernelDb.create(database.path)
        assert leftover.exists()
    KernelDb.create(database.path)
    assert not leftover.exists()
    assert database.read_table("models").num_rows == 1


def test_run_ids_sort_by_time_and_never_meet() -> None:
    first = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    later = datetime(2026, 1, 2, 3, 4, 5, 7, tzinfo=UTC)
    assert new_run_id(first) < new_run_id(later)
    assert len({new_run_id(first) for _ in range(100)}) == 100


def test_a_single_flipped_bit_in_the_data_is_found(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1", kernels=500))
    file = database.path / "r1" / "kernels.parquet"
    column = pq.ParquetFile(file).metadata.row_group(0).column(arrow_schema("kernels").get_field_index("start_ns"))
    content = bytearray(file.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0x10
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"r1/kernels\.parquet is damaged"):
        database.read_table("kernels")


def test_a_negative_batch_in_a_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    database.append(a_run("r2", batch=-1))
    with pytest.raises(InputError, match=r"r2/models\.parquet is damaged: batch must be at least 1 but is -1"):
        database.read_table("models")


def test_a_run_that_is_there_already_is_refused_even_after_it_was_compacted(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    database.append(a_run("r2"))
    merge_segments(database)
    with pytest.raises(InputError, match="run r1 is in the kernel database"):
        database.append(a_run("r1"))
    assert database.read_table("models").num_rows == 2


def test_a_reader_whose_segments_are_compacted_away_reads_them_where_they_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = KernelDb.create(tmp_path / "db")
    for number in range(3):
        database.append(a_run(f"r{number}"))
    list_segments = KernelDb.segments

    def list_and_compact(self: KernelDb) -> list[Path]:
        segments = list_segments(self)
        monkeypatch.setattr(KernelDb, "segments", list_segments)
        merge_segments(KernelDb(self.path))
        return segments

    monkeypatch.setattr(KernelDb, "segments", list_and_compact)
    assert database.read_table("models").num_rows == 3


def test_whoever_reads_tables_of_few_rows_imports_no_pandas(tmp_path: Path) -> None:
    KernelDb.create(tmp_path / "db").append(a_run("r1"))
    code = """
import sys
from pathlib import Path
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import DeviceRow, ModelRow
from gpuprof.kernel_db.store import KernelDb
database = KernelDb(Path(sys.argv[1]))
read_records(database, DeviceRow, {"device": "v100"})
print(len(read_records(database, ModelRow, {"run_id": "r1", "mig_profile": None})), "pandas" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "db")]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["1", "False"]
